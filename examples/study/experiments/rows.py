"""What the rows of a matrix are worth: in Hyperball, and MERIT at its best."""

from examples.study.analysis import tables as t
from examples.study.chains import Chain
from examples.study.optimizers import MERIT
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan
from examples.study.tuning.rest import (
  KEPT,
  RATES,
  Relative,
  at_batches,
  with_parts,
)

TITLE = 'Rows and columns'
TEXT = """\
Hyperball with its rows treated on their own: with Muon’s update of each output
of a layer brought to the same size (balanced), with the max-norm ratio of row
or matrix, the larger one, and with MERIT’s ratios. And MERIT of hidden matrices
alone, beside an Adam with learning rates of its own for embeddings and for
gains and biases. All begin with what was best for Hyperball with the rest
tuned, or for MERIT with its decay tuned, and are tuned again: the learning
rate, warm-up, b1, initial weights, the rate of embeddings, and the decay
(Hyperball: none). Losses are those of eight fresh seeds."""
_HYPERBALL = 'Hyperball, tuned again'
_MERIT = 'MERIT, tuned again'
_RELATIVES = {
  _HYPERBALL: Relative(KEPT),
  'Hyperball, balanced': Relative(
    KEPT, with_parts('muon', 'lmo column', 'l2', 'keep l2')
  ),
  'Hyperball, ratios of rows': Relative(
    KEPT, with_parts('muon', 'row', 'l2', 'keep l2')
  ),
  'Hyperball, ratios of MERIT': Relative(
    KEPT, with_parts('muon', 'merit', 'l2', 'keep l2')
  ),
  _MERIT: Relative(MERIT.name),
  'MERIT, rest tuned': Relative(
    MERIT.name,
    lambda case: case.with_optimizer(
      chain=Chain(('adam', 'decay', 'merit', 'clip'), 'adam', 0.66)
    ),
    RATES,
  ),
}
_PAIRS = (
  *((x, _HYPERBALL) for x in _RELATIVES if x != _HYPERBALL),
  ('MERIT, rest tuned', _MERIT),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch."""
  tunings = {name: x.tune for name, x in _RELATIVES.items()}
  return at_batches(scale, scale.few_batch_sizes[-1:], tunings)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
