import json
from pathlib import Path

from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.plot import main, plot_runs


def _lines(
  layers: int = 4, diagnostics_every: int = 2, clipped: float = 0.1
) -> list[dict]:
  lines = []
  for step in range(1, 7):
    line = {'step': step, 'train_loss': 6.0 / step, 'gradient_norm': 1.0 / step}
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
  settings = {'corpus': {'unigram_entropy': 5.0}}
  (folder / 'config.json').write_text(json.dumps(settings))
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
  assert set(losses['unigram entropy']) == {5.0}
  logits = panels['max attention logit']
  assert [list(x.get_xdata()) for x in logits.lines] == [[2, 4, 6]] * 4
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


@pytest.mark.parametrize('suffix', ['png', 'pdf', 'svg'])
def test_panels_without_a_message_are_left_out(tmp_path, drawn, suffix):
  run = _run(tmp_path / 'run', _lines(diagnostics_every=0))
  out = plot_runs((run,), tmp_path / f'picture.{suffix}')
  assert list(_panels(drawn[0])) == ['loss (nats per token)', 'gradient norm']
  assert out.stat().st_size > 1000
  plot_runs((_run(tmp_path / 'unclipped', _lines(clipped=0)),), out)
  assert len(_panels(drawn[1])) == 5


@pytest.mark.parametrize('factor', [1.02, 3, 300])
def test_axes_have_whole_steps_and_more_than_one_tick(tmp_path, drawn, factor):
  lines = _lines()
  for line in lines:
    line['gradient_norm'] = 0.4 * factor ** (line['step'] / 6)
  plot_runs((_run(tmp_path / 'run', lines),), tmp_path / 'picture.png')
  for axes in drawn[0].axes:
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      ticks = [x for x in axis.get_majorticklocs() if low <= x <= high]
      assert len(ticks) > 1
      if axis is axes.xaxis:
        assert [x % 1 for x in ticks] == [0] * len(ticks)
        assert (low < 1) and (high > 6)  # The same steps in all panels.
  scale = _panels(drawn[0])['gradient norm'].get_yscale()
  assert scale == ('log' if factor == 300 else 'linear')


@pytest.mark.parametrize('layers', [1, 2, 3, 48])
def test_a_legend_names_few_layers(tmp_path: Path, drawn, layers: int):
  run = _run(tmp_path / 'run', _lines(layers))
  plot_runs((run,), tmp_path / 'picture.png')
  axes = drawn[0].axes[1]
  names = _legend(axes)
  assert (names[0], names[-1]) == ('layer 1', f'layer {layers}')
  assert len(names) == min(layers, 3)
  colours = [tuple(line.get_color()) for line in axes.lines]
  assert len(colours) == len(set(colours)) == layers


def test_steps_that_are_not_finite_leave_gaps(tmp_path: Path, drawn):
  lines = _lines()
  lines[2] |= {'train_loss': None, 'gradient_norm': None}  # As runs write it.
  lines[3]['max_attention_logit'] = [None] * 4
  runs = [_run(tmp_path / name, lines) for name in ('one', 'two')]
  for count in (1, 2):
    picture = tmp_path / f'{count}.png'
    plot_runs(tuple(runs[:count]), picture)
    assert _ink(picture) > 0.01
  losses = _curves(drawn[0].axes[0])['train loss']
  assert np.isnan(losses).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize('lines', [None, [], ['torn']])
def test_a_folder_without_a_run_is_an_error(tmp_path: Path, lines, capsys):
  if lines is not None:
    _run(tmp_path / 'run', lines)
  out = tmp_path / 'picture.png'
  with pytest.raises(SystemExit) as error:
    main([str(tmp_path / 'run'), '--out', str(out)])
  assert error.value.code == 2
  assert 'holds no run that has logged a step' in capsys.readouterr().err
  assert not out.exists()


@pytest.mark.parametrize('content', [None, '{', '[1]', '{"corpus": {}}'])
def test_settings_are_not_needed(tmp_path: Path, drawn, content):
  run = _run(tmp_path / 'run', _lines())
  (run / 'config.json').unlink()
  if content is not None:
    (run / 'config.json').write_text(content)
  plot_runs((run,), tmp_path / 'picture.png')
  losses = _curves(drawn[0].axes[0])
  assert list(losses) == ['train loss', 'val loss']


@pytest.mark.parametrize(
  ('runs', 'name', 'message'),
  [
    ((), 'a.png', 'folder of a run'),
    ((Path('run'),), 'a.gif', r'--out must end in one of.*\.gif'),
  ],
)
def test_runs_and_a_format_are_needed(tmp_path, runs, name, message):
  with pytest.raises(UsageError, match=message):
    plot_runs(runs, tmp_path / name)
