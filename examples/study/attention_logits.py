"""Attention logits over training, at tuned learning rates and beyond."""

import itertools
import math
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.plans import Plan, Result, gather
from examples.study.points import PAPER, find_point, run_at
from examples.study.scales import Scale

TITLE = 'Attention logits'
FACTORS = (1, 2, 4)
"""Multiples of the tuned learning rate."""

Outcome = dict[tuple[str, int], Result]
"""Results by contender and factor."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs at the largest batch."""
  points = yield from gather(
    {name: find_point(scale, name, scale.largest_batch) for name in PAPER}
  )
  pairs = list(itertools.product(PAPER, FACTORS))
  results = yield [
    run_at(scale, points[x], learning_rate=k * points[x].tuned.learning_rate)
    for x, k in pairs
  ]
  return dict(zip(pairs, results, strict=True))


def peak(result: Result) -> list[float]:
  """Returns the largest logit of each layer at diagnostics steps.

  It is infinite for a run that diverged, maybe between two of them.
  """
  layers = list(zip(*result.diagnostics['max_attention_logit'], strict=True))
  if math.isinf(result.loss):
    return [math.inf] * max(1, len(layers))
  return [max(math.inf if x is None else x for x in layer) for layer in layers]


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of the largest logits of each layer."""
  rows = [
    {
      'optimizer': name,
      'learning rate': f'{factor} × tuned',
      'loss': render.format_loss(result.loss),
      'largest logit at diagnostics steps, by layer': render.format_logits(
        peak(result)
      ),
      'at the last one': render.format_logits(
        _last(result, 'max_attention_logit')
      ),
      'entropy there, nats': ', '.join(
        'not finite' if x is None else f'{x:.2f}'
        for x in _last(result, 'attention_entropy')
      ),
    }
    for (name, factor), result in outcome.items()
  ]
  return (
    f'Batch {scale.largest_batch}, one seed. Logits are raw, as in the paper, '
    'the largest over heads, queries and keys of a batch.\n\n'
    + render.markdown(rows)
  )


def _last(result: Result, name: str) -> list[float | None]:
  return (result.diagnostics[name] or [[]])[-1]


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws logit and entropy of three layers by factor."""
  del scale
  names = {'max_attention_logit': 'max logit', 'attention_entropy': 'entropy'}
  layers = _layers(outcome)
  result, all_axes = render.panels(
    len(names) * len(layers), len(FACTORS), sharex=True
  )
  rows = [(name, layer) for name in names for layer in layers]
  for (key, layer), row in zip(rows, all_axes, strict=True):
    for factor, axes in zip(FACTORS, row, strict=True):
      for name in PAPER:
        found = outcome[name, factor].diagnostics
        values = _finite(found[key], layers[layer])
        axes.plot(
          found['step'], values, color=render.COLORS[name], label=name, lw=1.2
        )
      axes.set_title(f'{factor} × tuned rate, {layer} layer', fontsize=9)
      if key == 'max_attention_logit':
        axes.set_yscale('log')
      else:
        axes.set_ylim(bottom=-0.1)
    row[0].set_ylabel(names[key])
  all_axes[0, 0].legend()
  for axes in all_axes[-1]:
    axes.set_xlabel('step')
  return result


def _layers(outcome: Outcome) -> dict[str, int]:
  """Returns the numbers of three layers by their names."""
  count = max(
    len(_last(result, 'max_attention_logit')) for result in outcome.values()
  )
  return {'first': 0, 'middle': count // 2, 'last': max(0, count - 1)}


def _finite(values: list[Any], layer: int) -> list[float]:
  return [math.nan if x[layer] is None else x[layer] for x in values]
