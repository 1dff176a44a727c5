"""The first page of the report: what to take, and at which learning rate."""

from collections.abc import Mapping
import math
import statistics
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study import render, variants
from examples.study.contenders import CONTENDERS, MUON, SIMPLER, compared
from examples.study.differences import difference, leaders
from examples.study.experiments import (
  batch_scaling,
  hyperparameters,
  rate_tolerance,
  sensitivity,
)
from examples.study.points import Point
from examples.study.scales import Scale


class Larger(NamedTuple):
  """What came out at a larger scale.

  Attributes:
    name: Name of the scale.
    scale: The scale.
    outcome: Its losses by batch size.
  """

  name: str
  scale: Scale
  outcome: batch_scaling.Outcome


def page(
  outcomes: Mapping[str, Any], scale: Scale, larger: Larger | None = None
) -> str:
  """Returns the page, of the experiments that are complete."""
  parts = []
  if has_figure(outcomes):
    parts.append('![The study in short](figures/summary.png)')
  if 'steps-to-loss' in outcomes:
    parts.append('![Steps to a loss](figures/steps-to-loss.png)')
  if tuned := variants.most_tuned(outcomes):
    points = variants.judged(outcomes[tuned])
    chosen = f'learning rates, {variants.TUNED[tuned]}'
    parts += _losses(points, scale, chosen)
  elif 'batch-scaling' in outcomes:
    parts += _losses(outcomes['batch-scaling'], scale, 'learning rates')
  if larger:
    parts += _larger_losses(larger)
  if 'hyperparameters' in outcomes:
    parts += _rates(outcomes['hyperparameters'], scale)
  return '\n\n'.join(['## In short', *parts] if parts else [])


def has_figure(outcomes: Mapping[str, Any]) -> bool:
  """Returns whether the experiments that the figure shows are complete."""
  return bool(variants.most_tuned(outcomes)) and 'rate-tolerance' in outcomes


def figure(outcomes: Mapping[str, Any], scale: Scale) -> Figure:
  """Draws losses by batch, the lead over Muon, and losses by learning rate."""
  result, ((left, middle, right),) = render.panels(1, 3)
  result.set_size_inches(12, 3.8)
  tuned = variants.most_tuned(outcomes)
  points = variants.judged(outcomes[tuned])
  batch_scaling.draw_losses(left, points, scale)
  left.set_title(f'tuned: rate, {variants.TUNED[tuned]}', fontsize=9)
  _draw_leads(middle, points, scale)
  _draw_rates(right, outcomes['rate-tolerance'], scale)
  for axes in (left, middle):
    labels = [f'{x}\n{scale.num_steps(x):,}' for x in scale.batch_sizes]
    axes.set_xticks(scale.batch_sizes, labels)
    axes.set_xlabel('global batch, sequences, and steps')
  return result


def _draw_leads(axes: Any, points: batch_scaling.Outcome, scale: Scale) -> None:
  """Draws the difference of norms kept from Muon, with intervals of 95 %."""
  found = [
    difference(points[SIMPLER.name, size], points[MUON.name, size])
    for size in scale.batch_sizes
  ]
  # Before there is data, since there may be none.
  axes.set_xscale('log', base=2)
  axes.errorbar(
    scale.batch_sizes,
    [x.mean if math.isfinite(x.mean) else math.nan for x in found],
    [x.high - x.mean for x in found],
    fmt='o-',
    capsize=4,
    color=render.COLORS[SIMPLER.name],
  )
  axes.axhline(0, color=render.COLORS[MUON.name])
  axes.set_title(f'{SIMPLER.name}, minus Muon (95 %)')


def _draw_rates(
  axes: Any, outcome: rate_tolerance.Outcome, scale: Scale
) -> None:
  """Draws losses over multiples of the best learning rate."""
  axes.set_xscale('log', base=2)
  for x in rate_tolerance.CONTENDERS:
    losses = [
      statistics.mean(result.loss for result in outcome[x.name, factor])
      for factor in rate_tolerance.FACTORS
    ]
    axes.plot(
      rate_tolerance.FACTORS,
      [y if math.isfinite(y) else math.nan for y in losses],
      'o-',
      color=render.COLORS[x.name],
    )
  low, high = axes.get_ylim()
  axes.set_ylim(low, min(high, low + 1.2))
  axes.set_xticks(
    rate_tolerance.FACTORS, [f'{x:g} ×' for x in rate_tolerance.FACTORS]
  )
  axes.set_xlabel('learning rate over the best one')
  axes.set_title(f'batch {scale.batch_size}, usual warm-up and b1')


def _losses(
  outcome: batch_scaling.Outcome, scale: Scale, chosen: str
) -> list[str]:
  rows = batch_scaling.loss_rows(outcome, scale)
  return [
    f'Validation loss, nats a token: {_describe(scale)}; {chosen} chosen for '
    'each optimizer and batch'
    + (
      ', then mean and standard deviation over fresh seeds.'
      if scale.num_seeds > 1
      else '.'
    ),
    render.markdown(rows),
    '\n'.join(
      f'- Batch {size} ({scale.num_steps(size):,} steps): '
      + _best(outcome, size)
      for size in scale.batch_sizes
    ),
  ]


def _describe(scale: Scale) -> str:
  config = scale.run('adamw', scale.batch_size, 1.0).config
  return (
    f'{config.num_layers} layers of width {config.width}, context '
    f'{config.context_length}, {scale.tokens:,} tokens in every run'
  )


def _larger_losses(larger: Larger) -> list[str]:
  """Returns whether order and starting learning rates hold there."""
  name, scale, outcome = larger
  rows = [
    {'optimizer': contender.name}
    | {
      f'batch {size} ({scale.num_steps(size):,} steps)': _with_rule(
        outcome[contender.name, size], contender.rule_rate(scale, size)
      )
      for size in scale.batch_sizes
    }
    for contender in compared(scale)
  ]
  return [
    f'At scale {name}, {_describe(scale)}, one seed'
    + (
      ', with a warm-up and a b1 that suited each best at a similar number of '
      'steps above, or within 0.02 of it'
      if scale.has_few_steps
      else ''
    )
    + '. In brackets the best learning rate of a grid by √2, and how many '
    'times that is the starting rate by the rules that were found above:',
    render.markdown(rows),
  ]


def _with_rule(point: Point, rule_rate: float) -> str:
  factor = point.tuned.learning_rate / rule_rate
  return (
    f'{render.format_loss(point.mean)} '
    f'({render.format_learning_rate(point.tuned)}, {factor:.2g} ×)'
  )


def _best(outcome: batch_scaling.Outcome, size: int) -> str:
  """Returns who has the lowest loss, and who may be as good."""
  points = [outcome[x, size] for x in batch_scaling.names(outcome)]
  found = leaders(points, sensitivity.compare)
  if not found:
    return 'with each optimizer a seed diverged.'
  best, *as_good = found
  text = f'{best.name} has the lowest loss'
  if math.isnan(best.std):
    return f'{text} (one seed).'
  if not as_good:
    return f'{text}, beyond the noise of seeds.'
  return f'{text}; {" and ".join(x.name for x in as_good)} may be as good.'


def _rates(outcome: hyperparameters.Outcome, scale: Scale) -> list[str]:
  rows = []
  for contender in CONTENDERS:
    rates = hyperparameters.by_steps(outcome[contender.name], scale)
    at_1000, power = hyperparameters.fit_rate(rates)
    rows.append(
      {
        'optimizer': contender.name,
        'learning rate': f'{at_1000:.2g} × (steps / 1000)^{power:.2f}',
        'tested from': f'{rates[0][0]:,} steps',
        'to': f'{rates[-1][0]:,} steps',
      }
    )
  return [
    'Lines through the logarithms of the best learning rates:',
    render.markdown(rows),
  ]
