"""Pictures of runs: python -m examples.gpt2.plot RUN [RUN ...] --out FILE."""

from collections.abc import Callable
import dataclasses
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402
import tyro  # noqa: E402

from examples.gpt2.config import UsageError  # noqa: E402
from examples.gpt2.run.command import exit_on_error  # noqa: E402
from examples.gpt2.run.folder import RunFolder  # noqa: E402

_FORMATS = ('.png', '.pdf', '.svg')

Line = dict[str, Any]
Values = Callable[[Line], Any]


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
    _plot_together({name: lines for name, (lines, _) in found.items()}, out)
    return
  ((name, (lines, settings)),) = found.items()
  plot_run(out, lines, name, settings['corpus']['unigram_entropy'])


def _read(run: Path) -> tuple[list[Line], dict[str, Any]]:
  folder = RunFolder(run)
  try:
    lines, settings = folder.read_metrics(), folder.read_settings()
  except FileNotFoundError as error:
    raise UsageError(f'{run} holds no run: {error.filename}?') from error
  if not lines:
    raise UsageError(f'{run} has not logged a step yet.')
  return lines, settings


def plot_run(
  path: Path, lines: list[Line], title: str, unigram_entropy: float
) -> None:
  """Draws losses and, by layer, what the watch steps saw.

  Args:
    path: Where to write the picture.
    lines: Lines of metrics.jsonl.
    title: Title of the picture.
    unigram_entropy: Entropy of the token frequencies, nats a token.
  """
  panels = {
    'max attention logit': _of('max_attention_logit'),
    'attention entropy (nats)': _of('attention_entropy'),
    'gradient norm by layer': _of('layers', 'gradient_norm'),
    'update norm / weight norm': _of('layers', 'update_to_weight'),
    'share of clipped elements': _of('layers', 'clipped'),
  }
  panels = {k: v for k, v in panels.items() if any(map(v, lines))}
  figure, axes = _grid(1 + len(panels), title)
  _plot_losses(axes[0], lines, unigram_entropy)
  for one, (label, values) in zip(axes[1:], panels.items(), strict=True):
    _plot_layers(one, lines, values)
    one.set_ylabel(label)
  axes[1 if panels else 0].set_yscale('log')
  _save(figure, axes, path)


def _plot_together(runs: dict[str, list[Line]], path: Path) -> None:
  """Draws runs over each other, the layers of each as their maximum."""
  panels: dict[str, Values] = {
    'validation loss (nats per token)': _of('val_loss'),
    'train loss (nats per token)': _of('train_loss'),
    'largest attention logit': lambda m: max(
      (x for x in m.get('max_attention_logit', []) if x is not None),
      default=None,
    ),
    'gradient norm': _of('gradient_norm'),
  }
  figure, axes = _grid(len(panels), '')
  for one, (label, values) in zip(axes, panels.items(), strict=True):
    one.set_ylabel(label)
    for name, lines in runs.items():
      _plot_values(one, lines, values, label=name)
  axes[2].set_yscale('log')
  axes[3].set_yscale('log')
  _save(figure, axes, path)


def _of(*keys: str) -> Values:
  """Returns a function that looks up nested keys, None if one is missing."""

  def look_up(line: Line) -> Any:
    value: Any = line
    for key in keys:
      value = value.get(key) if isinstance(value, dict) else None
    return value

  return look_up


def _grid(count: int, title: str) -> tuple[plt.Figure, list[plt.Axes]]:
  rows = -(-count // 3)
  columns = -(-count // rows)
  figure, axes = plt.subplots(
    rows, columns, figsize=(5 * columns, 3.5 * rows), squeeze=False
  )
  figure.suptitle(title)
  for unused in axes.flat[count:]:
    unused.remove()
  return figure, list(axes.flat[:count])


def _plot_losses(
  axes: plt.Axes, lines: list[Line], unigram_entropy: float
) -> None:
  _plot_values(axes, lines, _of('train_loss'), label='train', lw=0.7)
  _plot_values(axes, lines, _of('val_loss'), label='validation', marker='o')
  axes.axhline(unigram_entropy, color='gray', ls='--', label='unigram entropy')
  axes.set_ylabel('loss (nats per token)')


def _plot_layers(axes: plt.Axes, lines: list[Line], values: Values) -> None:
  seen = [line for line in lines if values(line) is not None]
  count = len(values(seen[0]))
  # A legend of many layers would hide the curves.
  named = range(count) if count <= 6 else (0, count // 2, count - 1)
  for layer in range(count):
    axes.plot(
      [line['step'] for line in seen],
      [values(line)[layer] for line in seen],
      color=plt.cm.viridis(layer / count),
      marker='o',
      markersize=3,
      label=f'layer {layer + 1}' if layer in named else '',
    )


def _plot_values(
  axes: plt.Axes, lines: list[Line], values: Values, **style: Any
) -> None:
  seen = [line for line in lines if values(line) is not None]
  axes.plot(
    [line['step'] for line in seen],
    [values(line) for line in seen],
    markersize=3,
    **style,
  )


def _save(figure: plt.Figure, all_axes: list[plt.Axes], path: Path) -> None:
  for axes in all_axes:
    axes.set_xlabel('step')
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
      axes.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == '__main__':
  main()
