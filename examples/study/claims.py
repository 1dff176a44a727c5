"""What the paper claims, beside what was measured."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from examples.study import attention_logits, batch_scaling
from examples.study.clip_threshold import shares
from examples.study.points import Point
from examples.study.render import markdown, shown_point
from examples.study.scales import Scale

# A difference counts if it exceeds this many standard errors, and this many
# nats, which the choice of a learning rate on a grid may cost.
_ERRORS = 2.0
_LEAST = 0.005
_REPRODUCED, _PARTLY = 'reproduced', 'partly'
_NOT_HERE, _CONTRADICTED = 'not at this scale', 'contradicted'


class Finding(NamedTuple):
  """A claim of the paper and what became of it.

  Attributes:
    claim: What the paper says, with its figure.
    measured: What was measured.
    verdict: One of four.
  """

  claim: str
  measured: str
  verdict: str


def table(outcomes: Mapping[str, Any], scale: Scale) -> str:
  """Returns the claims whose experiments have been made, as a table, or ''."""
  findings: list[Finding] = []
  for name, judge in _JUDGES.items():
    if name in outcomes:
      findings += judge(outcomes[name], scale)
  if not findings:
    return ''
  return markdown(
    [
      {'the paper': x.claim, 'measured': x.measured, 'verdict': x.verdict}
      for x in findings
    ]
  )


def compare(first: Point, second: Point) -> str:
  """Returns the verdict on the claim that the first loss is the lower one."""
  if not (math.isfinite(first.mean) and math.isfinite(second.mean)):
    is_lower = math.isfinite(first.mean) and not math.isfinite(second.mean)
    return _REPRODUCED if is_lower else _NOT_HERE
  error = math.hypot(
    *(point.std / math.sqrt(len(point.losses)) for point in (first, second))
  )
  margin = max(_ERRORS * error, _LEAST)
  difference = first.mean - second.mean
  if difference < -margin:
    return _REPRODUCED
  return _CONTRADICTED if difference > margin else _NOT_HERE


def _of_batches(outcome: batch_scaling.Outcome, scale: Scale) -> list[Finding]:
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
      f'{first} {shown_point(at[first])}, {second} {shown_point(at[second])}',
      compare(at[first], at[second]),
    )
    for claim, (first, second) in pairs.items()
  ]
  return [*compared, _of_largest_batch(outcome)]


def _of_largest_batch(outcome: batch_scaling.Outcome) -> Finding:
  largest = batch_scaling.largest_batches(outcome)
  beaten = [largest['MERIT'] > largest[name] for name in ('AdamW', 'LAMB')]
  lost = [largest['MERIT'] < largest[name] for name in ('AdamW', 'LAMB')]
  return Finding(
    'MERIT keeps its loss up to larger batches (GPT-2 medium: as good at 6K as '
    'at 480)',
    'within 0.02 nats of its own best up to batch '
    + ', '.join(f'{size} ({name})' for name, size in largest.items()),
    _judge_all(beaten, lost),
  )


def _judge_all(held: list[bool], failed: list[bool]) -> str:
  """Returns the verdict on a claim of several parts."""
  if all(held):
    return _REPRODUCED
  if any(held):
    return _PARTLY
  return _CONTRADICTED if any(failed) else _NOT_HERE


def _of_logits(
  outcome: attention_logits.Outcome, scale: Scale
) -> list[Finding]:
  """Returns the claims on attention logits."""
  del scale
  peaks = {
    name: attention_logits.peak(outcome[name, 1])
    for name in ('AdamW', 'LAMB', 'MERIT')
  }
  last = {name: layers[-1] for name, layers in peaks.items()}
  others = (last['AdamW'], last['LAMB'])
  largest = {name: max(layers) for name, layers in peaks.items()}
  doubled = {
    name: max(attention_logits.peak(outcome[name, 4])) for name in peaks
  }
  return [
    Finding(
      'MERIT has the smallest attention logits in deep layers (GPT-2 medium, '
      'layer 12: AdamW 560, LAMB 450, MERIT 122)',
      'last layer, tuned rates: ' + _listed(last),
      _judge_all(
        [last['MERIT'] < x / 1.1 for x in others],
        [last['MERIT'] > x * 1.1 for x in others],
      ),
    ),
    Finding(
      'MERIT bounds attention logits, so that higher rates stay stable',
      f'largest of all layers, tuned rates: {_listed(largest)}; at 4 times '
      f'those: {_listed(doubled)}',
      _judge_all(
        [doubled['MERIT'] < doubled[x] / 1.1 for x in ('AdamW', 'LAMB')],
        [doubled['MERIT'] > doubled[x] * 1.1 for x in ('AdamW', 'LAMB')],
      ),
    ),
  ]


def _listed(values: dict[str, float]) -> str:
  return ', '.join(f'{name} {value:,.0f}' for name, value in values.items())


def _of_parts(outcome: Any, scale: Scale) -> list[Finding]:
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
      f'{shown_point(full)}, {arm}: {shown_point(arms[arm])}',
      compare(full, arms[arm]),
    )
    for claim, arm in claims.items()
  ]


def _of_clip(outcome: Any, scale: Scale) -> list[Finding]:
  """Returns the claim on how often the clip binds."""
  del scale
  _, result = outcome[1.0]
  most = max(max(layer) for layer in shares(result))
  return [
    Finding(
      'The clip binds rarely: its share peaks at 12 % (layer 6)',
      f'largest share of a layer over training: {most:.1%}',
      _REPRODUCED if most <= 0.12 else _CONTRADICTED,
    )
  ]


_JUDGES = {
  'batch-scaling': _of_batches,
  'attention-logits': _of_logits,
  'ablation': _of_parts,
  'clip-threshold': _of_clip,
}
