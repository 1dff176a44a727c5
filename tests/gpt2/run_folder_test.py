from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from examples.gpt2.config import UsageError
from examples.gpt2.run_folder import RunFolder

_SETTINGS = {'config': {'steps': 3, 'seed': 0}}


def test_metrics_are_read_as_they_were_logged(tmp_path: Path):
  folder = RunFolder(tmp_path / 'deep' / 'run')
  folder.start(_SETTINGS)
  lines = [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.25}]
  for line in lines:
    folder.log(line)
  assert folder.read_metrics() == lines
  assert folder.read_settings() == _SETTINGS


def test_a_killed_run_starts_over_and_says_so(tmp_path: Path):
  folder = RunFolder(tmp_path)
  assert not folder.start(_SETTINGS)
  folder.log({'step': 1})
  del folder
  again = RunFolder(tmp_path)
  assert again.start(_SETTINGS)
  assert again.read_metrics() == []


def test_a_finished_run_is_kept(tmp_path: Path):
  folder = RunFolder(tmp_path)
  folder.start(_SETTINGS)
  folder.log({'step': 1})
  folder.write_weights({'a': np.zeros(1)})
  folder.picture.write_bytes(b'picture')
  assert not folder.finished
  folder.write_sample('text')
  assert folder.finished
  del folder
  again = RunFolder(tmp_path)
  assert not again.start(_SETTINGS)
  assert again.read_metrics() == [{'step': 1}]


def test_other_settings_are_refused_with_the_difference(tmp_path: Path):
  RunFolder(tmp_path).start(_SETTINGS)  # Its lock goes with it.
  with pytest.raises(UsageError, match='seed: 0 -> 1'):
    RunFolder(tmp_path).start({'config': {'steps': 3, 'seed': 1}})


@pytest.mark.parametrize('name', ['sample.txt', 'metrics.jsonl'])
def test_files_of_something_else_are_not_touched(tmp_path: Path, name: str):
  (tmp_path / name).write_text('mine')
  with pytest.raises(UsageError, match=f'{name} of something else'):
    RunFolder(tmp_path).start(_SETTINGS)
  assert (tmp_path / name).read_text() == 'mine'
  assert not (tmp_path / 'config.json').exists()


@pytest.mark.parametrize('text', ['no json', '[1, 2]', '{"model": "llama"}'])
def test_a_config_of_something_else_is_refused(tmp_path: Path, text: str):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UsageError, match='no run of this trainer wrote'):
    RunFolder(tmp_path).start(_SETTINGS)


def test_a_second_run_is_kept_out_while_the_first_goes_on(tmp_path: Path):
  with RunFolder(tmp_path) as first:
    first.start(_SETTINGS)
    with pytest.raises(UsageError, match='in use'):
      RunFolder(tmp_path).start(_SETTINGS)
  RunFolder(tmp_path).start(_SETTINGS)


def test_weights_are_whole_or_not_there(tmp_path: Path, monkeypatch):
  folder = RunFolder(tmp_path)
  folder.write_weights({'a.b': np.arange(3.0)})
  before = (tmp_path / 'weights.safetensors').read_bytes()

  def fail(*_):
    raise OSError('killed before the file is in its place')

  monkeypatch.setattr('os.replace', fail)
  with pytest.raises(OSError, match='killed'):
    folder.write_weights({'a.b': np.zeros(5)})
  assert (tmp_path / 'weights.safetensors').read_bytes() == before
  assert list(safetensors.numpy.load(before)['a.b']) == [0, 1, 2]
