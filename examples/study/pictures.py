"""Pictures of losses and logits, and the numbers that they show."""

import dataclasses
import statistics

from matplotlib import ticker
from matplotlib.figure import Figure
import numpy as np

from examples.study.cells import (
  Cells,
  batches_of,
  bounds,
  carried_by_16,
  losses_above,
  mean_logit,
  same_seeds,
  steps_of,
  tenths,
)
from examples.study.large_batch import loss_of

# Rules of the pictures, in Okabe and Ito's colours, which colour-blind readers
# can tell apart. All but the last three update all parameters.
_NAMES = {
  'adamw-all': ('AdamW', '#0072b2'),
  'lamb-all': ('LAMB', '#e69f00'),
  'merit-all': ('MERIT', '#009e73'),
  'muon': ('Muon', '#d55e00'),
  'adamw': ('AdamW, hidden', '#0072b2'),
  'lamb': ('LAMB, hidden', '#e69f00'),
  'merit': ('MERIT, hidden', '#009e73'),
}
_LINES = 4


@dataclasses.dataclass(frozen=True)
class Picture:
  """A figure, and the numbers that it shows by the names of rules."""

  figure: Figure
  shown: dict[str, dict[str, list[float]]]


def draw(cells: Cells) -> Picture:
  """Draws losses and logits over the batch, each rate tuned at its batch."""
  figure = Figure((6, 3.6), layout='constrained')
  losses, logits = figure.subplots(1, 2)
  few = [*_NAMES][:_LINES] if len(cells) > len(_NAMES) else [*cells]
  shown = {}
  for i, rule in enumerate(few):
    done = {batch: x.seeds for batch, x in cells[rule].items() if x.seeds}
    name, color = _NAMES.get(rule, (rule, f'C{i}'))
    shown[name] = {
      'tokens': [float(x) for x in done],
      'loss': [statistics.mean(map(loss_of, x)) for x in done.values()],
      'logit': [mean_logit(x) for x in done.values()],
    }
    for axes, key in ((losses, 'loss'), (logits, 'logit')):
      axes.plot(
        [*done], shown[name][key], color=color, marker='o', ms=4, label=name
      )
    for batch, trials in done.items():
      ends = bounds([loss_of(x) for x in trials])[1:]
      losses.plot([batch] * 2, ends, color=color, lw=0.8)
  losses.set(title='final loss (nats)')
  logits.set(title='largest attention logit', ylim=(0, None))
  steps = {
    batch: steps_of(own[batch])
    for batch in batches_of(cells)
    for own in cells.values()
    if batch in own
  }
  for axes in (losses, logits):
    axes.set(xscale='log', xlabel='tokens a step, and steps')
    axes.set_xticks([*steps], [f'{x:,}\n{y:,}' for x, y in steps.items()])
    axes.minorticks_off()
    axes.grid(axis='y', lw=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  figure.legend(
    *losses.get_legend_handles_labels(),
    ncols=_LINES,
    frameon=False,
    loc='outside upper center',
  )
  return Picture(figure, shown)


def draw_carried(cells: Cells) -> Picture | None:
  """Draws what the best rate of a batch, times √16, does at 16 times the batch.

  Returns:
    The picture; ``None`` without trials at such rates.
  """
  shown = {}
  large = 16 * min(batches_of(cells))
  all_carried = carried_by_16(cells, 4.0)
  for rule, (name, _) in _NAMES.items():
    if rule in all_carried and cells[rule][large].seeds:
      cell = cells[rule][large]
      carried, tuned = same_seeds(all_carried[rule], cell.at(cell.rate()))
      if carried:
        shown[name] = {
          'loss': bounds(losses_above(carried, tuned)),
          'logit': [mean_logit(x, 'peak_logits') for x in (tuned, carried)],
        }
  if not shown:
    return None
  figure = Figure((6, 3.2), layout='constrained')
  losses, logits = figure.subplots(1, 2, sharey=True)
  colors = dict(_NAMES.values())
  for name, values in shown.items():
    style = {'color': colors[name], 'marker': 'o', 'ms': 6}
    mean, low, high = values['loss']
    losses.plot([low, high], [name] * 2, color=colors[name])
    losses.plot([mean], [name], **style)
    before, after = values['logit']
    logits.plot([before, after], [name] * 2, color=colors[name])
    logits.plot([before], [name], **style, mfc='white')
    logits.plot([after], [name], **style)
    if before == after:
      losses.annotate(
        'the same rate', (0, name), (6, 0),
        textcoords='offset points', va='center', fontsize='small',
      )  # fmt: skip
  losses.axvline(0, color='black', lw=0.8)
  losses.invert_yaxis()
  figure.suptitle(
    f'{large:,} tokens a step: best rate of {large // 16:,} tokens × √16',
    fontsize='medium',
  )
  losses.set(title='loss above that\nof the tuned rate')
  logits.set(title='largest logit of the run\n○ tuned rate  ● carried rate')
  logits.set(xscale='log')
  logits.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
  logits.xaxis.set_major_formatter(ticker.StrMethodFormatter('{x:,.0f}'))
  logits.minorticks_off()
  for axes in (losses, logits):
    axes.grid(axis='x', lw=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  return Picture(figure, shown)


def draw_steps(by_steps: dict[int, Cells]) -> Picture | None:
  """Draws logits over the steps and over the training loss, at one rate.

  Returns:
    The picture, of the smallest number of steps; ``None`` where no rule of the
    pictures has several batches.
  """
  cells = next(iter(by_steps.values()), {})
  rules = [x for x in ('adamw-all', 'merit-all') if x in cells]
  if not rules:
    return None
  figure = Figure((6, 2.4 * len(rules)), layout='constrained')
  axes_RC = figure.subplots(len(rules), 2, sharey='row', squeeze=False)
  shown = {}
  for (over_steps, over_loss), rule in zip(axes_RC, rules, strict=True):
    name, color = _NAMES[rule]
    own = cells[rule]
    rate = own[max(own)].rate()
    for i, (batch, cell) in enumerate(own.items()):
      trials = [x for seed, x in cell.at(rate).items() if seed]
      loss, logit = (
        np.mean([tenths(x[key]) for x in trials], axis=0)
        for key in ('train_losses', 'logits')
      )
      style = {'color': color, 'lw': 0.8 + i, 'alpha': (i + 1) / len(own)}
      over_steps.plot(np.arange(10, 101), logit, **style)
      over_loss.plot(loss, logit, label=f'{batch:,} tokens', **style)
      shown[f'{name}, {batch}'] = {
        'loss': [round(float(x), 4) for x in loss],
        'logit': [round(float(x), 4) for x in logit],
      }
    over_steps.set(ylabel=f'largest logit, {name}', ylim=(0, None))
    over_loss.invert_xaxis()
    over_loss.legend(frameon=False)
    for axes in (over_steps, over_loss):
      axes.grid(axis='y', lw=0.3)
      axes.spines[['top', 'right']].set_visible(False)
  axes_RC[0, 0].set(title='at the same step')
  axes_RC[0, 1].set(title='at the same training loss')
  axes_RC[-1, 0].set(xlabel=f'% of {next(iter(by_steps))} steps')
  axes_RC[-1, 1].set(xlabel='training loss (nats), falling')
  return Picture(figure, shown)
