"""A run that was stopped goes on to the numbers of one that was not."""

from collections.abc import Callable
from dataclasses import replace
import functools
import os
from pathlib import Path
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import batches
from examples.gpt2.run import loop
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.step import Trainer
from examples.gpt2.train import main, train
from tests.gpt2 import runs
from tests.processes import free_port

_ROOT = Path(__file__).parents[3]
# Before what may hold the packages.
_PATH = os.pathsep.join([str(_ROOT), os.environ.get('PYTHONPATH', '')])


@pytest.fixture
def config(tiny: Config) -> Config:
  return _eight_steps(tiny)


def _eight_steps(tiny: Config) -> Config:
  return replace(tiny, steps=8, checkpoint_every=2, diagnostics_every=3)


@pytest.fixture(scope='module')
def uninterrupted(make_tiny, tmp_path_factory) -> Path:
  """The folder of a run of these settings that was never stopped."""
  config = _eight_steps(make_tiny(tmp_path_factory.mktemp('uninterrupted')))
  train(config)
  return config.out_dir


@pytest.fixture
def finished_config(config: Config, uninterrupted: Path) -> Config:
  """Settings of such a run, in a folder that a test may change."""
  shutil.copytree(uninterrupted, config.out_dir)
  return config


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> Path:
  """The folder of a run that was never stopped."""
  folder = tmp_path_factory.mktemp('whole')
  (folder / 'text.txt').write_text('a few words, ' * 2000)
  assert _start(folder, 'whole').wait() == 0
  return folder


def _start(
  folder: Path, name: str, *flags: str, output: int | None = None
) -> subprocess.Popen:
  """Starts a run of some seconds in a process of its own."""
  arguments = (
    '--data', 'text.txt', '--cache-dir', 'cache', '--out-dir', name,
    '--vocab-size', '288', '--num-layers', '2', '--num-heads', '2',
    '--width', '32', '--context-length', '16', '--batch-size', '16',
    '--steps', '60', '--eval-every', '20', '--checkpoint-every', '5',
    '--diagnostics-every', '20', '--eval-sequences', '24',
  )  # fmt: skip
  with (folder / f'{name}.log').open('a') as log:
    return subprocess.Popen(
      [sys.executable, '-m', 'examples.gpt2.train', *arguments, *flags],
      cwd=folder,
      env={'JAX_PLATFORMS': 'cpu'} | os.environ | {'PYTHONPATH': _PATH},
      stdout=output or log,
      stderr=subprocess.STDOUT,
      text=True,
    )


@pytest.mark.parametrize('step', [2, 6])
def test_a_run_goes_on_from_its_checkpoint(
  config: Config, uninterrupted: Path, step: int, capsys
):
  with pytest.raises(runs.Killed), runs.during(step):
    train(config)
  with (config.out_dir / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 7, "torn')
  train(config)
  assert ('going on after step 4' in capsys.readouterr().out) == (step == 6)
  runs.assert_same_run(config.out_dir, uninterrupted)


def test_a_signal_saves_a_checkpoint(config: Config, uninterrupted, capsys):
  flags = runs.as_flags(config)
  stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
  with pytest.raises(SystemExit) as ended, runs.during(3, stop):
    main(flags)
  assert ended.value.code == 128 + signal.SIGTERM
  assert 'checkpoint of step 3 has been saved' in capsys.readouterr().err
  main(flags)
  assert 'going on after step 3' in capsys.readouterr().out
  runs.assert_same_run(config.out_dir, uninterrupted)


def test_fresh_starts_over(finished_config: Config, uninterrupted, capsys):
  out_dir = finished_config.out_dir
  train(replace(finished_config, from_scratch=True))
  out = capsys.readouterr().out
  assert 'going on' not in out
  assert '8 of 16 x 16 = 256 tokens, 2,048 in all' in out
  runs.assert_same_run(out_dir, uninterrupted)
  runs.assert_same_run(out_dir / 'before-1', uninterrupted)


def test_a_run_that_has_lost_its_metrics_can_end(
  finished_config: Config, uninterrupted, capsys
):
  out_dir = finished_config.out_dir
  for name in ('metrics.jsonl', 'curves.png'):
    (out_dir / name).unlink()
  with pytest.warns(UserWarning) as warned:
    train(replace(finished_config, profile=True))
  texts = [str(x.message) for x in warned]
  assert any('lost 8 of the lines' in x for x in texts), texts
  assert any('begins with step 18, of a run that has 8' in x for x in texts)
  for _ in range(2):
    assert 'not known, since metrics are lost' in capsys.readouterr().out
    assert train(finished_config).finished
  weights = [x / 'weights.safetensors' for x in (out_dir, uninterrupted)]
  assert weights[0].read_bytes() == weights[1].read_bytes()


def test_other_data_is_refused(finished_config: Config):
  Path(finished_config.data).write_text('another text. ' * 500)
  with pytest.raises(UsageError, match='corpus_sha256'):
    train(finished_config)


def _break_gradients(monkeypatch, step: int):
  """Makes the gradient of a step infinite, as a model's overflow would."""
  step_fn = Trainer.loss_and_gradients
  run, of_step = loop.run, {}

  def broken(self, params, tokens, attend):
    loss, gradients, seen = step_fn(self, params, tokens, attend)
    is_bad = tokens.sum() == of_step['sum']
    gradients = jax.tree.map(lambda x: jnp.where(is_bad, jnp.inf, x), gradients)
    return loss, gradients, seen

  def remember(trainer, config, tokens, *rest):
    batch = batches.training_batch(tokens.train, config, step, trainer.mesh)
    of_step['sum'] = int(batch.sum())
    return run(trainer, config, tokens, *rest)

  monkeypatch.setattr(Trainer, 'loss_and_gradients', broken)
  monkeypatch.setattr(loop, 'run', remember)


def test_an_infinite_gradient_stops_the_run_or_is_left_out(
  config: Config, monkeypatch, capsys
):
  _break_gradients(monkeypatch, 5)
  config = replace(config, diagnostics_every=0)
  with pytest.raises(NotFiniteError) as error:
    train(config)
  for part in (
    'at step 5',
    'gradient_norm is inf',
    # Which has been dispatched when step 5 is known not to be finite.
    'With the weights after step 6',
    'in layer',
    '--not-finite skip',
  ):
    assert part in str(error.value)
  saved = sorted(p.name for p in (config.out_dir / 'checkpoints').iterdir())
  assert saved == ['2', '4']
  assert not RunFolder(config.out_dir).finished

  train(replace(config, not_finite='skip'))
  out = capsys.readouterr().out
  assert 'going on after step 4' in out
  assert '1 steps whose loss or gradient was not finite' in out
  metrics = runs.metrics(config.out_dir)
  assert [m['step'] for m in metrics if m.get('skipped')] == [5]
  assert [m['step'] for m in metrics if m['gradient_norm'] is None] == [5]
  assert all(np.isfinite(m['train_loss']) for m in metrics)


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
  folder: Path,
  name: str,
  *flags: str,
  of_second: tuple[str, ...] = (),
  output: int | None = None,
) -> list[subprocess.Popen]:
  """Starts a run of two processes with four devices each.

  Process 1 has some flags alone; ``output`` is where they write, if not to a
  file.
  """
  common = (
    '--coordinator', f'localhost:{free_port()}', '--num-processes', '2',
    '--mesh', 'fsdp=4,tensor=2', *flags, '--process-id',
  )  # fmt: skip
  return [
    _start(folder, name, *common, *alone, output=output)
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
def test_a_process_that_fails_alone_ends_the_others(pair: Path):
  statuses = _end(_start_pair(pair, 'alone', of_second=('--data', 'gone.txt')))
  # While it waits for the other to leave, jax's service may end both first.
  assert statuses[1] in (2, -signal.SIGABRT)
  assert statuses[0] != 0
  assert 'gone.txt does not exist' in (pair / 'alone.log').read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--seed', '7'), '--seed: 0 -> 7'),
    (('--eval-data', 'x=other.txt'), '--eval-data x: '),
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
@pytest.mark.skipif(not hasattr(resource, 'prlimit'), reason='asks Linux')
def test_a_full_disk_of_process_0_is_told_by_all(pair: Path):
  short = '--steps', '6', '--checkpoint-every', '3', '--eval-every', '6'
  first, second = _start_pair(pair, 'full', *short, output=subprocess.PIPE)
  metrics = pair / 'full' / 'metrics.jsonl'
  _wait_for(first, lambda: _num_lines(metrics) > 0)
  resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (200, 200))
  assert _end([first, second]) == [2, 2]
  told = first.stdout.read()
  assert 'cannot be written' in told
  assert 'checkpoint of step 3 is not saved' in told
  assert 'error: ' in told
  assert 'error: ' in second.stdout.read()
  assert not list((pair / 'full' / 'checkpoints').iterdir())


@pytest.mark.slow
def test_two_processes_go_on_after_one_was_killed(pair: Path):
  assert _end(_start_pair(pair, 'whole')) == [0, 0]
  first, second = _start_pair(pair, 'killed')
  _wait_for(first, (pair / 'killed' / 'checkpoints' / '10').exists)
  for process in (second, first):
    process.kill()
    process.wait()
  assert _end(_start_pair(pair, 'killed')) == [0, 0]
  assert 'going on after step' in (pair / 'killed.log').read_text()
  runs.assert_same_run(pair / 'whole', pair / 'killed')


def test_weights_that_are_not_finite_are_never_results(config, monkeypatch):
  monkeypatch.setattr(
    Trainer,
    '_sequence_losses',
    lambda _self, _params, tokens: jnp.full(tokens.shape[:2], np.nan),
  )
  # Nor does a full disk hide it.
  full = mock.Mock(side_effect=OSError('no space left'))
  monkeypatch.setattr(RunFolder, 'flush', full)
  with pytest.raises(NotFiniteError, match='step 4 the validation loss is nan'):
    train(replace(config, not_finite='skip', checkpoint_every=8))
  assert not (config.out_dir / 'weights.safetensors').exists()
  last = runs.metrics(config.out_dir)[-1]
  assert (last['step'], last['val_loss']) == (4, None)


def test_a_trace_is_written_though_the_run_is_stopped(config, monkeypatch):
  monkeypatch.setattr('examples.gpt2.run.profile._TRACED', (2, 6))
  with pytest.raises(runs.Killed), runs.during(5):
    train(replace(config, profile=True))
  assert list((config.out_dir / 'profile').rglob('*.xplane.pb'))
