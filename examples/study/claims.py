"""What the paper claims, beside what was measured."""

from collections.abc import Callable, Mapping
import functools
import math
import statistics
from typing import Any, NamedTuple, TypeAlias

from examples.study import render, variants
from examples.study.contenders import ADAMW, LAMB, MERIT, PAPER
from examples.study.differences import (
  Difference,
  difference,
  paired_difference,
)
from examples.study.experiments import (
  ablation,
  attention_logits,
  batch_scaling,
  clip_threshold,
  curvature,
  llama,
)
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.verdicts import (
  CONTRADICTED,
  ONE_SEED,
  Comparison,
  compare,
  judge_all,
  judge_smallest,
)

# Logits differ if they do by this factor, of few seeds.
_FACTOR = 1.1

_PAIRS = {
  'Large batch: MERIT beats LAMB (GPT-2 small, 1K: 3.280 to 3.355)': (
    MERIT, LAMB,
  ),
  'Large batch: MERIT beats AdamW (3.280 to 3.470)': (MERIT, ADAMW),
  'Large batch: LAMB beats AdamW (3.355 to 3.470)': (LAMB, ADAMW),
}  # fmt: skip


class Finding(NamedTuple):
  """A claim of the paper and what became of it.

  Attributes:
    claim: What the paper says, with its number.
    measured: What was measured.
    verdict: ``'reproduced'``, ``'partly'``, ``'contradicted'``, or what
      difference could have been seen where none was.
  """

  claim: str
  measured: str
  verdict: str


Judge: TypeAlias = Callable[[Any, Scale], list[Finding]]
"""Function from what an experiment found out to the claims on it."""


def table(outcomes: Mapping[str, Any], scale: Scale) -> str:
  """Returns the claims whose experiments are complete, as a table, or ''."""
  judges: dict[str, Judge] = {'batch-scaling': _judge_batches}
  if tuned := variants.most_tuned(outcomes):
    judges[tuned] = functools.partial(_judge_tuned, variants.TUNED[tuned])
  findings: list[Finding] = []
  for name, judge in (judges | _JUDGES).items():
    if name in outcomes:
      findings += judge(outcomes[name], scale)
  if not findings:
    return ''
  return render.markdown(
    [
      {'the paper': x.claim, 'measured': x.measured, 'verdict': x.verdict}
      for x in findings
    ]
  )


def _judge_batches(
  outcome: batch_scaling.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the claims on losses at large batch."""
  size = scale.batch_size
  compared = _judge_pairs(outcome, size, f'here batch {size}')
  return [*compared, _judge_largest_batch(outcome, scale, 'as at 480')]


def _judge_tuned(
  tuned: str, outcome: variants.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the same of optimizers of which more is tuned."""
  points = variants.judged(outcome)
  also = f'with {tuned} tuned too'
  compared = [
    finding
    for size in scale.batch_sizes[-2:]
    for finding in _judge_pairs(points, size, f'here batch {size}, {also}')
  ]
  largest = _judge_largest_batch(points, scale, f'as at 480; here {also}')
  return [*compared, largest]


def _judge_pairs(
  points: batch_scaling.Outcome, size: int, where: str
) -> list[Finding]:
  return [
    _compare(
      f'{claim}; {where}', points[first.name, size], points[second.name, size]
    )
    for claim, (first, second) in _PAIRS.items()
  ]


def _compare(
  claim: str, first: Point, second: Point, comparison: Comparison = difference
) -> Finding:
  found = comparison(first, second)
  return Finding(
    claim,
    f'{first.name} {_format(first)}, {second.name} {_format(second)}: {found}',
    compare(first, second, comparison),
  )


def _format(point: Point) -> str:
  edge = (
    ' (learning rate at the edge of its tuning)'
    if point.tuned.is_at_edge
    else ''
  )
  return render.format_point(point) + edge


def _judge_largest_batch(
  outcome: batch_scaling.Outcome, scale: Scale, where: str
) -> Finding:
  largest = {
    name: size
    for name, size in batch_scaling.largest_batches(outcome).items()
    if name in _NAMES
  }
  others = [size for name, size in largest.items() if name != MERIT.name]
  ends = scale.batch_sizes[0], scale.batch_sizes[-1]
  grown = {
    name: outcome[name, ends[1]].mean - outcome[name, ends[0]].mean
    for name in _NAMES
  }
  return Finding(
    'MERIT keeps its loss up to larger batches (GPT-2 medium: as good at 6K '
    f'{where})',
    f'within {batch_scaling.TOLERANCE:g} nats of its own best up to batch '
    + ', '.join(f'{size} ({name})' for name, size in largest.items())
    + f'; from batch {ends[0]} to {ends[1]} the loss rises by '
    + _list(grown, render.format_loss),
    judge_all(
      [largest[MERIT.name] > size for size in others],
      [largest[MERIT.name] < size for size in others],
    ),
  )


_NAMES = [x.name for x in PAPER]


def _judge_logits(
  outcome: attention_logits.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the claims on attention logits."""
  del scale

  def of(name: str, factor: int, bound: str = 'none'):
    return outcome[name, bound, factor]

  last = {
    x: [attention_logits.last_layer([result]) for result in of(x, 1)]
    for x in _NAMES
  }
  at_four = {x: attention_logits.peak(of(x, 4)) for x in _NAMES}
  lost = {
    x: [
      high.loss - usual.loss
      for high, usual in zip(of(x, 4), of(x, 1), strict=True)
    ]
    for x in _NAMES
  }
  best_adamw = {
    bound: min(
      attention_logits.mean_loss(of(ADAMW.name, k, bound))
      for k in attention_logits.FACTORS
    )
    for bound in ('none', 'QK-norm')
  }
  return [
    Finding(
      'MERIT has the smallest attention logits in deep layers (GPT-2 medium, '
      'layer 12: AdamW 560, LAMB 450, MERIT 122)',
      'last layer, tuned learning rates: '
      + _list({x: max(y) for x, y in last.items()}, render.format_logit),
      judge_smallest(last, _is_larger_logit),
    ),
    Finding(
      'MERIT keeps attention logits bounded, where others let them explode',
      'largest at 4 times the tuned learning rates: '
      + _list(at_four, render.format_logit),
      _judge_bounded(at_four),
    ),
    Finding(
      'So MERIT is the more stable at high learning rates',
      'loss at 4 times the tuned learning rate over that at the tuned one: '
      + _list(
        {x: statistics.mean(y) for x, y in lost.items()}, render.format_loss
      ),
      judge_smallest(lost, lambda x, y: x > y),
    ),
    Finding(
      'QK-norm hurts AdamW at large batch',
      'the best of 1, 2 and 4 times the learning rate: '
      + ', '.join(
        f'{render.format_loss(x)} (bound: {bound})'
        for bound, x in best_adamw.items()
      ),
      ONE_SEED,
    ),
  ]


def _judge_bounded(peaks: dict[str, float]) -> str:
  """Returns the verdict on the claim that MERIT alone has bounded logits."""
  exploded = {
    name: peak > attention_logits.EXPLODED for name, peak in peaks.items()
  }
  if exploded[MERIT.name]:
    return CONTRADICTED
  others = [exploded[x.name] for x in (ADAMW, LAMB)]
  return judge_all(others, [not x for x in others])


def _is_larger_logit(x: float, y: float) -> bool:
  return x > y * _FACTOR


def _list(values: dict[str, float], form: Callable[[float], str]) -> str:
  return ', '.join(f'{name} {form(value)}' for name, value in values.items())


def _judge_parts(outcome: ablation.Outcome, scale: Scale) -> list[Finding]:
  """Returns the claims of the ablation."""
  del scale
  full, arms = outcome
  claims = {
    'Row- and column-wise ratios help (3.280 to 3.304 without)': (
      ablation.WEIGHT_ONLY
    ),
    'Maxima beat l2 norms (3.280 to 3.312)': 'l2 norms, element-wise',
    'The clip helps (3.280 to about 3.32 without)': 'no clip',
    'The weight-wise floor helps (3.280 to 3.35 or more without)': (
      'no weight-wise floor'
    ),
  }
  return [
    _compare(claim, full, arms[arm], paired_difference)
    for claim, arm in claims.items()
  ]


def _judge_clip(outcome: clip_threshold.Outcome, scale: Scale) -> list[Finding]:
  """Returns the claim on how often the clip binds."""
  del scale
  most = clip_threshold.largest_share(outcome[1, 1.0])
  return [
    Finding(
      'The clip binds rarely: its share peaks at 12 % (layer 6)',
      'largest share of a layer at diagnostics steps: '
      + clip_threshold.format_share(most),
      judge_all([most <= 0.12], [most > 0.12]),
    ),
  ]


def _judge_flatness(outcome: curvature.Outcome, scale: Scale) -> list[Finding]:
  """Returns the claim that MERIT ends in flatter minima than AdamW."""
  return [
    finding
    for size in curvature.sizes(scale)[1:]
    for finding in _judge_flatness_at(outcome, size)
  ]


def _judge_flatness_at(outcome: curvature.Outcome, size: int) -> list[Finding]:
  found = {
    title: curvature.factor(
      *(outcome[x.name, size].values(name) for x in (ADAMW, MERIT))
    )
    for name, title in curvature.QUANTITIES.items()
  }
  # The paper has no measure that is free of the scale of the weights.
  free = {x: found.pop(x) for x in (curvature.SCALE_FREE,)}
  claims = {
    'MERIT ends in flatter minima than AdamW (top eigenvalue of the Hessian '
    f'37.2 to 12.3, trace 12,995 to 3,445); here batch {size}': found,
    'The same by an eigenvalue that does not depend on the scale of the '
    f'weights (not in the paper); here batch {size}': free,
  }
  return [_judge_factors(claim, x) for claim, x in claims.items()]


def _judge_factors(claim: str, found: dict[str, Difference]) -> Finding:
  """Returns whether AdamW's values are larger than MERIT's, by all of them."""
  is_known = all(not math.isnan(x.high) for x in found.values())
  return Finding(
    claim,
    'AdamW over MERIT: '
    + ', '.join(
      f'{title} {curvature.format_factor(x)}' for title, x in found.items()
    ),
    judge_all(
      [x.low > 0 for x in found.values()], [x.high < 0 for x in found.values()]
    )
    if is_known
    else 'no verdict: one seed, or seeds diverged',
  )


def _judge_llama(outcome: llama.Outcome, scale: Scale) -> list[Finding]:
  """Returns the claims on Llama."""
  size = scale.batch_sizes[-1]
  numbers = {LAMB.name: '3.265', ADAMW.name: '3.277'}
  return [
    _compare(
      f'Llama: MERIT beats {other} (130M, 1K: 3.199 to {number}); here '
      f'batch {size}',
      outcome.points[llama.LLAMA, MERIT.name],
      outcome.points[llama.LLAMA, other],
    )
    for other, number in numbers.items()
  ]


_JUDGES: dict[str, Judge] = {
  'attention-logits': _judge_logits,
  'ablation': _judge_parts,
  'clip-threshold': _judge_clip,
  'curvature': _judge_flatness,
  'llama': _judge_llama,
}
