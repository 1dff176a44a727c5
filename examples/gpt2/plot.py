"""Pictures of runs: python -m examples.gpt2.plot RUN [RUN ...] --out FILE."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
import numpy as np
import tyro

from examples.gpt2.command import UsageError, exit_on_error
from examples.gpt2.run_folder import read_metrics
from examples.gpt2.storage import as_path, whole_file

_FORMATS = ('.png', '.pdf', '.svg')
_LOSS = 'loss (nats per token)'
_PANELS = {
  _LOSS: ('train_loss', 'val_loss'),
  'max attention logit': ('max_attention_logit',),
  'attention entropy (nats)': ('attention_entropy',),
  'gradient norm': ('gradient_norm', 'layers/gradient_norm'),
  'update norm / weight norm': ('layers/update_to_weight',),
  'share of clipped elements': ('layers/clipped',),
}
_LOGARITHMIC = ('max attention logit', 'gradient norm')

Curves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Tokens seen and values, perhaps by layer, of each metric of a run."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for a folder that holds no run."""
  with exit_on_error():
    print(tyro.cli(plot_runs, args=args, prog='python -m examples.gpt2.plot'))


def plot_runs(
  runs: tyro.conf.Positional[tuple[Path, ...]], out: Path = Path('curves.png')
) -> Path:
  """Draws one run by layer, or several over each other.

  Of several runs, the layer with the largest value is drawn at each step.

  Args:
    runs: Folders of runs, finished or not.
    out: Picture to write: png, pdf or svg.
  """
  if not runs:
    raise UsageError('Name the folder of a run, or of several.')
  if out.suffix not in _FORMATS:
    raise UsageError(f'--out must end in one of {_FORMATS}, got {out}.')
  figure = _figure({str(run): _read(run) for run in map(as_path, runs)})
  with whole_file(as_path(out)) as scratch:
    figure.savefig(scratch, format=out.suffix[1:], dpi=180)
  return as_path(out)


def _read(run: Path) -> Curves:
  lines = read_metrics(run / 'metrics.jsonl')
  if not lines:
    raise UsageError(f'{run} holds no run that has logged a step.')
  for line in lines:
    line |= {f'layers/{k}': x for k, x in line.get('layers', {}).items()}
  curves = {}
  for metric in {metric for panel in _PANELS.values() for metric in panel}:
    points = [(x['tokens'], x[metric]) for x in lines if metric in x]
    if points:
      tokens, values = zip(*points, strict=True)
      try:
        # Null, which was not finite, becomes NaN: a gap.
        curves[metric] = np.array(tokens), np.array(values, float)
      except (TypeError, ValueError) as error:
        raise UsageError(f'{run}: {metric} cannot be drawn: {error}') from error
  return curves


def _figure(runs: dict[str, Curves]) -> Figure:
  panels = {
    label: metrics
    for label, metrics in _PANELS.items()
    # Without a clip, or with an optimizer that has none, all shares are 0.
    if any(
      np.any(np.nan_to_num(curves[metric][1]))
      for metric in metrics
      for curves in runs.values()
      if metric in curves
    )
  }
  columns = min(len(panels), 2)
  rows = math.ceil(len(panels) / columns)
  # Narrow, so that its letters are large enough on a page or a phone.
  figure = Figure((3.2 * columns, 2.6 * rows), layout='constrained')
  if len(runs) == 1:
    figure.suptitle(*runs)
  first = None
  for i, (label, metrics) in enumerate(panels.items(), start=1):
    axes = figure.add_subplot(
      rows, columns, i, xlabel='tokens', ylabel=label, sharex=first
    )
    first = first or axes
    _draw(axes, runs, metrics)
    _scale(axes, label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
  return figure


def _draw(
  axes: Axes, runs: dict[str, Curves], metrics: tuple[str, ...]
) -> None:
  for i, (run, curves) in enumerate(runs.items()):
    present = [metric for metric in metrics if metric in curves]
    for metric in present:
      tokens, values = curves[metric]
      style: dict[str, Any] = dict(label=metric.replace('_', ' '))
      if len(runs) > 1:
        values = np.fmax.reduce(np.atleast_2d(values.T))
        style = dict(color=f'C{i}', label=run if metric == present[-1] else '')
      elif values.ndim > 1:
        shades = np.linspace(0, 0.9, values.shape[1])
        axes.set_prop_cycle(color=matplotlib.colormaps['viridis'](shades))
        style = dict(label=_layer_names(len(shades)))
      few = dict(marker='o', markersize=3)
      style |= few if len(tokens) <= 100 else dict(lw=0.7)
      axes.plot(tokens, values, **style)


def _scale(axes: Axes, label: str) -> None:
  """Lets an axis begin at 0, so that a small change looks small.

  Losses do not; and values of two decades, of which a logarithmic axis has two
  ticks, may be of that kind.
  """
  if label == _LOSS:
    return
  values = np.concatenate([line.get_ydata() for line in axes.lines])
  positive = values[values > 0]
  if label in _LOGARITHMIC and positive.max() > 100 * positive.min():
    axes.set_yscale('log')
  else:
    axes.set_ylim(0, 1.05 * positive.max())


def _layer_names(count: int) -> list[str]:
  # A legend of many layers would hide the curves.
  named = range(count) if count <= 6 else (0, count // 2, count - 1)
  return [f'layer {i + 1}' if i in named else '' for i in range(count)]


if __name__ == '__main__':
  main()
