import dataclasses
import errno
import json
from pathlib import Path
import shutil

import chex
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.convert import export_model
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.presets import identity, resolve
from examples.gpt2.run import loop, restore, start
from examples.gpt2.run.changes import refusal
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import MEASURED
from examples.gpt2.run.memory import OutOfMemoryError
from examples.gpt2.run.weights import load_model
from examples.gpt2.train import train


def _stable(config: Config, **changes) -> Config:
  """Returns settings of a run that can be made longer."""
  settings = {
    'schedule': 'wsd',
    'warmup_steps': 2,
    'decay_steps': 0,
    'learning_rate': 0.01,
    'checkpoint_every': 2,
    'max_to_keep': 9,
    'diagnostics_every': 0,
  }
  return dataclasses.replace(config, **settings | changes)


def _metrics(config: Config) -> list[dict]:
  lines = RunFolder(config.out_dir).read_metrics()
  return [
    {k: v for k, v in line.items() if k not in MEASURED} for line in lines
  ]


def _assert_same_end(one: Config, other: Config) -> None:
  chex.assert_trees_all_equal(
    load_model(one.out_dir).params, load_model(other.out_dir).params
  )


@pytest.fixture(scope='module')
def stable(make_tiny, tmp_path_factory) -> Config:
  """Settings of a run of six steps at a constant rate, not to be changed."""
  config = _stable(make_tiny(tmp_path_factory.mktemp('stable')))
  train(config)
  return config


@pytest.fixture
def copied(stable: Config, tmp_path: Path) -> Config:
  shutil.copytree(stable.out_dir, tmp_path / 'run')
  return dataclasses.replace(stable, out_dir=tmp_path / 'run')


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
  longer = dataclasses.replace(copied, steps=10, eval_every=5)
  train(longer)
  at_once = dataclasses.replace(longer, out_dir=tmp_path / 'at_once')
  train(at_once)
  _assert_same_end(longer, at_once)
  one, other = _metrics(longer), _metrics(at_once)
  assert [x['step'] for x in one] == list(range(1, 11))
  assert [x['train_loss'] for x in one] == [x['train_loss'] for x in other]
  before = load_model(stable.out_dir).params
  chex.assert_trees_all_equal(load_model(copied.out_dir, step=6).params, before)
  # The former end is kept.
  kept = (copied.out_dir / 'before-1' / 'weights.safetensors').read_bytes()
  assert kept == (stable.out_dir / 'weights.safetensors').read_bytes()


def test_a_cooldown_starts_from_any_checkpoint(stable: Config, tmp_path: Path):
  cooldown = dataclasses.replace(
    stable,
    out_dir=tmp_path / 'cooldown',
    fork_from=stable.out_dir,
    fork_step=4,
    steps=7,
    decay_steps=3,
    decay_shape='1-sqrt',
  )
  train(cooldown)
  lines = _metrics(cooldown)
  assert lines[:4] == _metrics(stable)[:4]
  rates = [line['learning_rate'] for line in lines[4:]]
  expected = 0.01 * (1 - np.sqrt(np.arange(3) / 3))
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
  at_once = dataclasses.replace(
    cooldown, out_dir=tmp_path / 'at_once', fork_from=None, fork_step=None
  )
  train(at_once)
  _assert_same_end(cooldown, at_once)
  # It is reported, not repeated, and known by what it started from.
  assert train(cooldown).finished
  with pytest.raises(UsageError, match=r"fork: .*'step': 4"):
    train(dataclasses.replace(cooldown, fork_step=2))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(steps=10, learning_rate=0.02), 'step 1 had the learning rate 0.0'),
    (dict(steps=10, decay_steps=6), r'step 6 had .*--fork-from'),
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
    train(dataclasses.replace(copied, **changes))
  assert sorted(copied.out_dir.iterdir()) == before


def test_a_cosine_cannot_be_made_longer():
  old = identity(resolve(Config(steps=100, learning_rate=0.1)))
  assert '--warmup-share 0.1' in refusal(old, old | {'steps': 200}, 20)
  assert not refusal(old, old | {'eval_every': 7}, 20)
  longer = old | {'steps': 200, 'schedule': 'wsd'}
  assert 'schedule: cosine -> wsd' in refusal(old, longer, 20)


def test_a_fork_needs_a_checkpoint_that_is_there(
  stable: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  config = dataclasses.replace(stable, out_dir=tmp_path / 'x', steps=20)
  forked = dataclasses.replace(config, fork_from=stable.out_dir)
  with pytest.raises(UsageError, match='needs --fork-step'):
    train(forked)
  with pytest.raises(
    UsageError, match=r'--fork-step must .*\(2, 4, 6\), got 3'
  ):
    train(dataclasses.replace(forked, fork_step=3))
  monkeypatch.setattr(loop, '_compile', lambda *_: pytest.fail('compiled'))
  for change, words in (
    ({'mlp_width': 128}, '--mlp-width 128 instead of 64'),
    ({'optimizer': 'lion'}, 'is a run of --optimizer merit, got .* lion:'),
  ):
    with pytest.raises(UsageError, match=words):
      train(dataclasses.replace(forked, fork_step=4, **change))
  # The folder is free for the command that is put right.
  assert not (config.out_dir / 'config.json').exists()
  text = tmp_path / 'other.txt'
  text.write_text('another text. ' * 500)
  with pytest.raises(UsageError, match='has another tokenizer than --data'):
    train(dataclasses.replace(forked, fork_step=4, data=str(text)))
  with pytest.raises(UsageError, match='leave out one of the two'):
    train(dataclasses.replace(forked, fork_step=4, init_from=stable.out_dir))
  with pytest.raises(UsageError, match='--init-step needs --init-from'):
    train(dataclasses.replace(config, init_step=4))


@pytest.fixture
def unfinished(copied: Config) -> Path:
  """The folder of a run that has not ended."""
  for name in ('weights.safetensors', 'sample.txt', 'curves.png'):
    (copied.out_dir / name).unlink()
  return copied.out_dir


@pytest.mark.parametrize('mesh', ['', 'fsdp=4,tensor=2'])
def test_weights_of_a_run_that_goes_on_are_read(
  stable: Config, unfinished: Path, mesh: str
):
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
  copied: Config, tmp_path: Path, monkeypatch, name: str
):
  settings = {f'{name}_from': copied.out_dir, f'{name}_step': 4}
  config = dataclasses.replace(
    copied, out_dir=tmp_path / 'new', steps=7, checkpoint_every=1, **settings
  )
  save = Checkpoints.save
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

    def interrupt(saved, step, *state):
      if step == 6:
        raise KeyboardInterrupt
      return save(saved, step, *state)

    patch.setattr(Checkpoints, 'save', interrupt)
    train(config)
  shutil.rmtree(copied.out_dir / 'checkpoints' / '4')
  with pytest.raises(UsageError, match=rf'--{name}-step must be the step of'):
    train(dataclasses.replace(config, out_dir=tmp_path / 'other'))
  # What would start over from nothing leaves the run where it is.
  before = sorted(config.out_dir.rglob('*'))
  with pytest.raises(UsageError, match=rf'--{name}-step must be the step of'):
    train(dataclasses.replace(config, from_scratch=True))
  assert sorted(config.out_dir.rglob('*')) == before
  train(config)
  assert [x['step'] for x in _metrics(config)] == list(range(1, 8))


def test_a_source_that_cannot_be_read_leaves_the_folder_free(
  copied: Config, tmp_path: Path
):
  config = dataclasses.replace(
    copied, out_dir=tmp_path / 'new', init_from=copied.out_dir
  )
  weights = copied.out_dir / 'weights.safetensors'
  weights.write_bytes(weights.read_bytes()[:-4])
  with pytest.raises(UsageError, match='weights.safetensors cannot be used'):
    train(config)
  # Nor does a fork, of which only the arrays are damaged, or a tokenizer.
  fork = dataclasses.replace(
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
  with pytest.raises(
    UsageError, match='--init-from cannot be used: .* missing'
  ):
    train(config)
  with pytest.raises(UsageError, match='if --out-dir names its folder'):
    train(dataclasses.replace(config, out_dir=None))
  assert not (tmp_path / 'new' / 'config.json').exists()


@pytest.mark.parametrize('content', ['', '{}'])
def test_a_damaged_record_is_named(
  copied: Config, tmp_path: Path, content: str
):
  record = copied.out_dir / 'checkpoints' / '4' / 'record' / 'metadata'
  record.write_text(content)
  for name in ('fork', 'init'):
    settings = {f'{name}_from': copied.out_dir, f'{name}_step': 4, 'steps': 7}
    with pytest.raises(UsageError, match='of step 4 .* cannot be used'):
      train(dataclasses.replace(copied, out_dir=tmp_path / 'new', **settings))


def test_a_run_that_is_done_needs_nothing_that_it_started_from(
  copied: Config, tmp_path: Path, capsys: pytest.CaptureFixture
):
  config = dataclasses.replace(
    copied, out_dir=tmp_path / 'new', init_from=copied.out_dir, steps=2
  )
  train(config)
  shutil.rmtree(copied.out_dir)
  shutil.rmtree(config.out_dir / 'checkpoints')
  train(config)
  assert 'This run has been done' in capsys.readouterr().out


def test_what_does_not_fit_while_weights_are_read_gives_advice(
  copied: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  def fail(*_: object) -> None:
    raise MemoryError('no room')

  monkeypatch.setattr(start, 'load_model', fail)
  config = dataclasses.replace(
    copied, out_dir=tmp_path / 'new', init_from=copied.out_dir
  )
  with pytest.raises(OutOfMemoryError, match='no room'):
    train(config)


def test_a_run_without_a_checkpoint_is_named(unfinished: Path):
  shutil.rmtree(unfinished / 'checkpoints')
  (unfinished / 'checkpoints').mkdir()
  with pytest.raises(UsageError, match='run has neither final weights nor'):
    load_model(unfinished)


@pytest.mark.slow
def test_commands_take_a_run_that_goes_on(
  stable: Config, unfinished: Path, tmp_path: Path
):
  expected = _metrics(stable)[-1]['val_loss']
  found, at_two = (
    evaluate(
      unfinished,
      stable.data,
      held_out=True,
      step=step,
      sequences=stable.eval_sequences,
    )
    for step in (None, 2)
  )
  assert found.loss == pytest.approx(expected, abs=1e-5)
  assert at_two.loss > found.loss
  [text] = generate(unfinished, 'the', tokens=3, step=4)
  assert text.startswith('the')
  # A run that starts from them keeps them at such a rate.
  config = dataclasses.replace(
    stable,
    out_dir=tmp_path / 'new',
    init_from=unfinished,
    steps=2,
    learning_rate=1e-9,
  )
  with pytest.raises(UsageError, match='--init-step chooses one'):
    train(config)
  config = dataclasses.replace(config, init_step=2)
  train(config)
  line = _metrics(config)[-1]
  assert line['val_loss'] == pytest.approx(at_two.loss, abs=1e-5)


def test_a_damaged_checkpoint_gives_no_weights(unfinished: Path, monkeypatch):
  monkeypatch.setattr(restore, 'checksums', lambda arrays: arrays.keys())
  record = unfinished / 'checkpoints' / '6' / 'record' / 'metadata'
  content = json.loads(record.read_text())
  name = next(k for k in content['types'] if k.startswith('params.'))
  content['types'][name] = 'float32[1]'
  record.write_text(json.dumps(content))
  with pytest.raises(UsageError, match=f'step 6 .* cannot be used: .*{name}'):
    load_model(unfinished)


def test_models_for_hugging_face_are_written_on_the_way(
  tiny: Config, tmp_path: Path
):
  config = dataclasses.replace(
    tiny, hf_every=4, checkpoint_every=4, diagnostics_every=0
  )
  train(config)
  folder = config.out_dir / 'hf'
  assert sorted(x.name for x in folder.iterdir()) == ['step-4', 'step-6']
  for step in (4, 6):
    out = tmp_path / f'exported-{step}'
    export_model(config.out_dir, out, step=step)
    names = sorted(x.name for x in out.iterdir())
    for name in names:
      written = (folder / f'step-{step}' / name).read_bytes()
      assert written == (out / name).read_bytes()
  # Of a step that is taken again they are written again.
  weights = folder / 'step-6' / 'model.safetensors'
  before = weights.read_bytes()
  weights.write_text('cut short')
  for name in ('sample.txt', 'weights.safetensors'):
    (config.out_dir / name).unlink()
  shutil.rmtree(config.out_dir / 'checkpoints' / '6')
  train(config)
  assert weights.read_bytes() == before


def test_an_export_that_a_kill_prevented_is_made_when_the_run_goes_on(
  tiny: Config, monkeypatch: pytest.MonkeyPatch
):
  config = dataclasses.replace(
    tiny, hf_every=4, checkpoint_every=4, diagnostics_every=0
  )
  folder = config.out_dir / 'hf'
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

    def interrupt(*_: object) -> None:
      # As a kill leaves it.
      (folder / 'partial-step-4-x').mkdir(parents=True)
      raise KeyboardInterrupt

    patch.setattr(loop, 'write_hugging_face', interrupt)
    train(config)
  train(config)
  assert sorted(x.name for x in folder.iterdir()) == ['step-4', 'step-6']
  # Others may read it, as all that a run writes.
  modes = [x.stat().st_mode for x in (folder / 'step-4').iterdir()]
  assert len(set(modes)) == 1


def test_an_export_that_fails_does_not_end_the_run(tiny: Config, monkeypatch):
  def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(loop, 'write_hugging_face', fail)
  config = dataclasses.replace(tiny, hf_every=6, steps=6, diagnostics_every=0)
  with pytest.warns(RuntimeWarning, match='export of step 6 failed'):
    train(config)


def test_checkpoints_come_by_time(tiny: Config):
  config = dataclasses.replace(
    tiny,
    checkpoint_every=99,
    checkpoint_minutes=1e-9,
    max_to_keep=9,
    diagnostics_every=0,
  )
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
  longer = dataclasses.replace(copied, steps=8)
  train(longer)
  assert [x['step'] for x in _metrics(longer)] == list(range(1, 9))
