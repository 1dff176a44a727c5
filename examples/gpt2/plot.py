"""Pictures of runs: python -m examples.gpt2.plot RUN [RUN ...] --out FILE."""

import dataclasses
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np
import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.run.command import exit_on_error
from examples.gpt2.run.folder import RunFolder

_FORMATS = ('.png', '.pdf', '.svg')
_LOSS = 'loss (nats per token)'
# Label and metric of the panels, of one run by layer and of several runs.
_OF_LAYERS = {
  'max attention logit': 'max_attention_logit',
  'attention entropy (nats)': 'attention_entropy',
  'gradient norm by layer': 'layers/gradient_norm',
  'update norm / weight norm': 'layers/update_to_weight',
  'share of clipped elements': 'layers/clipped',
}
_OF_RUNS = {
  f'validation {_LOSS}': 'val_loss',
  f'train {_LOSS}': 'train_loss',
  'largest attention logit': 'max_attention_logit',
  'gradient norm': 'gradient_norm',
}

Line = dict[str, Any]
Curves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Steps and values by name; a name with a leading underscore has no legend."""


@dataclasses.dataclass(frozen=True)
class PlotConfig:
  """Draws the curves of one run by layer, or lays several over each other."""

  runs: tyro.conf.Positional[tuple[Path, ...]]
  """Folders of runs, finished or not."""

  out: Path = Path('curves.png')
  """Picture to write: png, pdf or svg."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for a folder that holds no run."""
  config = tyro.cli(PlotConfig, args=args, prog='python -m examples.gpt2.plot')
  with exit_on_error():
    plot_runs(config.runs, config.out)
    print(config.out)


def plot_runs(runs: tuple[Path, ...], out: Path) -> None:
  """Draws one run by layer, or several over each other.

  Args:
    runs: Folders of runs.
    out: Where to write the picture.

  Raises:
    UsageError: If there is no run, or a folder holds none.
  """
  if not runs:
    raise UsageError('Name the folder of a run, or of several.')
  if out.suffix not in _FORMATS:
    raise UsageError(f'--out must end in one of {_FORMATS}, got {out}.')
  found = {str(run): _read(run) for run in runs}
  if len(runs) > 1:
    lines_by_run = {name: lines for name, (lines, _) in found.items()}
    _draw(_panels_of_runs(lines_by_run), '', out)
  else:
    ((title, (lines, entropy)),) = found.items()
    _draw(_panels_of_layers(lines, entropy), title, out)


def _read(run: Path) -> tuple[list[Line], float]:
  """Returns the metrics of a run, and the unigram entropy of its text."""
  folder = RunFolder(run)
  try:
    lines, settings = folder.read_metrics(), folder.read_settings()
  except FileNotFoundError as error:
    raise UsageError(f'{run} holds no run: {error.filename}?') from error
  if not lines:
    raise UsageError(f'{run} has not logged a step yet.')
  return lines, settings['corpus']['unigram_entropy']


def _panels_of_layers(lines: list[Line], entropy: float) -> dict[str, Curves]:
  steps, losses = _series(lines, 'train_loss')
  panels = {
    _LOSS: {
      'train': (steps, losses),
      'validation': _series(lines, 'val_loss'),
      'unigram entropy': (steps, np.full_like(losses, entropy)),
    }
  }
  for label, metric in _OF_LAYERS.items():
    steps, values_SL = _series(lines, metric)
    if len(steps):
      panels[label] = {
        name: (steps, values_S)
        for name, values_S in zip(
          _layer_names(values_SL.shape[1]), values_SL.T, strict=True
        )
      }
  return panels


def _layer_names(count: int) -> list[str]:
  # A legend of many layers would hide the curves.
  named = range(count) if count <= 6 else (0, count // 2, count - 1)
  return [f'{"" if i in named else "_"}layer {i + 1}' for i in range(count)]


def _panels_of_runs(runs: dict[str, list[Line]]) -> dict[str, Curves]:
  def largest(steps: np.ndarray, values: np.ndarray) -> Any:
    return steps, np.fmax.reduce(np.atleast_2d(values.T))

  return {
    label: {k: largest(*_series(v, metric)) for k, v in runs.items()}
    for label, metric in _OF_RUNS.items()
  }


def _series(lines: list[Line], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the steps that have a metric, and its values, NaN for null."""
  found = {}
  for line in lines:
    layers = {f'layers/{k}': v for k, v in line.get('layers', {}).items()}
    if metric in (line | layers):
      found[line['step']] = (line | layers)[metric]
  return np.array([*found]), np.array([*found.values()], float)


def _draw(panels: dict[str, Curves], title: str, path: Path) -> None:
  rows = -(-len(panels) // 3)
  columns = -(-len(panels) // rows)
  figure = Figure((5 * columns, 3.5 * rows), layout='constrained')
  figure.suptitle(title)
  first, names = None, []
  for i, (label, curves) in enumerate(panels.items(), start=1):
    axes = figure.add_subplot(rows, columns, i, sharex=first)
    axes.set(xlabel='step', ylabel=label)
    _draw_curves(axes, curves)
    if 'logit' in label or 'gradient' in label:
      axes.set_yscale('log')
    if [*curves] != names:
      axes.legend(frameon=False, fontsize=8)
    first, names = first or axes, [*curves]
  figure.savefig(path, dpi=120)


def _draw_curves(axes: Axes, curves: Curves) -> None:
  axes.grid(alpha=0.3)
  if 'layer 1' in curves:
    shades = np.linspace(0, 0.9, len(curves))
    axes.set_prop_cycle(color=matplotlib.colormaps['viridis'](shades))
  for name, (steps, values) in curves.items():
    style: dict[str, Any] = dict(marker='o', markersize=3)
    if len(steps) > 100:
      style = dict(linewidth=0.7)
    if name == 'unigram entropy':
      style = dict(color='gray', linestyle='--')
    axes.plot(steps, values, label=name, **style)


if __name__ == '__main__':
  main()
