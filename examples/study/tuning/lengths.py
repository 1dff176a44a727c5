"""Learning rates for other lengths of training, at one batch."""

from examples.study.optimizers import Optimizer
from examples.study.points import Tuned
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, scale_rate

SHARES = (0.5, 2.0)
"""Lengths of training over that of the scale."""


def middle_batch(scale: Scale) -> int:
  """Returns the batch at which widths and lengths are varied."""
  return scale.batch_sizes[len(scale.batch_sizes) // 2]


def find_length_rates(
  scale: Scale, optimizer: Optimizer, tuned: Tuned
) -> Plan[dict[float, Tuned]]:
  """Plans to choose rates for other lengths.

  Args:
    scale: Size of the study.
    optimizer: The optimizer.
    tuned: Its tuning at the middle batch.

  Returns:
    Tunings by length over that of the scale, this one among them.
  """
  size = middle_batch(scale)
  found = yield from gather(
    {
      share: find_rate(
        scale,
        optimizer,
        size,
        start=scale_rate(tuned.learning_rate, 1 / share),
        stride=1,
        steps=scale.num_steps(size, share),
      )
      for share in SHARES
    }
  )
  return dict(sorted((found | {1.0: tuned}).items()))
