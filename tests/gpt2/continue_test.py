"""Runs that start from another one, or are made longer."""

from pathlib import Path
import shutil

import pytest

from examples.gpt2.config import Config, UsageError, change
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.train import train
from tests.gpt2 import runs


def _stable(tiny: Config, steps: int) -> Config:
  """Settings of a run whose learning rate stays at its peak."""
  return change(
    tiny, schedule='wsd', warmup=2.0, decay=0.0, steps=steps,
    checkpoint_every=2, max_to_keep=9, eval_every=6,
  )  # fmt: skip


@pytest.fixture(scope='module')
def stable(make_tiny, tmp_path_factory) -> Config:
  """Settings of a finished run of six steps; not to be changed."""
  config = _stable(make_tiny(tmp_path_factory.mktemp('stable')), 6)
  train(config)
  return config


@pytest.fixture
def copied(stable: Config, tmp_path: Path) -> Config:
  """The same in a folder that a test may change."""
  shutil.copytree(stable.out_dir, tmp_path / 'run')
  return change(stable, out_dir=tmp_path / 'run')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'seed': 3}, 'seed: 0 -> 3'),
    ({'width': 32}, 'width: 16 -> 32'),
    ({'learning_rate': 0.5}, r'step 1 had the learning rate .*--warmup 2'),
    ({'steps': 4}, 'has done 6 steps'),
  ],
)
def test_another_past_is_refused(copied: Config, changes: dict, message: str):
  before = runs.contents(copied.out_dir)
  if 'width' in changes:
    changes = {'mlp_width': None, 'head_width': None, **changes}
  with pytest.raises(UsageError, match=message):
    train(change(copied, **changes))
  assert runs.contents(copied.out_dir) == before


def test_a_run_can_be_made_longer(copied: Config, tmp_path: Path):
  longer = change(copied, steps=8)
  weights = copied.out_dir / 'weights.safetensors'
  seen = []
  # Nobody takes the weights of the former end for those of the longer run.
  with runs.during(7, lambda: seen.append(weights.exists())):
    train(longer)
  assert seen == [False]
  whole = change(longer, out_dir=tmp_path / 'whole')
  train(whole)
  found, expected = map(runs.metrics, (copied.out_dir, whole.out_dir))
  assert found == expected
  assert (
    weights.read_bytes() == (whole.out_dir / 'weights.safetensors').read_bytes()
  )


def test_a_cooldown_starts_from_a_checkpoint(stable: Config, tmp_path: Path):
  cooldown = change(
    stable, fork_from=stable.out_dir, from_step=4, steps=6, decay=2.0,
    out_dir=tmp_path / 'cooldown',
  )  # fmt: skip
  message = r'--from-step must be .* \(0, 2, 4, 6\), got 3'
  with pytest.raises(UsageError, match=message):
    train(change(cooldown, from_step=3))
  train(cooldown)
  ours, theirs = map(runs.metrics, (cooldown.out_dir, stable.out_dir))
  assert ours[:4] == theirs[:4]
  # The first step has the peak still.
  assert ours[4]['train_loss'] == theirs[4]['train_loss']
  assert ours[5]['learning_rate'] < theirs[5]['learning_rate']


def test_a_run_starts_from_weights(stable: Config, tmp_path: Path):
  started = change(
    stable, init_from=stable.out_dir, out_dir=tmp_path / 'two', seed=1, steps=2
  )
  train(started)
  assert runs.metrics(started.out_dir)[0]['train_loss'] < (
    runs.metrics(stable.out_dir)[0]['train_loss'] - 0.1
  )
  with pytest.raises(UsageError, match='another model .*--width 32'):
    train(change(started, out_dir=tmp_path / 'three', width=32))


def test_commands_take_a_run_that_goes_on(stable: Config, copied: Config):
  folder = copied.out_dir
  # What a kill leaves before the last checkpoint.
  shutil.rmtree(folder / 'checkpoints' / '6')
  for name in ('weights.safetensors', 'sample.txt'):
    (folder / name).unlink()
  data = stable.data[0]
  assert evaluate(folder, data) == evaluate(stable.out_dir, data, step=4)
  assert generate(folder, 'the', 8) == generate(
    stable.out_dir, 'the', 8, step=4
  )
  with pytest.raises(UsageError, match=r'--step must .*\(0, 2, 4\), got 5'):
    generate(folder, 'the', 8, step=5)
