"""Warnings that point at the line of the caller."""

import sys
import warnings

_PACKAGES = {'merit_optax', 'optax', 'jax', 'flax', 'equinox'}


def warn(message: str) -> None:
  """Warns at the innermost line that belongs to none of these packages."""
  level, frame = 2, sys._getframe(1)
  while frame.f_back and _package(frame.f_globals) in _PACKAGES:
    level, frame = level + 1, frame.f_back
  warnings.warn(message, stacklevel=level)


def _package(module: dict[str, object]) -> str:
  return str(module.get('__name__')).partition('.')[0]
