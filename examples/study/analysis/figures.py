"""The figures of the study."""

import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from examples.study.analysis.data import Points, select, values
from examples.study.analysis.tables import cost, interval, without_tried
import merit_optax

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = {
  'AdamW': '#0072b2', 'LAMB': '#e69f00', 'MERIT': '#009e73',
  'Muon': '#d55e00', 'Hyperball': '#000000',
  'Hyperball, MERIT’s ratios': '#56b4e9',
}  # fmt: skip
_RULES: dict[str, Any] = {
  'MERIT': 'merit',
  'LAMB': 'lamb',
  'Muon': 'muon',
  'Hyperball, MERIT’s ratios': 'muon_hyperball',
}
_TUNED = {
  'AdamW': 'AdamW, rest tuned',
  'LAMB': 'LAMB, tuned again',
  'MERIT': 'MERIT, rest tuned',
  'Muon': 'Muon, tuned again',
  'Hyperball': 'Hyperball, tuned again',
}
"""Optimizers by what stands for them, with all of their settings tuned."""
_PAIRS = (
  ('Muon', 'AdamW'), ('Hyperball', 'Muon'), ('MERIT', 'LAMB'),
  ('MERIT', 'AdamW'), ('MERIT', 'Muon'), ('OrScale-LM', 'Muon'),
  ('MONA', 'Muon'), ('Scion', 'Muon'), ('LARS', 'LAMB'),
)  # fmt: skip
_MARKERS = 'o', 's', '^'


def draw_losses(axes: Any, found: dict[str, Points]) -> None:
  """Draws the losses of tuned optimizers over the batch."""
  sizes = values(found['relatives'], 'batch')
  for name, tuned in _TUNED.items():
    own = select(without_tried(found['relatives']), optimizer=tuned)
    means = [x.mean for x in own]
    deviations = [statistics.stdev(x.losses) for x in own]
    axes.errorbar(
      sizes, means, deviations, fmt='o-', ms=4, capsize=3,
      color=COLORS[name], label=name,
    )  # fmt: skip
  axes.set_xscale('log', base=2)
  axes.set_xticks(sizes, [f'{64 * x:,}' for x in sizes])
  axes.set_xlabel('tokens per step')
  axes.set_ylabel('validation loss (nats per byte)')
  axes.legend(frameon=False)


def draw_differences(found: dict[str, Points]) -> Figure:
  """Draws differences of losses with intervals, one row for each pair."""
  figure = Figure((8, 4.5), layout='constrained')
  axes = figure.subplots()
  points = without_tried(found['relatives'])
  batches = values(points, 'batch')
  for i, batch in enumerate(batches):
    rows, means, errors = [], [], []
    for row, pair in enumerate(_PAIRS):
      both = [
        select(points, optimizer=_TUNED.get(x, x), batch=batch) for x in pair
      ]
      if all(both):
        ((first,), (second,)) = both
        mean, low, _ = interval(first, second)
        rows.append(row + 0.22 * (i - 1))
        means.append(mean)
        errors.append(mean - low)
    axes.errorbar(
      means, rows, xerr=errors, fmt=_MARKERS[i], ms=5, capsize=3,
      color=('#0072b2', '#d55e00', '#000000')[i],
      label=f'{64 * batch:,} tokens per step',
    )  # fmt: skip
  axes.set_yticks(range(len(_PAIRS)), [f'{a} minus {b}' for a, b in _PAIRS])
  axes.invert_yaxis()
  axes.axvline(0, color='grey', lw=0.8)
  axes.set_xlabel('difference of validation losses, with 95 % intervals')
  axes.set_title('Left of the line, the first of the two is better')
  axes.grid(axis='y', alpha=0.3)
  axes.legend(frameon=False)
  return figure


def draw_rates(found: dict[str, Points]) -> Figure:
  """Draws the best learning rates by steps, and costs of wrong ones."""
  figure = Figure((10, 3.8), layout='constrained')
  left, right = figure.subplots(1, 2)
  _draw_best_rates(left, found['hyperparameters'])
  _draw_costs(right, found['rate-tolerance'])
  return figure


def _draw_best_rates(axes: Any, points: Points) -> None:
  """Draws the best learning rates by steps, and the rules for them."""
  # Hollow, since some points lie on others.
  for marker, name in zip('osd^v', values(points, 'optimizer'), strict=True):
    own = [
      x for x in select(points, optimizer=name) if x.labels['varied'] != 'width'
    ]
    steps = sorted(x.labels['steps'] for x in own)
    color = COLORS[name]
    axes.loglog(
      [x.labels['steps'] for x in own], [x.rate for x in own], marker,
      color=color, fillstyle='none', ms=7, label=name,
    )  # fmt: skip
    if name in _RULES:
      rule = [
        merit_optax.starting_learning_rate(_RULES[name], x, 64) for x in steps
      ]
      axes.loglog(steps, rule, color=color, lw=0.8)
  for axis in (axes.xaxis, axes.yaxis):
    label_decades(axis)
  axes.set_xlabel('steps')
  axes.set_ylabel('best peak')
  axes.set_title('Best learning rates, and the rules (lines)')
  axes.legend(frameon=False, fontsize=8)


def _draw_costs(axes: Any, points: Points) -> None:
  """Draws what factors of the learning rate cost."""
  factors = values(points, 'factor')
  for name in values(points, 'optimizer'):
    own = select(points, optimizer=name)
    costs = [cost(x, points) for x in own]
    axes.plot(factors, costs, 'o-', ms=4, color=COLORS[name], label=name)
  axes.set_xscale('log', base=2)
  axes.set_xticks(factors, [f'{x:g} ×' for x in factors])
  axes.set_xlabel('learning rate over the best one')
  axes.set_ylabel('loss above the best one')
  axes.set_ylim(-0.02, 0.5)
  axes.set_title('Cost of a wrong learning rate (305 steps)')
  axes.legend(frameon=False, fontsize=8)


def label_decades(axis: Any) -> None:
  """Labels 1, 2 and 5 of each power of ten on a logarithmic axis."""
  axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axis.set_major_formatter('{x:g}')
  axis.set_minor_locator(NullLocator())
