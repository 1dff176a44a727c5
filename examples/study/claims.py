"""What the paper claims, beside what was measured."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

from examples.study import attention_logits, batch_scaling, render
from examples.study.clip_threshold import shares
from examples.study.points import PAPER, Point
from examples.study.scales import Scale

# A difference counts if it exceeds this many standard errors (of three seeds),
# and this many nats, which a grid of learning rates by the square root of two
# may cost.
_ERRORS = 3.0
_LEAST = 0.01
# And logits, this factor.
_FACTOR = 1.1
_REPRODUCED, _PARTLY = 'reproduced', 'partly'
_NOT_HERE, _CONTRADICTED = 'not at this scale', 'contradicted'


class Finding(NamedTuple):
  """A claim of the paper and what became of it.

  Attributes:
    claim: What the paper says, with its number.
    measured: What was measured.
    verdict: ``'reproduced'``, ``'partly'``, ``'not at this scale'`` (no
      difference that counts) or ``'contradicted'``.
  """

  claim: str
  measured: str
  verdict: str


def table(outcomes: Mapping[str, Any], scale: Scale) -> str:
  """Returns the claims whose experiments are complete, as a table, or ''."""
  findings: list[Finding] = []
  for name, judge in _JUDGES.items():
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


def compare(first: Point, second: Point) -> str:
  """Returns the verdict on the claim that the first loss is the lower one."""
  has_diverged = [not math.isfinite(x.mean) for x in (first, second)]
  if any(has_diverged):
    return _judge_all([not has_diverged[0]], [not has_diverged[1]])
  error = math.hypot(
    *(point.std / math.sqrt(len(point.losses)) for point in (first, second))
  )
  difference = first.mean - second.mean
  # Of one seed, the error is not known.
  if math.isnan(error) or abs(difference) <= max(_ERRORS * error, _LEAST):
    return _NOT_HERE
  # A loser whose learning rate is at the edge might do better.
  if difference > 0:
    return _NOT_HERE if first.tuned.is_at_edge else _CONTRADICTED
  return _PARTLY if second.tuned.is_at_edge else _REPRODUCED


def _judge_batches(
  outcome: batch_scaling.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the claims on losses at large batch."""
  most = scale.largest_batch
  at = {name: point for (name, size), point in outcome.items() if size == most}
  pairs = {
    'Large batch: MERIT beats LAMB (GPT-2 small, 1K: 3.280 to 3.355)': (
      'MERIT', 'LAMB',
    ),
    'Large batch: MERIT beats AdamW (3.280 to 3.470)': ('MERIT', 'AdamW'),
    'Large batch: LAMB beats AdamW (3.355 to 3.470)': ('LAMB', 'AdamW'),
    'QK-norm hurts AdamW at large batch': ('AdamW', 'AdamW, QK-norm'),
  }  # fmt: skip
  compared = [
    Finding(
      claim,
      f'{first} {_format(at[first])}, {second} {_format(at[second])}',
      compare(at[first], at[second]),
    )
    for claim, (first, second) in pairs.items()
  ]
  return [*compared, _judge_largest_batch(outcome, scale)]


def _format(point: Point) -> str:
  edge = (
    ' (learning rate at the edge of its tuning)'
    if point.tuned.is_at_edge
    else ''
  )
  return render.format_point(point) + edge


def _judge_largest_batch(
  outcome: batch_scaling.Outcome, scale: Scale
) -> Finding:
  largest = batch_scaling.largest_batches(outcome)
  beaten = [largest['MERIT'] > largest[name] for name in ('AdamW', 'LAMB')]
  lost = [largest['MERIT'] < largest[name] for name in ('AdamW', 'LAMB')]
  ends = scale.batch_sizes[0], scale.largest_batch
  grown = {
    name: outcome[name, ends[1]].mean - outcome[name, ends[0]].mean
    for name in PAPER
  }
  return Finding(
    'MERIT keeps its loss up to larger batches (GPT-2 medium: as good at 6K as '
    'at 480)',
    f'within {batch_scaling.TOLERANCE:g} nats of its own best up to batch '
    + ', '.join(f'{size} ({name})' for name, size in largest.items())
    + f'; from batch {ends[0]} to {ends[1]} the loss rises by '
    + _list(grown, render.format_loss),
    _judge_all(beaten, lost),
  )


def _judge_all(held: list[bool], failed: list[bool]) -> str:
  """Returns the verdict on a claim of several parts."""
  if all(held) and not any(failed):
    return _REPRODUCED
  if any(held) and not all(failed):
    return _PARTLY
  return _CONTRADICTED if any(failed) else _NOT_HERE


def _judge_logits(
  outcome: attention_logits.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the claims on attention logits."""
  del scale
  peaks = {
    key: attention_logits.peak(result) for key, result in outcome.items()
  }
  last = {name: peaks[name, 1][-1] for name in PAPER}
  at_four = {name: max(peaks[name, 4]) for name in PAPER}
  lost = {name: outcome[name, 4].loss - outcome[name, 1].loss for name in PAPER}
  return [
    Finding(
      'MERIT has the smallest attention logits in deep layers (GPT-2 medium, '
      'layer 12: AdamW 560, LAMB 450, MERIT 122)',
      f'last layer, tuned learning rates: {_list(last, render.format_logit)}',
      _judge_smallest(last, _is_larger_logit),
    ),
    Finding(
      'MERIT keeps attention logits bounded, where others let them explode',
      'largest at 4 times the tuned learning rates: '
      + _list(at_four, render.format_logit),
      _judge_smallest(at_four, _is_larger_logit),
    ),
    Finding(
      'So MERIT is the more stable at high learning rates',
      'loss at 4 times the tuned learning rate over that at the tuned one: '
      + _list(lost, render.format_loss),
      _judge_smallest(lost, lambda x, y: x > y + _LEAST),
    ),
  ]


def _is_larger_logit(x: float, y: float) -> bool:
  return x > y * _FACTOR


def _judge_smallest(
  values: dict[str, float], is_larger: Callable[[float, float], bool]
) -> str:
  """Returns the verdict on the claim that MERIT has the smallest value."""
  others = [value for name, value in values.items() if name != 'MERIT']
  return _judge_all(
    [is_larger(x, values['MERIT']) for x in others],
    [is_larger(values['MERIT'], x) for x in others],
  )


def _list(values: dict[str, float], form: Callable[[float], str]) -> str:
  return ', '.join(f'{name} {form(value)}' for name, value in values.items())


def _judge_parts(outcome: Any, scale: Scale) -> list[Finding]:
  """Returns the claims of the ablation."""
  del scale
  full, arms = outcome
  claims = {
    'Row- and column-wise ratios help (3.280 to 3.304 without)': (
      'weight-wise ratio only'
    ),
    'Maxima beat l2 norms (3.280 to 3.312)': 'l2 norms, element-wise',
    'The clip helps (3.280 to about 3.32 without)': 'no clip',
    'The weight-wise floor helps (3.280 to 3.35 or more without)': (
      'no weight-wise floor'
    ),
  }
  return [
    Finding(
      claim,
      f'{_format(full)}, {arm}: {_format(arms[arm])}',
      compare(full, arms[arm]),
    )
    for claim, arm in claims.items()
  ]


def _judge_clip(outcome: Any, scale: Scale) -> list[Finding]:
  """Returns the claim on how often the clip binds."""
  del scale
  _, result = outcome[1.0]
  most = max((x for layer in shares(result) for x in layer), default=math.nan)
  return [
    Finding(
      'The clip binds rarely: its share peaks at 12 % (layer 6)',
      'largest share of a layer at diagnostics steps: '
      + ('diverged' if math.isnan(most) else f'{most:.1%}'),
      _judge_all([most <= 0.12], [most > 0.12]),
    )
  ]


_JUDGES = {
  'batch-scaling': _judge_batches,
  'attention-logits': _judge_logits,
  'ablation': _judge_parts,
  'clip-threshold': _judge_clip,
}
