import dataclasses
from pathlib import Path
import re

from matplotlib import pyplot
import numpy as np
import pytest

from examples.study import __main__ as command, report
from examples.study.scales import SCALES


def test_a_plan_is_counted_without_a_run(tmp_path, capsys):
  command.main(['--plan-only', '--results', str(tmp_path / 'results')])
  text = capsys.readouterr().out
  count = int(re.search(r'about (\d+) runs to make', text)[1])
  assert 250 < count < 340
  assert not (tmp_path / 'results').exists()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ('--jobs 0 --results .', '--jobs must be at least 1, got 0'),
    ('--steps 0 --results .', '--steps must be at least 1, got 0'),
    ('--jobs 2 --mesh fsdp=2', '--mesh is for --jobs 1'),
    ('--steps 3', '--results a folder of its own'),
    ('--data x.txt', '--results a folder of its own'),
    ('--scale small --dtype bfloat16', '--results a folder of its own'),
  ],
)
def test_flags_are_checked(flags, message, capsys):
  with pytest.raises(SystemExit) as error:
    command.main(flags.split())
  assert error.value.code == 2
  assert message in capsys.readouterr().err


class _Experiment:
  """An experiment of two runs."""

  TITLE = 'Two rates'

  @staticmethod
  def plan(scale):
    return (yield [scale.run('merit', 8, rate) for rate in (0.01, 0.02)])

  @staticmethod
  def section(results, scale):
    return ', '.join(f'{result.loss:.3f}' for result in results)

  @staticmethod
  def figure(results, scale):
    return pyplot.figure()


@pytest.mark.parametrize(
  'scale', ['nano', pytest.param('small', marks=pytest.mark.slow)]
)
def test_an_experiment_runs_from_beginning_to_end(
  scale: str, tmp_path: Path, monkeypatch, capsys
):
  # Small is for a cluster: here on emulated devices, with OpenWebText's format.
  mesh = 'fsdp=4,tensor=2' if scale == 'small' else ''
  tokens = np.random.default_rng(0).integers(257, size=9000, dtype=np.uint16)
  for name in ('train.bin', 'val.bin'):
    tokens.tofile(tmp_path / name)
  settings = SCALES[scale].settings | dict(
    cache_dir=tmp_path / 'cache', num_layers=1, width=16, num_heads=2,
    context_length=16, eval_sequences=8, unroll=1, vocab_size=257,
    micro_batch_size=8,
  )  # fmt: skip
  tiny = dataclasses.replace(SCALES[scale], settings=settings)
  monkeypatch.setitem(command.SCALES, scale, tiny)
  monkeypatch.setattr(report, 'EXPERIMENTS', {'hyperparameters': _Experiment})
  command.main([
    'hyperparameters', '--scale', scale, '--steps', '2', '--jobs', '1',
    '--mesh', mesh, '--data', str(tmp_path),
    '--results', str(tmp_path / 'results'), '--work', str(tmp_path / 'work'),
  ])  # fmt: skip
  text = (tmp_path / 'results' / 'RESULTS.md').read_text()
  losses = [float(x) for x in text.splitlines()[-1].split(', ')]
  assert all(5 < loss < 7 for loss in losses)
  assert (tmp_path / 'results/figures/hyperparameters.png').is_file()
  assert capsys.readouterr().out.count('wrote') == 2
