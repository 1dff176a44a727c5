"""The figures of RESULTS.md."""

import statistics
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from examples.study.analysis.data import Points, select, values
from examples.study.analysis.tables import cost, interval, without_tried
import merit_optax

COLORS = {
  'AdamW': 'tab:blue', 'LAMB': 'tab:orange', 'MERIT': 'tab:green',
  'Muon': 'tab:red', 'Hyperball, MERIT’s ratios': 'tab:purple',
  'Hyperball': 'hotpink',
}  # fmt: skip
_RULES = {
  'MERIT': 'merit',
  'LAMB': 'lamb',
  'Muon': 'muon',
  'Hyperball, MERIT’s ratios': 'muon_hyperball',
}


def draw_summary(found: dict[str, Points]) -> Figure:
  """Draws losses by batch, the lead over Muon, and losses by learning rate."""
  figure = Figure((12, 3.8), layout='constrained')
  left, middle, right = figure.subplots(1, 3)
  tuned = without_tried(found['tuned-initialization'])
  sizes = values(tuned, 'batch')
  for name in values(tuned, 'optimizer'):
    own = select(tuned, optimizer=name)
    means = [x.mean for x in own]
    deviations = [statistics.stdev(x.losses) for x in own]
    style = {'color': COLORS[name], 'label': name}
    left.errorbar(sizes, means, deviations, fmt='o-', ms=4, capsize=3, **style)
  left.set_title('tuned: rate, warm-up, b1, initial weights', fontsize=9)
  left.set_ylabel('validation loss')
  rest = without_tried(found['aux'])
  ends = ('Hyperball, rest tuned', 'Muon, rest tuned')
  _draw_lead(middle, tuned, ('Hyperball', 'Muon'), 'tuned as on the left')
  _draw_lead(middle, rest, ends, 'rest tuned too')
  middle.axhline(0, color='grey')
  middle.set_title('Hyperball minus Muon, with 95 % intervals', fontsize=9)
  for axes in (left, middle):
    axes.set_xscale('log', base=2)
    axes.set_xticks(sizes, [f'{64 * x:,}' for x in sizes])
    axes.set_xlabel('tokens per step')
    axes.legend(fontsize=7)
  _draw_costs(right, found['rate-tolerance'])
  return figure


def _draw_lead(
  axes: Any, points: Points, pair: tuple[str, str], label: str
) -> None:
  """Draws the loss of one optimizer minus that of another over the batch."""
  first, second = (select(points, optimizer=x) for x in pair)
  found = [interval(*x) for x in zip(first, second, strict=True)]
  means = [x[0] for x in found]
  errors = [x[2] - x[0] for x in found]
  sizes = values(first, 'batch')
  axes.errorbar(sizes, means, errors, fmt='o-', capsize=4, label=label)


def _draw_costs(axes: Any, points: Points) -> None:
  """Draws what factors of the learning rate cost."""
  factors = values(points, 'factor')
  for name in values(points, 'optimizer'):
    own = select(points, optimizer=name)
    costs = [cost(x, points) for x in own]
    axes.plot(factors, costs, 'o-', ms=4, color=COLORS[name])
  axes.set_xscale('log', base=2)
  axes.set_xticks(factors, [f'{x:g} ×' for x in factors])
  axes.set_xlabel('learning rate over the best one')
  axes.set_ylabel('loss over that of the best one')
  axes.set_ylim(-0.02, 0.5)
  axes.set_title('8,192 tokens per step, usual settings', fontsize=9)


def draw_rates(found: dict[str, Points]) -> Figure:
  """Draws the best learning rates by steps, and the rules for them."""
  figure = Figure((6, 3.5), layout='constrained')
  axes = figure.subplots()
  for name in values(found['hyperparameters'], 'optimizer'):
    own = select(found['hyperparameters'], optimizer=name)
    own = [x for x in own if x.labels['varied'] != 'width']
    steps = sorted(x.labels['steps'] for x in own)
    color = COLORS[name]
    rates = [x.rate for x in own]
    axes.loglog(
      [x.labels['steps'] for x in own], rates, 'o', color=color, label=name
    )
    if name in _RULES:
      rule = [
        merit_optax.starting_learning_rate(_RULES[name], x, 64) for x in steps
      ]
      axes.loglog(steps, rule, color=color, lw=0.8)
  for axis in (axes.xaxis, axes.yaxis):
    label_decades(axis)
  axes.set_xlabel('steps')
  axes.set_ylabel('learning rate')
  axes.legend(fontsize=7)
  return figure


def label_decades(axis: Any) -> None:
  """Labels 1, 2 and 5 of each power of ten on a logarithmic axis."""
  axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axis.set_major_formatter('{x:g}')
  axis.set_minor_locator(NullLocator())
