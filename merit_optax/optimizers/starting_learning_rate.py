"""Learning rates to start at."""

import math
from types import MappingProxyType
from typing import Literal

from merit_optax._internal.arguments import check_count

# Learning rate times the root of the number of steps.
_RATE_TIMES_ROOT = MappingProxyType(
  {'merit': 0.4, 'lamb': 0.45, 'muon': 0.5, 'muon_hyperball': 1.25}
)
_FEWEST_STEPS = 150
_WIDTH = 64


def starting_learning_rate(
  optimizer: Literal['merit', 'lamb', 'muon', 'muon_hyperball'],
  steps: int,
  width: int | None = None,
) -> float:
  r"""Returns a peak learning rate to start a search at.

  It is a constant over the root of the number of steps, with two digits:

  - 0.4 for ``'merit'``, :func:`merit_optax.merit`, and 0.45 for ``'lamb'``,
    :func:`optax.lamb`: measured at a width of 64, in 153 to 2,441 steps, and
    within a factor of 2 of the best at a width of 384, in 236 steps;
  - 0.5 (64 / width)\ :sup:`1/4` for ``'muon'``, :func:`merit_optax.muon`:
    measured at widths of 64 and 384, and by modded-nanogpt at 768 (0.0045 in
    3,250 steps, in the units of :func:`merit_optax.muon`);
  - 1.25 for ``'muon_hyperball'``, :func:`merit_optax.muon_hyperball`: measured
    at 64, by modded-nanogpt at 768, and by Marin at 512 to 1,024.

  Elsewhere it is a guess. Fewer than 150 steps get the rate of 150.

  Args:
    optimizer: Name of an optimizer, one of those above.
    steps: Number of steps of the run, >= 1.
    width: Features of the residual stream, >= 1. Muon needs it; the other rates
      do not depend on it.

  Returns:
    The learning rate at the end of the warm-up.

  Raises:
    ValueError: If there is no such name, if ``steps`` or ``width`` is no
      integer >= 1, or if Muon has no ``width``.

  Examples:
    >>> import merit_optax
    >>> merit_optax.starting_learning_rate('muon_hyperball', 2400)
    0.026
    >>> merit_optax.starting_learning_rate('muon', 3250, width=768)
    0.0047
  """
  if not isinstance(optimizer, str) or optimizer not in _RATE_TIMES_ROOT:
    raise ValueError(
      f'optimizer must be one of {list(_RATE_TIMES_ROOT)}, got {optimizer!r}.'
    )
  check_count('steps', steps)
  if width is None and optimizer == 'muon':
    raise ValueError("'muon' needs width, the features of the residual stream.")
  if width is not None:
    check_count('width', width)
  rate = _RATE_TIMES_ROOT[optimizer] / math.sqrt(max(steps, _FEWEST_STEPS))
  if width is not None and optimizer == 'muon':
    rate *= (_WIDTH / width) ** 0.25
  return float(f'{rate:.2g}')
