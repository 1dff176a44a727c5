"""Checks of arguments, made when a transform is built and not inside jit."""

from collections.abc import Callable
import math
import numbers
from typing import Any

import jax
import numpy as np


def check_number(
  name: str, value: Any, accepted: str, holds: Callable[[float], bool]
) -> None:
  """Checks one numeric argument.

  Args:
    name: Name of the argument, for the message.
    value: What the caller gave. JAX arrays pass unread: under
      ``optax.inject_hyperparams`` they are tracers, which have no value yet.
    accepted: Description of the accepted values, for the message.
    holds: Whether a finite number is accepted.

  Raises:
    ValueError: If ``value`` is not a number, or not an accepted one.
  """
  if isinstance(value, jax.Array):
    return
  number = value
  if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
    number = value.item()  # Of bfloat16 too, which is no numbers.Real.
  is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
  try:
    is_accepted = is_number and math.isfinite(number) and holds(number)
  except OverflowError:  # An integer beyond the largest float.
    is_accepted = False
  if not is_accepted:
    raise ValueError(f'{name} must be {accepted}, got {value!r}.')


def is_integer(value: Any) -> bool:
  """Returns whether a value is an integer, and no boolean."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_at_least_zero(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is a number in [0, inf)."""
  check_number(name, value, 'a finite number >= 0', lambda x: x >= 0)


def check_above_zero(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is a number in (0, inf)."""
  check_number(name, value, 'a finite number > 0', lambda x: x > 0)


def check_decay_rate(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is a number in [0, 1)."""
  check_number(name, value, 'a number in [0, 1)', lambda x: 0 <= x < 1)


def check_learning_rate(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is callable or a finite number."""
  accepted = 'a finite number or a schedule (steps -> number)'
  if not callable(value):
    check_number(name, value, accepted, lambda x: True)


def check_weight_decay(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless ``value`` is callable or in [0, inf)."""
  accepted = 'a finite number >= 0 or a schedule (steps -> number)'
  if not callable(value):
    check_number(name, value, accepted, lambda x: x >= 0)
