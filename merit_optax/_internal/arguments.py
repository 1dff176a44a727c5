"""Checks of arguments, made when a transform is built and not inside jit."""

from collections.abc import Callable, Iterable, Mapping
import math
import numbers
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# Shorter in the output of `help` than the types of jax and optax.
Number: TypeAlias = float | jax.Array
NumberOrSchedule: TypeAlias = Number | Callable[[Any], Any]


def number(
  name: str,
  value: Any,
  accepted: str = 'a finite number',
  holds: Callable[[float], bool] = lambda x: True,
) -> Number:
  """Returns a numeric argument as a float, or as an array of floats as it is.

  Args:
    name: Name of the argument, for the message.
    value: What the caller gave. The values of tracers pass unread, such as
      those of ``optax.inject_hyperparams`` under ``jax.jit``.
    accepted: Description of the accepted values, for the message.
    holds: Whether a finite number is accepted.

  Raises:
    ValueError: If ``value`` is not a number, or not an accepted one.
  """
  is_number = _is_number(value)
  if is_number and isinstance(value, jax.core.Tracer):
    return value
  try:
    as_float = float(jax.device_get(value)) if is_number else math.nan
  except OverflowError:  # An integer beyond the largest float.
    as_float = math.inf
  if not (math.isfinite(as_float) and holds(as_float)):
    raise ValueError(f'{name} must be {accepted}, got {value!r}.{_hint(value)}')
  # Unsigned integers would wrap where they are negated.
  is_float = isinstance(value, jax.Array) and jnp.issubdtype(
    value.dtype, jnp.floating
  )
  return value if is_float else as_float


def _hint(value: Any) -> str:
  """Returns what may have rounded a number in half precision."""
  halves = jnp.float16, jnp.bfloat16
  if not isinstance(value, jax.Array) or value.dtype not in halves:
    return ''
  return (
    ' (optax.inject_hyperparams rounds numbers to the dtype of the parameters, '
    'unless it is given hyperparam_dtype.)'
  )


def _is_number(value: Any) -> bool:
  if isinstance(value, (jax.Array, np.ndarray, np.generic)):
    is_real = any(
      jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating)
    )
    return is_real and value.shape == ()
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def at_least_zero(name: str, value: Any) -> Number:
  """Returns a number in [0, inf), or raises ``ValueError``."""
  return number(name, value, 'a finite number >= 0', lambda x: x >= 0)


def above_zero(name: str, value: Any) -> Number:
  """Returns a number in (0, inf), or raises ``ValueError``."""
  return number(name, value, 'a finite number > 0', lambda x: x > 0)


def decay_rate(name: str, value: Any) -> Number:
  """Returns a number in [0, 1), or raises ``ValueError``."""
  return number(name, value, 'a number in [0, 1)', lambda x: 0 <= x < 1)


def boolean(name: str, value: Any) -> bool:
  """Returns True or False, or raises ``ValueError``."""
  if not isinstance(value, (bool, np.bool_)):
    raise ValueError(f'{name} must be True or False, got {value!r}.')
  return bool(value)


def learning_rate(name: str, value: Any) -> Any:
  """Returns a function or a finite number, or raises ``ValueError``."""
  accepted = 'a finite number or a schedule (steps -> number)'
  return value if _is_schedule(value) else number(name, value, accepted)


def weight_decay(name: str, value: Any) -> Any:
  """Returns a function or a number in [0, inf), or raises ``ValueError``."""
  accepted = 'a finite number >= 0 or a schedule (steps -> number)'
  if _is_schedule(value):
    return value
  return number(name, value, accepted, lambda x: x >= 0)


def _is_schedule(value: Any) -> bool:
  # A class may be a dtype, in the place that AdamW has for mu_dtype.
  return callable(value) and not isinstance(value, type)


def check_optimizer(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless a value has ``init`` and ``update``."""
  if all(callable(getattr(value, x, None)) for x in ('init', 'update')):
    return
  hint = ''
  if callable(value):
    called = getattr(value, '__name__', 'the function')
    hint = f' Call it: {called}(...) returns one.'
  raise ValueError(
    f'{name} must be an optax.GradientTransformation, got {value!r}.{hint}'
  )


def is_integer(value: Any) -> bool:
  """Returns whether a value is an integer, and no boolean."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any) -> None:
  """Raises ``ValueError`` unless a value is an integer >= 1."""
  if not is_integer(value) or value < 1:
    raise ValueError(f'{name} must be an integer >= 1, got {value!r}.')


def check_mapping(name: str, patterns: Any) -> None:
  """Raises ``ValueError`` unless it maps regular expressions to values."""
  if not isinstance(patterns, Mapping):
    raise ValueError(
      f'{name} must map regular expressions to values, got {patterns!r}.'
    )
  check_patterns(name, patterns)


def check_patterns(name: str, patterns: Iterable[Any]) -> None:
  """Raises ``ValueError`` unless all are regular expressions."""
  for pattern in patterns:
    try:
      # Fails for bytes, which re.compile takes.
      re.search(pattern, '')
    except (TypeError, re.error) as error:
      raise ValueError(
        f'{name} must hold regular expressions, got {pattern!r}: {error}.'
      ) from None
