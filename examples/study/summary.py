"""The first page of the report: what to take, and at which learning rate."""

from collections.abc import Mapping
import math
from typing import Any

from examples.study import render
from examples.study.contenders import CONTENDERS
from examples.study.differences import leaders
from examples.study.experiments import batch_scaling, hyperparameters
from examples.study.scales import Scale


def page(outcomes: Mapping[str, Any], scale: Scale) -> str:
  """Returns the page, of the experiments that are complete."""
  parts = []
  if 'steps-to-loss' in outcomes:
    parts.append('![Steps to a loss](figures/steps-to-loss.png)')
  if 'batch-scaling' in outcomes:
    parts += _losses(outcomes['batch-scaling'], scale)
  if 'hyperparameters' in outcomes:
    parts += _rates(outcomes['hyperparameters'], scale)
  return '\n\n'.join(['## In short', *parts] if parts else [])


def _losses(outcome: batch_scaling.Outcome, scale: Scale) -> list[str]:
  config = scale.run('adamw', scale.batch_size, 1.0).config
  rows = batch_scaling.loss_rows(outcome, scale)
  return [
    f'Validation loss, nats a token: {config.num_layers} layers of width '
    f'{config.width}, context {config.context_length}, {scale.tokens:,} tokens '
    'in every run; learning rates chosen for each optimizer and batch'
    + (
      ', then mean and standard deviation over fresh seeds.'
      if scale.num_seeds > 1
      else '.'
    ),
    render.markdown(rows),
    '\n'.join(
      f'- Batch {size} ({hyperparameters.num_steps(scale, size):,} steps): '
      + _best(outcome, size)
      for size in scale.batch_sizes
    ),
  ]


def _best(outcome: batch_scaling.Outcome, size: int) -> str:
  """Returns who has the lowest loss, and who may be as good."""
  found = leaders([outcome[x.name, size] for x in CONTENDERS])
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
