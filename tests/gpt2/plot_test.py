import json
from pathlib import Path

from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np
import pytest

from examples.gpt2.plot import main, plot_runs


def _lines(
  layers: int = 4, diagnostics_every: int = 2, clipped: float = 0.1
) -> list[dict]:
  lines = []
  for step in range(1, 7):
    line = {'step': step, 'tokens': 10 * step, 'train_loss': 6.0 / step}
    line['gradient_norm'] = 1.0 / step
    if step % 3 == 0:
      line['val_loss'] = 7.0 / step
    if diagnostics_every and step % diagnostics_every == 0:
      values = [step + i / layers for i in range(layers)]
      of_layers = dict(gradient_norm=values, update_to_weight=values)
      line |= {
        'max_attention_logit': values,
        'attention_entropy': values,
        'layers': of_layers | {'clipped': [clipped] * layers},
      }
    lines.append(line)
  return lines


def _run(folder: Path, lines: list[dict]) -> Path:
  folder.mkdir()
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  return folder


def _ink(path: Path) -> float:
  """Returns the share of a picture that is not white."""
  return float(np.mean(image.imread(path)[..., :3].min(axis=-1) < 0.9))


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
  """Figures that are drawn, as they are saved."""
  figures: list[Figure] = []
  save = Figure.savefig

  def remember(figure: Figure, *args, **kwargs) -> None:
    figures.append(figure)
    save(figure, *args, **kwargs)

  monkeypatch.setattr(Figure, 'savefig', remember)
  return figures


def _panels(figure: Figure) -> dict[str, Axes]:
  return {axes.get_ylabel(): axes for axes in figure.axes}


def _legend(axes: Axes) -> list[str]:
  return [text.get_text() for text in axes.get_legend().get_texts()]


def _curves(axes: Axes) -> dict[str, list[float]]:
  return {x.get_label(): list(x.get_ydata()) for x in axes.lines}


def test_a_run_is_drawn_by_layer(tmp_path: Path, drawn, capsys):
  run = _run(tmp_path / 'run', _lines())
  out = tmp_path / 'picture.png'
  main([str(run), '--out', str(out)])
  assert capsys.readouterr().out.strip() == str(out)
  assert _ink(out) > 0.01
  assert drawn[0].get_suptitle() == str(run)
  panels = _panels(drawn[0])
  assert len(panels) == 6
  losses = _curves(panels['loss (nats per token)'])
  assert losses['train loss'] == [6.0 / step for step in range(1, 7)]
  assert losses['val loss'] == [7.0 / 3, 7.0 / 6]
  logits = panels['max attention logit']
  assert [list(x.get_xdata()) for x in logits.lines] == [[20, 40, 60]] * 4
  norms = _curves(panels['gradient norm'])
  assert norms['gradient norm'] == [1.0 / step for step in range(1, 7)]
  for name in list(panels)[1:5]:
    assert _curves(panels[name])['layer 4'] == [2.75, 4.75, 6.75]


def test_several_runs_are_laid_over_each_other(tmp_path: Path, drawn):
  settings = {'a': (2, 1), 'b': (3, 2), 'c': (2, 0)}
  runs = tuple(_run(tmp_path / k, _lines(*x)) for k, x in settings.items())
  plot_runs(runs, tmp_path / 'picture.png')
  panels = _panels(drawn[0])
  for name in ('loss (nats per token)', 'gradient norm'):
    assert _legend(panels[name]) == [str(run) for run in runs]
    # A run has one colour, and runs have different ones.
    colours = [x.get_color() for x in panels[name].get_legend().get_lines()]
    assert len(set(colours)) == 3
  largest = panels['max attention logit']
  assert _legend(largest) == [str(run) for run in runs[:2]]
  curves = _curves(largest)
  assert curves[str(runs[0])] == [step + 0.5 for step in range(1, 7)]
  assert len(curves[str(runs[1])]) == 3


@pytest.mark.parametrize('lines', [None, []])
def test_a_folder_without_a_run_is_an_error(tmp_path: Path, lines, capsys):
  if lines is not None:
    _run(tmp_path / 'run', lines)
  out = tmp_path / 'picture.png'
  with pytest.raises(SystemExit) as error:
    main([str(tmp_path / 'run'), '--out', str(out)])
  assert error.value.code == 2
  assert 'holds no run that has logged a step' in capsys.readouterr().err
  assert not out.exists()
