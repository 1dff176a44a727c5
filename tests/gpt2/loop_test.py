"""Runs that are stopped, resumed, made longer and started from others."""

from collections.abc import Callable
import functools
import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest

from examples.gpt2 import data, hardware, loop
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, change
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.hardware import OutOfMemoryError
from examples.gpt2.log import NotFiniteError
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import make_mesh
from examples.gpt2.train import main, train, with_tokens
from tests.gpt2 import runs
from tests.processes import free_port

_ROOT = Path(__file__).parents[2]
# Before what may hold the packages.
_PATH = os.pathsep.join([str(_ROOT), os.environ.get('PYTHONPATH', '')])


@pytest.fixture
def config(tiny: Config) -> Config:
  return _eight_steps(tiny)


def _eight_steps(tiny: Config) -> Config:
  return change(tiny, steps=8, checkpoint_every=2)


@pytest.fixture(scope='module')
def uninterrupted(make_tiny, tmp_path_factory) -> Path:
  """The folder of a run of these settings that was never stopped."""
  config = _eight_steps(make_tiny(tmp_path_factory.mktemp('uninterrupted')))
  train(config)
  return config.out_dir


@pytest.mark.parametrize('step', [1, 6])
def test_a_run_goes_on_from_its_checkpoint(
  config: Config, uninterrupted: Path, step: int, capsys
):
  with pytest.raises(runs.Killed), runs.during(step):
    train(config)
  with (config.out_dir / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 7, "torn')
  train(config)
  saved = {1: 0, 6: 4}[step]  # Of step 6 it had not begun.
  assert f'going on after step {saved},' in capsys.readouterr().out
  runs.assert_same_run(config.out_dir, uninterrupted)


@pytest.mark.parametrize('moment', ['compile', 'first save', 'step'])
def test_a_signal_saves_a_checkpoint(
  config: Config, uninterrupted, moment: str, capsys
):
  number = signal.SIGTERM if moment == 'step' else signal.SIGINT
  stop, flags = (
    functools.partial(os.kill, os.getpid(), number),
    runs.as_flags(config),
  )
  when, step = {
    'compile': (_before(loop, '_compile', stop), 0),
    'first save': (_before(loop.Checkpoints, 'save', stop), 0),
    'step': (runs.during(3, stop), 3),
  }[moment]
  with pytest.raises(SystemExit) as ended, when:
    main(flags)
  assert ended.value.code == 128 + number
  assert f'checkpoint of step {step} has been saved' in capsys.readouterr().err
  main(flags)
  assert f'going on after step {step}' in capsys.readouterr().out
  runs.assert_same_run(config.out_dir, uninterrupted)


def _before(owner, name: str, action: Callable[[], None]):
  """Does something before each call of a function."""
  function = getattr(owner, name)

  def call(*args, **kwargs):
    action()
    return function(*args, **kwargs)

  return mock.patch.object(owner, name, call)


def test_numbers_that_are_not_finite_stop_the_run(config: Config):
  # The first step makes weights whose logits overflow.
  config = change(config, learning_rate=1e20, checkpoint_every=1, eval_every=8)
  with pytest.raises(NotFiniteError) as error:
    train(config)
  for part in ('at step 2', 'train_loss is', '--not-finite skip'):
    assert part in str(error.value)
  # Nor are steps that are left out results, if they change nothing.
  with pytest.raises(NotFiniteError, match='step 8 the validation loss is'):
    train(change(config, not_finite='skip'))
  lines = runs.metrics(config.out_dir)
  skipped = [line['step'] for line in lines if line.get('skipped')]
  assert skipped == [2, 3, 4, 5, 6, 7, 8]
  assert not (config.out_dir / 'weights.safetensors').exists()


def _ramp(tiny: Config) -> Config:
  return change(
    tiny, batch_ramp=('8:2', '16:5'), batch_size=24, steps=8,
    checkpoint_every=2, max_to_keep=9,
  )  # fmt: skip


@pytest.fixture(scope='module')
def grown(make_tiny, tmp_path_factory) -> Config:
  """Settings of a finished run whose batches grew."""
  config = _ramp(make_tiny(tmp_path_factory.mktemp('grown')))
  train(config)
  return config


def test_killed_within_a_ramp_it_goes_on_to_the_same_numbers(
  grown: Config, tiny: Config
):
  config = _ramp(tiny)
  with pytest.raises(runs.Killed), runs.during(5):  # In the second phase.
    train(config)
  train(config)
  runs.assert_same_run(config.out_dir, grown.out_dir)
  lines = runs.metrics(config.out_dir)
  assert [x['batch_size'] for x in lines] == [8, 8, 16, 16, 16, 24, 24, 24]
  assert lines[-1]['tokens'] == (2 * 8 + 3 * 16 + 3 * 24) * 16
  # Another past is refused, another future is not.
  with pytest.raises(UsageError, match='step 6 had a batch of 24, now 16'):
    train(change(config, batch_ramp=('8:2', '16:7')))


def test_a_batch_that_grows_takes_the_sequences_of_one_that_does_not(
  tiny: Config,
):
  mesh = make_mesh(tiny.mesh)
  loaded = data.load_data(with_tokens(tiny))

  def rows(config: Config) -> np.ndarray:
    fitted = resolve(config, mesh)
    found = data.step_batches(fitted, loaded.sequences, mesh)
    return np.concatenate([np.concatenate(batch) for batch in found])

  grown = rows(_ramp(tiny))
  expected = rows(change(tiny, batch_size=8, steps=17))
  np.testing.assert_array_equal(grown, expected)


def test_a_step_that_cannot_fit_ends_before_it_is_taken(tiny, monkeypatch):
  monkeypatch.setattr(hardware, 'memory_bytes', lambda _: 1000)
  with pytest.raises(OutOfMemoryError, match='needs .* has 1000 B.* --remat'):
    train(tiny)
  assert not (tiny.out_dir / 'metrics.jsonl').exists()


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
    ({'learning_rate': 0.5}, r'step 1 had the learning rate .*--warmup 2'),
  ],
)
def test_another_past_is_refused(copied: Config, changes: dict, message: str):
  before = runs.contents(copied.out_dir)
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


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Path:
  """The folder of a run that was never stopped."""
  folder = tmp_path_factory.mktemp('whole')
  (folder / 'text.txt').write_text('a few words, ' * 2000)
  assert _start(folder, 'whole').wait() == 0
  return folder


def _start(folder: Path, name: str, *flags: str) -> subprocess.Popen:
  """Starts a run of some seconds in a process of its own.

  The last value of a flag counts.
  """
  given = (
    '--data', 'text.txt', '--cache-dir', 'cache', '--out-dir', name,
    '--vocab-size', '288', '--num-layers', '2', '--num-heads', '2',
    '--width', '32', '--context-length', '16', '--batch-size', '16',
    '--steps', '60', '--eval-every', '20', '--checkpoint-every', '5',
    '--diagnostics-every', '20', '--eval-sequences', '24', *flags,
  )  # fmt: skip
  values = dict(zip(given[::2], given[1::2], strict=True))
  arguments = [f'{flag}={value}' for flag, value in values.items()]
  with (folder / f'{name}.log').open('a') as log:
    return subprocess.Popen(
      [sys.executable, '-m', 'examples.gpt2.train', *arguments],
      cwd=folder,
      env={'JAX_PLATFORMS': 'cpu'} | os.environ | {'PYTHONPATH': _PATH},
      stdout=log,
      stderr=subprocess.STDOUT,
    )


def _num_lines(path: Path) -> int:
  return path.read_bytes().count(b'\n') if path.exists() else 0


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits(whole: Path):
  moments = random.Random(0)
  metrics = whole / 'killed' / 'metrics.jsonl'
  # Checkpoints come every five steps: often one is being written.
  for step in sorted(moments.sample(range(6, 56), 6)):
    run = _start(whole, 'killed')
    while run.poll() is None and _num_lines(metrics) < step:
      time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.05))
    run.kill()
    run.wait()
  assert _start(whole, 'killed').wait() == 0
  log = (whole / 'killed.log').read_text()
  assert log.count('going on after step') >= 2
  runs.assert_same_run(whole / 'whole', whole / 'killed')


def _start_pair(
  folder: Path, name: str, *flags: str, of_second: tuple[str, ...] = ()
) -> list[subprocess.Popen]:
  """Starts a run of two processes with four devices each.

  Process 1 has some flags alone.
  """
  common = (
    '--coordinator', f'localhost:{free_port()}', '--num-processes', '2',
    '--mesh', 'fsdp=4,tensor=2', *flags, '--process-id',
  )  # fmt: skip
  return [
    _start(folder, name, *common, *alone)
    for alone in (('0',), ('1', *of_second))
  ]


def _wait_for(process: subprocess.Popen, is_there: Callable[[], bool]):
  """Waits for what a process writes."""
  while not is_there():
    assert process.poll() is None
    time.sleep(0.05)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch) -> Path:
  """A folder with text, for runs of two processes."""
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '4')
  (tmp_path / 'text.txt').write_text('a few words, ' * 2000)
  return tmp_path


def _end(running: list[subprocess.Popen]) -> list[int]:
  """Returns the exit statuses of processes, which must not wait for ever."""
  try:
    return [process.wait(timeout=300) for process in running]
  finally:
    for process in running:
      process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--seed', '7'), '--seed (here: 7)'),
    (('--eval-data', 'x=other.txt'), '--eval-data x (here: '),
  ],
)
def test_processes_with_other_settings_or_data_are_refused(
  pair: Path, flags: tuple[str, ...], message: str
):
  (pair / 'other.txt').write_text('other words, ' * 2000)
  common = ('--eval-data', 'x=text.txt')
  statuses = _end(_start_pair(pair, 'run', *common, of_second=flags))
  assert statuses == [2, 2]
  assert message in (pair / 'run.log').read_text()
  assert not (pair / 'run').exists()


@pytest.mark.slow
def test_an_error_of_process_0_ends_all_with_its_status(pair: Path):
  (pair / 'file').touch()
  statuses = _end(_start_pair(pair, 'error', '--out-dir', 'file/run'))
  assert statuses == [2, 2]
  text = (pair / 'error.log').read_text()
  assert text.count('--out-dir file/run cannot be written') == 2


@pytest.mark.slow
def test_control_c_of_one_process_saves_and_stops_all(pair: Path):
  flags = '--steps', '20'
  first, second = _start_pair(pair, 'stopped', *flags)
  metrics = pair / 'stopped' / 'metrics.jsonl'
  _wait_for(first, lambda: _num_lines(metrics) >= 3)
  second.send_signal(signal.SIGINT)
  assert _end([first, second]) == [143, 130]
  log = (pair / 'stopped.log').read_text()
  assert log.count('has been saved') == 2
  assert _end(_start_pair(pair, 'stopped', *flags)) == [0, 0]
  assert 'going on after step' in (pair / 'stopped.log').read_text()


@pytest.mark.slow
def test_two_processes_go_on_after_a_kill_to_the_losses_of_one(
  pair: Path, whole: Path
):
  assert _end(_start_pair(pair, 'whole')) == [0, 0]
  first, second = _start_pair(pair, 'killed')
  _wait_for(first, (pair / 'killed' / 'checkpoints' / '10').exists)
  for process in (second, first):
    process.kill()
    process.wait()
  assert _end(_start_pair(pair, 'killed')) == [0, 0]
  assert 'going on after step' in (pair / 'killed.log').read_text()
  runs.assert_same_run(pair / 'whole', pair / 'killed')
  losses, expected = (
    [line['train_loss'] for line in runs.metrics(folder / 'whole')]
    for folder in (pair, whole)
  )
  # Rounding errors of the meshes grow with each step.
  np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-5)


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_others(pair: Path):
  statuses = _end(_start_pair(pair, 'alone', of_second=('--data', 'gone.txt')))
  # While it waits for the other to leave, jax's service may end both first.
  assert statuses[1] in (2, -signal.SIGABRT)
  assert statuses[0] != 0
  assert 'gone.txt does not exist' in (pair / 'alone.log').read_text()
