from dataclasses import replace
import errno
import json
from pathlib import Path
import shutil
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.convert import export_model
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.run import loop, start
from examples.gpt2.run.diagnostics import Diagnostics
from examples.gpt2.run.folder import RunFolder, recorded
from examples.gpt2.run.memory import OutOfMemoryError
from examples.gpt2.run.restore import Checkpoint
from examples.gpt2.run.weights import load_model
from examples.gpt2.train import train
from tests.gpt2 import runs


def _assert_same_end(one: Config, other: Config) -> None:
  chex.assert_trees_all_equal(
    load_model(one.out_dir).params, load_model(other.out_dir).params
  )


@pytest.fixture(scope='module')
def stable(make_tiny, tmp_path_factory) -> Config:
  """Settings of a run of six steps at a constant rate, not to be changed."""
  config = replace(
    make_tiny(tmp_path_factory.mktemp('stable')),
    schedule='wsd', warmup_steps=2, decay_steps=0, learning_rate=0.01,
    checkpoint_every=9, keep_period=2, max_to_keep=1, diagnostics_every=0,
  )  # fmt: skip
  train(config)
  return config


@pytest.fixture
def copied(stable: Config, tmp_path: Path) -> Config:
  shutil.copytree(stable.out_dir, tmp_path / 'run')
  return replace(stable, out_dir=tmp_path / 'run')


def test_weights_of_a_former_end_are_not_those_of_a_longer_run(copied: Config):
  (copied.out_dir / 'sample.txt').unlink()  # As a kill leaves it.
  settings = json.loads((copied.out_dir / 'config.json').read_text())
  settings['config']['steps'] = 20
  with RunFolder(copied.out_dir) as folder:
    folder.start(settings)
  assert not (copied.out_dir / 'weights.safetensors').exists()
  assert (copied.out_dir / 'before-1' / 'weights.safetensors').is_file()


def test_a_longer_run_is_the_one_that_it_would_have_been(
  stable: Config, copied: Config, tmp_path: Path
):
  longer = replace(copied, steps=10, eval_every=5)
  train(longer)
  at_once = replace(longer, out_dir=tmp_path / 'at_once')
  train(at_once)
  _assert_same_end(longer, at_once)
  one, other = (
    [(x['step'], x['train_loss']) for x in runs.metrics(config.out_dir)]
    for config in (longer, at_once)
  )
  assert one == other
  before = load_model(stable.out_dir).params
  chex.assert_trees_all_equal(load_model(copied.out_dir, step=6).params, before)
  # The former end is kept.
  kept = (copied.out_dir / 'before-1' / 'weights.safetensors').read_bytes()
  assert kept == (stable.out_dir / 'weights.safetensors').read_bytes()


def test_a_cooldown_starts_from_any_checkpoint(stable: Config, tmp_path: Path):
  cooldown = replace(
    stable, out_dir=tmp_path / 'cooldown', fork_from=stable.out_dir,
    fork_step=4, steps=7, decay_steps=3, decay_shape='1-sqrt',
  )  # fmt: skip
  train(cooldown)
  lines = runs.metrics(cooldown.out_dir)
  assert lines[:4] == runs.metrics(stable.out_dir)[:4]
  rates = [line['learning_rate'] for line in lines[4:]]
  expected = 0.01 * (1 - np.sqrt(np.arange(3) / 3))
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
  at_once = replace(
    cooldown, out_dir=tmp_path / 'at_once', fork_from=None, fork_step=None
  )
  train(at_once)
  _assert_same_end(cooldown, at_once)
  # It is reported, not repeated, and known by what it started from.
  assert train(cooldown).finished
  with pytest.raises(UsageError, match=r"fork: .*'step': 4"):
    train(replace(cooldown, fork_step=2))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(steps=10, learning_rate=0.02), 'step 1 had the learning rate 0.0'),
    (
      dict(steps=10, decay_steps=6),
      r'step 6 had .*--warmup-steps 2 .*--fork-from',
    ),
    (
      dict(steps=10, schedule='cosine', decay_steps=None),
      r'schedule: wsd -> cosine',
    ),
    (dict(steps=5), 'has done 6 steps, more than --steps 5'),
    (dict(steps=10, seed=1), r'other settings \(seed: 0 -> 1, steps: 6 -> 10'),
  ],
)
def test_another_past_is_refused(copied: Config, changes: dict, message: str):
  before = sorted(copied.out_dir.iterdir())
  with pytest.raises(UsageError, match=message):
    train(replace(copied, **changes))
  assert sorted(copied.out_dir.iterdir()) == before


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'fork_step': None}, 'needs --fork-step'),
    ({'fork_step': 3}, r'--fork-step must .*\(2, 4, 6\), got 3'),
    ({'mlp_width': 128}, '--mlp-width 128 instead of 64'),
    ({'optimizer': 'lion'}, 'is a run of --optimizer merit, got .* lion:'),
    ({'data': 'other.txt'}, 'another tokenizer than --data.*--tokenizer run'),
    ({'init_from': Path('run')}, 'leave out one of the two'),
    (
      {'fork_from': None, 'fork_step': None, 'init_step': 4},
      '--init-step needs --init-from',
    ),
  ],
)
def test_a_fork_that_does_not_fit_is_refused(
  stable: Config, tmp_path: Path, changes: dict, words: str, monkeypatch
):
  monkeypatch.setattr(loop, '_compile', lambda *_: pytest.fail('compiled'))
  monkeypatch.chdir(stable.out_dir.parent)
  Path('other.txt').write_text('another text. ' * 500)
  forked = replace(stable, out_dir=tmp_path, fork_from=Path('run'), fork_step=4)
  with pytest.raises(UsageError, match=words):
    train(replace(forked, **changes))
  # The folder is free for the command that is put right.
  assert not (tmp_path / 'config.json').exists()


@pytest.fixture
def unfinished(copied: Config) -> Path:
  """The folder of a run that has not ended."""
  for name in ('weights.safetensors', 'sample.txt', 'curves.png'):
    (copied.out_dir / name).unlink()
  return copied.out_dir


@pytest.mark.parametrize('mesh', ['', 'fsdp=4,tensor=2'])
def test_weights_of_a_run_that_goes_on_are_read(stable, unfinished, mesh: str):
  devices = make_mesh(mesh) if mesh else None
  last = load_model(unfinished, devices).params
  chex.assert_trees_all_equal(
    jax.device_get(last), load_model(stable.out_dir).params
  )
  former = load_model(unfinished, devices, step=2).params
  with pytest.raises(AssertionError):
    chex.assert_trees_all_equal(jax.device_get(former), jax.device_get(last))
  with pytest.raises(UsageError, match=r'--step must .*\(2, 4, 6\), got 3'):
    load_model(unfinished, devices, step=3)


@pytest.mark.parametrize('name', ['fork', 'init'])
def test_a_run_goes_on_when_what_it_started_from_is_gone(
  copied: Config, tmp_path: Path, name: str
):
  settings = {f'{name}_from': copied.out_dir, f'{name}_step': 4}
  config = replace(
    copied, out_dir=tmp_path / 'new', steps=7, checkpoint_every=1, **settings
  )
  with pytest.raises(runs.Killed), runs.during(6):
    train(config)
  shutil.rmtree(copied.out_dir / 'checkpoints' / '4')
  before = sorted(config.out_dir.rglob('*'))
  # What would start over from nothing leaves the run where it is.
  for change in ({'out_dir': tmp_path / 'other'}, {'from_scratch': True}):
    with pytest.raises(UsageError, match=rf'--{name}-step must be the step of'):
      train(replace(config, **change))
  assert sorted(config.out_dir.rglob('*')) == before
  train(config)
  steps = [x['step'] for x in runs.metrics(config.out_dir)]
  assert steps == list(range(1, 8))


def test_a_source_that_cannot_be_read_leaves_the_folder_free(copied, tmp_path):
  config = replace(copied, out_dir=tmp_path / 'new', init_from=copied.out_dir)
  weights = copied.out_dir / 'weights.safetensors'
  weights.write_bytes(weights.read_bytes()[:-4])
  with pytest.raises(UsageError, match='weights.safetensors cannot be used'):
    train(config)
  # Nor does a fork, of which only the arrays are damaged, or a tokenizer.
  fork = replace(
    config, init_from=None, fork_from=copied.out_dir, fork_step=4, steps=8
  )
  largest = max(
    (copied.out_dir / 'checkpoints' / '4' / 'state').rglob('*'),
    key=lambda x: x.stat().st_size,
  )
  largest.write_bytes(largest.read_bytes()[:50])
  with pytest.raises(UsageError, match='of step 4 .* cannot be used'):
    train(fork)
  (copied.out_dir / 'tokenizer.json').write_text('{')
  with pytest.raises(UsageError, match='--fork-from cannot be used'):
    train(fork)
  (copied.out_dir / 'model.json').unlink()
  with pytest.raises(UsageError, match='--init-from cannot be used: .*missing'):
    train(config)
  with pytest.raises(UsageError, match='if --out-dir names its folder'):
    train(replace(config, out_dir=None))
  assert not (tmp_path / 'new' / 'config.json').exists()


def test_process_0_hashes_what_a_run_starts_from_for_all(tiny, monkeypatch):
  def on_process_0(function, *_):
    return {} if function is recorded else 'its hash'

  monkeypatch.setattr(start, 'on_process_0', on_process_0)
  # Another process reads neither.
  nowhere = Path('nowhere')
  started = start.origin(replace(tiny, init_from=nowhere))
  assert started == {'init_sha256': 'its hash'}
  forked = start.origin(replace(tiny, fork_from=nowhere, fork_step=4))
  assert forked['fork'] == {'step': 4, 'sha256': 'its hash'}


@pytest.mark.parametrize('content', ['', '{}'])
def test_a_damaged_record_is_named(copied: Config, tmp_path, content: str):
  record = copied.out_dir / 'checkpoints' / '4' / 'record' / 'metadata'
  record.write_text(content)
  for name in ('fork', 'init'):
    settings = {f'{name}_from': copied.out_dir, f'{name}_step': 4, 'steps': 7}
    with pytest.raises(UsageError, match='of step 4 .* cannot be used'):
      train(replace(copied, out_dir=tmp_path / 'new', **settings))


def test_a_run_that_is_done_needs_nothing_that_it_started_from(
  copied: Config, tmp_path: Path, capsys: pytest.CaptureFixture
):
  config = replace(
    copied, out_dir=tmp_path / 'new', init_from=copied.out_dir, steps=2
  )
  train(config)
  shutil.rmtree(copied.out_dir)
  shutil.rmtree(config.out_dir / 'checkpoints')
  train(config)
  assert 'This run has been done' in capsys.readouterr().out


@pytest.mark.parametrize(
  ('owner', 'name'), [(start, 'load_model'), (Diagnostics, 'compile')]
)
def test_what_does_not_fit_before_the_first_step_gives_advice(
  copied: Config, tmp_path: Path, monkeypatch, owner: object, name: str
):
  error = MemoryError('no room')
  monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
  config = replace(
    copied, out_dir=tmp_path / 'new', init_from=copied.out_dir,
    diagnostics_every=4,
  )  # fmt: skip
  with pytest.raises(OutOfMemoryError, match='no room'):
    train(config)
  assert not (config.out_dir / 'metrics.jsonl').exists()


def test_a_run_without_a_checkpoint_is_named(unfinished: Path):
  shutil.rmtree(unfinished / 'checkpoints')
  (unfinished / 'checkpoints').mkdir()
  with pytest.raises(UsageError, match='run has neither final weights nor'):
    load_model(unfinished)
  with pytest.raises(UsageError, match='no checkpoints, so none of --step 5'):
    Checkpoint(unfinished, 5, '--step')


@pytest.mark.slow
def test_commands_take_a_run_that_goes_on(stable, unfinished, tmp_path):
  sizes = {'held_out': True, 'sequences': stable.eval_sequences}
  last, at_two = (
    evaluate(unfinished, stable.data, step=step, **sizes).loss
    for step in (None, 2)
  )
  end = runs.metrics(stable.out_dir)[-1]
  assert last == pytest.approx(end['val_loss'], abs=1e-5)
  assert at_two > last
  [text] = generate(unfinished, 'the', tokens=3, step=4)
  assert text.startswith('the')
  # A run that starts from them keeps them at such a rate.
  config = replace(
    stable, out_dir=tmp_path / 'new', init_from=unfinished, steps=2,
    learning_rate=1e-9,
  )  # fmt: skip
  with pytest.raises(UsageError, match='--init-step chooses one'):
    train(config)
  config = replace(config, init_step=2)
  train(config)
  end = runs.metrics(config.out_dir)[-1]
  assert end['val_loss'] == pytest.approx(at_two, abs=1e-5)


@pytest.fixture
def exporting(tiny: Config) -> Config:
  """Settings of a run that writes two models for Hugging Face."""
  return replace(tiny, hf_every=4, diagnostics_every=0)


def test_models_for_hugging_face_are_written_on_the_way(exporting, tmp_path):
  train(exporting)
  folder = exporting.out_dir / 'hf'
  assert sorted(x.name for x in folder.iterdir()) == ['step-4', 'step-6']
  for step in (4, 6):
    out = tmp_path / f'exported-{step}'
    export_model(exporting.out_dir, out, step=step)
    for file in out.iterdir():
      written = folder / f'step-{step}' / file.name
      assert written.read_bytes() == file.read_bytes()
  # Of a step that is taken again they are written again.
  weights = folder / 'step-6' / 'model.safetensors'
  before = weights.read_bytes()
  weights.write_text('cut short')
  for name in ('sample.txt', 'weights.safetensors'):
    (exporting.out_dir / name).unlink()
  shutil.rmtree(exporting.out_dir / 'checkpoints' / '6')
  train(exporting)
  assert weights.read_bytes() == before


def test_an_export_that_a_kill_prevented_is_made_when_the_run_goes_on(
  exporting: Config, monkeypatch: pytest.MonkeyPatch
):
  folder = exporting.out_dir / 'hf'

  def interrupt(*_: object) -> None:
    # As a kill leaves it.
    (folder / 'partial-step-4-x').mkdir(parents=True)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(loop, 'write_hugging_face', interrupt)
    train(exporting)
  train(exporting)
  assert sorted(x.name for x in folder.iterdir()) == ['step-4', 'step-6']
  # Others may read it, as all that a run writes.
  modes = [x.stat().st_mode for x in (folder / 'step-4').iterdir()]
  assert len(set(modes)) == 1


def test_an_export_that_fails_does_not_end_the_run(exporting, monkeypatch):
  error = OSError(errno.ENOSPC, 'No space left on device')
  monkeypatch.setattr(loop, 'write_hugging_face', mock.Mock(side_effect=error))
  with pytest.warns(RuntimeWarning, match='export of step 6 failed'):
    train(exporting)


def test_checkpoints_come_by_time(tiny: Config):
  config = replace(
    tiny, checkpoint_every=99, checkpoint_minutes=1e-9, max_to_keep=9,
    diagnostics_every=0,
  )  # fmt: skip
  train(config)
  assert len([*(config.out_dir / 'checkpoints').iterdir()]) == 6


def test_a_checkpoint_of_former_releases_has_no_step(copied: Config):
  """As of 0.2.0, which saved no step."""
  folder = copied.out_dir / 'checkpoints'
  record = folder / '6' / 'record' / 'metadata'
  content = json.loads(record.read_text())
  for part in ('types', 'checksums'):
    del content[part]['step']
  record.write_text(json.dumps(content))
  longer = replace(copied, steps=8)
  train(longer)
  steps = [x['step'] for x in runs.metrics(longer.out_dir)]
  assert steps == list(range(1, 9))
