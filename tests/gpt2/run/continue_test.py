"""Runs that start from another one, or are made longer."""

from dataclasses import replace
from pathlib import Path
import re
import shutil

import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.run import memory
from examples.gpt2.run.weights import load_model
from examples.gpt2.train import main, train
from tests.gpt2 import runs


def _stable(tiny: Config, steps: int) -> Config:
  """Settings of a run whose learning rate stays at its peak."""
  return replace(
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
  return replace(stable, out_dir=tmp_path / 'run')


def test_a_longer_run_is_the_one_that_it_would_have_been(
  copied: Config, tmp_path: Path
):
  longer = replace(copied, steps=10)
  with pytest.raises(runs.Killed), runs.during(8):
    train(longer)
  # Nobody takes the weights of the former end for those of the longer run.
  assert not (copied.out_dir / 'weights.safetensors').exists()
  train(longer)
  whole = replace(longer, out_dir=tmp_path / 'whole')
  train(whole)
  skipped = {'val_loss', 'max_attention_logit'}  # Of the former last step.
  for found, expected in zip(
    *map(runs.metrics, (copied.out_dir, whole.out_dir)), strict=True
  ):
    if found['step'] != 6:
      assert found == expected
    assert found['train_loss'] == expected['train_loss'], skipped
  weights = [
    (x / 'weights.safetensors').read_bytes()
    for x in (copied.out_dir, whole.out_dir)
  ]
  assert weights[0] == weights[1]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'seed': 3}, 'seed: 0 -> 3'),
    ({'width': 32}, 'width: 16 -> 32'),
    ({'learning_rate': 0.5}, r'step 1 had the learning rate .*--warmup 2'),
    ({'steps': 4}, 'has done 6 steps'),
    ({'optimizer': 'adamw'}, 'optimizer: merit -> adamw'),
    ({'warmup': 3.0, 'steps': 8}, 'warmup: 2.0 -> 3.0.*step 1 had'),
  ],
)
def test_another_past_is_refused(copied: Config, changes: dict, message: str):
  before = runs.contents(copied.out_dir)
  if 'width' in changes:
    changes = {'mlp_width': None, 'head_width': None, **changes}
  with pytest.raises(UsageError, match=message):
    train(replace(copied, **changes))
  assert runs.contents(copied.out_dir) == before


def test_a_cooldown_starts_from_a_checkpoint(stable: Config, tmp_path: Path):
  cooldown = replace(
    stable, fork_from=stable.out_dir, from_step=4, steps=6, decay=2.0,
    out_dir=tmp_path / 'cooldown',
  )  # fmt: skip
  train(cooldown)
  ours, theirs = map(runs.metrics, (cooldown.out_dir, stable.out_dir))
  assert ours[:4] == theirs[:4]
  # The first step has the peak still.
  assert ours[4]['train_loss'] == theirs[4]['train_loss']
  assert ours[5]['learning_rate'] < theirs[5]['learning_rate']


def test_a_run_starts_from_weights(stable: Config, tmp_path: Path):
  started = replace(
    stable, init_from=stable.out_dir, out_dir=tmp_path / 'two', seed=1
  )
  train(started)
  assert runs.metrics(started.out_dir)[0]['train_loss'] < (
    runs.metrics(stable.out_dir)[0]['train_loss'] - 0.1
  )
  # Once it has begun, it needs its source no more.
  moved = replace(started, steps=8)
  (tmp_path / 'two' / 'sample.txt').unlink()
  train(started)
  with pytest.raises(UsageError, match='another model .*--width 32'):
    train(replace(moved, out_dir=tmp_path / 'three', width=32))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'from_step': 3}, r'--from-step must be .* \(0, 2, 4, 6\), got 3'),
    ({'from_step': None}, '--fork-from .* needs --from-step'),
    ({'from_step': 6}, '--from-step must be below --steps 6'),
    ({'optimizer': 'lion'}, 'damaged: .*it has no opt_state'),
  ],
)
def test_a_fork_that_does_not_fit_is_refused(
  stable: Config, tmp_path: Path, changes: dict, message: str
):
  config = replace(
    stable, fork_from=stable.out_dir, from_step=4, out_dir=tmp_path / 'fork'
  )
  if 'optimizer' in changes:
    changes = {**changes, 'optimizer': 'muon', 'adam_rate': 1.0}
  with pytest.raises(UsageError, match=message):
    train(replace(config, **changes))


def test_a_start_that_failed_leaves_the_folder_free(stable, tmp_path: Path):
  config = replace(
    stable, fork_from=stable.out_dir, from_step=3, out_dir=tmp_path / 'fork'
  )
  with pytest.raises(UsageError, match='--from-step must be'):
    train(config)
  assert train(replace(config, from_step=4)).finished


@pytest.fixture(scope='module')
def unfinished(make_tiny, tmp_path_factory) -> Config:
  """Settings of a run that was killed after its checkpoint of step 4."""
  config = _stable(make_tiny(tmp_path_factory.mktemp('unfinished')), 6)
  with pytest.raises(runs.Killed), runs.during(5):
    train(config)
  return config


def test_commands_take_a_run_that_goes_on(stable, unfinished):
  folder = unfinished.out_dir
  found, expected = load_model(folder), load_model(stable.out_dir, step=4)
  for name, x in found.params['blocks']['mlp']['up'].items():
    np.testing.assert_array_equal(
      x, expected.params['blocks']['mlp']['up'][name]
    )
  data = stable.data[0]
  assert evaluate(folder, data) == evaluate(stable.out_dir, data, step=4)
  assert generate(folder, 'the', 8) == generate(
    stable.out_dir, 'the', 8, step=4
  )
  with pytest.raises(UsageError, match=r'--step must .*\(0, 2, 4\), got 5'):
    generate(folder, 'the', 8, step=5)


def test_what_does_not_fit_gives_advice(tiny: Config, monkeypatch, capsys):
  def too_little(*_):
    raise MemoryError('the step needs 9 GiB of a device that has 8 GiB')

  monkeypatch.setattr(memory, 'check', too_little)
  with pytest.raises(SystemExit) as ended:
    main([*runs.as_flags(tiny), '--micro-batch-size=8'])
  assert ended.value.code == 4
  text = capsys.readouterr().err
  assert re.search(r'9 GiB.*--micro-batch-size \d', text, re.DOTALL)
