"""The picture of ``large_batch``."""

from typing import Any

from matplotlib.figure import Figure
import numpy as np

from examples.study.analysis.figures import COLORS
from examples.study.analysis.runs import Run, best_at_largest_batch, by_power

_NAMES = {'adamw': 'AdamW', 'lamb': 'LAMB', 'merit': 'MERIT', 'muon': 'Muon'}


def draw_runs(runs: list[Run]) -> Figure:
  """Draws losses and attention logits over tokens, and losses over rates."""
  figure = Figure((12, 3.8), layout='constrained')
  curves, logits, rates = figure.subplots(1, 3)
  colors = _colors(runs)
  draw_losses(curves, runs)
  for group in best_at_largest_batch(runs):
    for run in group:
      logits.plot(
        _million_tokens(run), run.logits_EL.max(1), 'o-', ms=3,
        color=colors[run.label],
      )  # fmt: skip
  logits.set(
    title='Largest attention logit', xlabel='million tokens', ylim=(0, None)
  )
  found = by_power(runs)
  batches = {batch for _, batch in found}
  for (label, batch), by in found.items():
    rates.plot(
      [2.0**power for power in by],
      [run.loss for run in by.values()],
      color=colors[label], marker='o', ms=3,
      label=label if len(batches) == 1 else f'{label}, {batch:,}',
    )  # fmt: skip
  rates.set(
    title=f'{min(batches):,} tokens a step' if len(batches) == 1 else '',
    xlabel='learning rate over the middle one',
    ylabel='final loss',
    xscale='log',
  )
  powers = sorted({power for by in found.values() for power in by})
  rates.set_xticks([2.0**x for x in powers], [f'{2.0**x:g}' for x in powers])
  rates.minorticks_off()
  rates.legend(frameon=False)
  for axes in (curves, logits, rates):
    axes.spines[['top', 'right']].set_visible(False)
  return figure


def draw_losses(axes: Any, runs: list[Run]) -> None:
  """Draws losses over tokens, of each rule at its best learning rate."""
  colors = _colors(runs)
  for group in best_at_largest_batch(runs):
    for i, run in enumerate(group):
      axes.plot(
        _million_tokens(run), run.losses, 'o-', ms=3, color=colors[run.label],
        label=None if i else _NAMES.get(run.label, run.label),
      )  # fmt: skip
  axes.set(
    title='Validation loss', xlabel='million tokens', ylabel='nats per token'
  )
  if axes.lines:
    axes.legend(frameon=False)


def _million_tokens(run: Run) -> np.ndarray:
  return np.array(run.steps) * run.trial.batch_tokens / 1e6


def _colors(runs: list[Run]) -> dict[str, str]:
  """Returns the colour of each label: that of its optimizer, if it has one."""
  labels = dict.fromkeys(run.label for run in runs)
  return {
    label: COLORS.get(_NAMES.get(label, ''), f'C{i}')
    for i, label in enumerate(labels)
  }
