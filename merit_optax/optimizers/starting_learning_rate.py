"""Learning rates to start at."""

import math
from types import MappingProxyType

from merit_optax._internal.arguments import is_integer

# Learning rate times the root of the number of steps.
_RATE_TIMES_ROOT = MappingProxyType(
  {'merit': 0.4, 'lamb': 0.45, 'muon': 0.5, 'muon_hyperball': 1.25}
)
_FEWEST_STEPS = 150


def starting_learning_rate(optimizer: str, steps: int) -> float:
  r"""Returns a peak learning rate to start at, by the number of steps.

  It is a constant over the root of the number of steps, with two digits. The
  constant is

  - 0.4 for ``'merit'``, :func:`merit_optax.merit`;
  - 0.45 for ``'lamb'``, :func:`optax.lamb`;
  - 0.5 for ``'muon'``, :func:`merit_optax.muon`, or :func:`optax.contrib.muon`
    with ``consistent_rms=0.2``;
  - 1.25 for ``'muon_hyperball'``, :func:`merit_optax.muon_hyperball`.

  The best rates of the documentation's study, in runs of 153 to 2,441 steps of
  a GPT-2 with 0.2 million parameters (batches of 16 to 256 sequences of 64
  tokens, a linear warm-up over 10 % of the steps, then a cosine to zero; a b1
  of 0.9, with Muon and Hyperball 0.95) lie within a factor of 1.5 of it. With a
  beta of 0.8 or a longer warm-up, those of Muon were up to twice as high, and
  up to four times with everything tuned. Outside of that range, it is a guess:
  fewer than 150 steps get the rate of 150.

  Args:
    optimizer: Name of an optimizer, one of those above.
    steps: Number of steps of the run, >= 1.

  Returns:
    The learning rate at the end of the warm-up.

  Raises:
    ValueError: If there is no such name, or ``steps`` is no integer >= 1.

  Examples:
    >>> import merit_optax
    >>> merit_optax.starting_learning_rate('muon_hyperball', 2400)
    0.026
  """
  if not isinstance(optimizer, str) or optimizer not in _RATE_TIMES_ROOT:
    raise ValueError(
      f'optimizer must be one of {list(_RATE_TIMES_ROOT)}, got {optimizer!r}.'
    )
  if not is_integer(steps) or steps < 1:
    raise ValueError(f'steps must be an integer >= 1, got {steps!r}.')
  root = math.sqrt(max(steps, _FEWEST_STEPS))
  return float(f'{_RATE_TIMES_ROOT[optimizer] / root:.2g}')
