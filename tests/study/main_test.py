import dataclasses
from pathlib import Path
import re

import pytest

from examples.study import __main__ as command
from examples.study.scales import SCALES


def test_a_plan_is_counted_without_a_run(tmp_path, capsys):
  command.main(['--plan-only', '--results', str(tmp_path / 'results')])
  text = capsys.readouterr().out
  count = int(re.search(r'about (\d+) to make', text)[1])
  assert 250 < count < 320
  assert not (tmp_path / 'results').exists()


def test_jobs_are_checked(tmp_path, capsys):
  with pytest.raises(SystemExit):
    command.main(['--jobs', '0', '--results', str(tmp_path)])
  assert '--jobs must be at least 1, got 0' in capsys.readouterr().err


@pytest.mark.slow
def test_an_experiment_runs_from_beginning_to_end(
  tmp_path: Path, monkeypatch, capsys
):
  nano = SCALES['nano']
  text = tmp_path / 'text.txt'
  text.write_text('The quick brown fox jumps over the lazy dog.\n' * 400)
  settings = nano.settings | dict(
    cache_dir=tmp_path / 'cache', num_layers=1, width=16, num_heads=2,
    context_length=16, eval_sequences=8, unroll=1,
  )  # fmt: skip
  tiny = dataclasses.replace(
    nano, settings=settings, batch_sizes=(8, 16), budget=3, seeds=1
  )
  monkeypatch.setitem(command.SCALES, 'nano', tiny)
  command.main([
    'attention-logits', '--steps', '2', '--jobs', '1', '--data', str(text),
    '--results', str(tmp_path / 'results'), '--work', str(tmp_path / 'work'),
  ])  # fmt: skip
  assert '4 × tuned' in (tmp_path / 'results' / 'RESULTS.md').read_text()
  assert 'wrote' in capsys.readouterr().out
