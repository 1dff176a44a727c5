"""Final loss against global batch, at equal tokens."""

import math

from matplotlib.figure import Figure

from examples.study import render
from examples.study.plans import Plan, gather
from examples.study.points import PAPER, Point, find_point
from examples.study.scales import Scale

TITLE = 'Loss against batch size'
RIVALS = ('Muon', 'AdamW, QK-norm')
TOLERANCE = 0.02
"""Nats over its best that an optimizer may lose at its largest batch."""

Outcome = dict[tuple[str, int], Point]
"""Points by contender and batch size."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans all batches for the paper's optimizers, two for their rivals."""
  pairs = [(name, size) for name in PAPER for size in scale.batch_sizes]
  pairs += [(name, size) for name in RIVALS for size in scale.batch_sizes[-2:]]
  return gather({pair: find_point(scale, *pair) for pair in pairs})


def largest_batches(outcome: Outcome) -> dict[str, int]:
  """Returns each optimizer's largest batch that loses at most TOLERANCE.

  Losses are means over seeds; 0 if every batch diverged.
  """
  found = {}
  for name in PAPER:
    losses = {
      point.batch_size: point.mean
      for point in outcome.values()
      if point.name == name
    }
    limit = min(losses.values()) + TOLERANCE
    good = [size for size, x in losses.items() if x <= limit < math.inf]
    found[name] = max(good, default=0)
  return found


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the tables, and the answer to the paper's question."""
  largest = largest_batches(outcome)
  return '\n\n'.join(
    [
      _answer(outcome, scale),
      'Mean and standard deviation over seeds:',
      render.markdown([_row(outcome, scale, x) for x in (*PAPER, *RIVALS)]),
      'Largest batch whose loss is within '
      f'{TOLERANCE:g} nats of the optimizer’s own best: '
      + ', '.join(f'{name} {size}' for name, size in largest.items())
      + '.',
      'Tuned settings and all losses of the tuning, by learning rate:',
      render.markdown([_tuning_row(point) for point in outcome.values()]),
    ]
  )


def _answer(outcome: Outcome, scale: Scale) -> str:
  most = scale.largest_batch
  losses = {name: outcome[name, most] for name in (*PAPER, *RIVALS)}
  order = sorted(losses, key=lambda name: losses[name].mean)
  return (
    f'At the largest batch, {most} sequences, the order is '
    + ', '.join(
      f'{name} ({render.format_point(losses[name])})' for name in order
    )
    + '.'
  )


def _row(outcome: Outcome, scale: Scale, name: str) -> dict[str, str]:
  return {'optimizer': name} | {
    f'batch {size}': render.format_point(outcome[name, size])
    if (name, size) in outcome
    else ''
    for size in scale.batch_sizes
  }


def _tuning_row(point: Point) -> dict[str, str]:
  return {
    'optimizer': point.name,
    'batch': str(point.batch_size),
    'learning rate': render.format_learning_rate(point.tuned),
    'weight decay': f'{point.weight_decay:g}',
    'by weight decay': render.format_losses(point.decays)
    if len(point.decays) > 1
    else '',
    'by learning rate': render.format_losses(point.tuned.losses),
  }


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and over learning rate at the largest batch."""
  result, ((left, right),) = render.panels(1, 2)
  for name, color in render.COLORS.items():
    own = [p for p in outcome.values() if p.name == name]
    drawn = [p for p in own if math.isfinite(p.mean)]
    left.errorbar(
      [p.batch_size for p in drawn],
      [p.mean for p in drawn],
      [p.std for p in drawn],
      fmt='o-',
      capsize=3,
      color=color,
      label=name,
    )
    render.draw_tuning(
      right, outcome[name, scale.largest_batch].tuned, name, color=color
    )
  left.set_xscale('log', base=2)
  left.set_xticks(scale.batch_sizes, map(str, scale.batch_sizes))
  left.set_xlabel('global batch, sequences')
  left.set_ylabel('validation loss')
  left.set_title('tuned, equal tokens')
  left.legend()
  render.limit_losses(
    right,
    [
      point.tuned
      for point in outcome.values()
      if point.batch_size == scale.largest_batch
    ],
  )
  right.set_title(f'tuning at batch {scale.largest_batch}')
  return result
