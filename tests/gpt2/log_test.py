from collections.abc import Callable, Iterator
import json
import math
from pathlib import Path
import struct
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2 import hardware, log as log_module
from examples.gpt2.config import Config, change
from examples.gpt2.log import MEASURED, NotFiniteError, StepLog
from examples.gpt2.resolve import resolve
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.schedules import learning_rates
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer
from examples.gpt2.storage import make_folder


def _config(**settings) -> Config:
  defaults = dict(
    num_layers=1, num_heads=1, width=16, context_length=16, batch_size=8,
    steps=10,
  )  # fmt: skip
  return resolve(change(Config(), **defaults | settings))


@pytest.fixture(scope='module')
def trainer() -> Trainer:
  return Trainer(_config(), 64, make_mesh('', jax.devices()[:1]))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
  return RunFolder(tmp_path)


@pytest.fixture
def make_log(folder: RunFolder, trainer: Trainer) -> Callable[..., StepLog]:
  """Makes the log of a run, after some steps and with some settings."""

  def make(done: int = 0, **settings) -> StepLog:
    log = StepLog(_config(**settings), trainer, folder)
    log.begin(done, 0)
    return log

  return make


def _metrics(loss: float = 2.0, norm: float = 1.0, **more: Any) -> dict:
  arrays = {'train_loss': loss, 'gradient_norm': norm, **more}
  return jax.tree.map(jnp.float32, arrays)


def test_a_step_is_a_line(folder: RunFolder, make_log):
  with make_log(batch_ramp=('2:3', '4:5')) as log:
    for step in range(1, 11):
      log.begin_step(step, _metrics(loss=1 / step), 0.0)
      # The step itself is on the device, the one before it is logged.
      lines = folder.read_metrics()
      assert [line['step'] for line in lines] == [*range(1, step)]
    log.finish_step({'val_loss': 0.5})
    log.finish_step({'val_loss': 0.25})
  lines = folder.read_metrics()
  sizes = [2, 2, 2, 4, 4, 8, 8, 8, 8, 8]
  has_no_peak = math.isnan(hardware.peak_flops(jax.devices()[0]))
  assert lines[-1].pop('val_loss') == 0.5
  for step, line in enumerate(lines, start=1):
    measured = {name: line.pop(name) for name in MEASURED}
    assert measured['peak_bytes'] > 0
    assert (measured['mfu'] is None) == has_no_peak
    assert line == pytest.approx({
      'step': step,
      'train_loss': 1 / step,
      'gradient_norm': 1.0,
      'tokens': sum(sizes[:step]) * 16,
      'batch_size': sizes[step - 1],
      'learning_rate': learning_rates(_config())[step - 1],
    })  # fmt: skip
  assert len(lines) == 10
  # TensorBoard is not written unless it is wanted.
  assert [x.name for x in folder.path.iterdir()] == ['metrics.jsonl']


@pytest.mark.parametrize('place', ['disk', 'gs'], indirect=True)
def test_a_metric_is_any_number_list_or_array(place: Path, trainer, capsys):
  given = {
    'list': [1.0, math.inf], 'array': jnp.arange(4.0).reshape(2, 2),
    'numpy': np.float32(0.5), 'nan': math.nan, 'text': 'a\u2028b', 'no': None,
    'nested': {'by_layer': jnp.array([jnp.nan, 1.0])},
  }  # fmt: skip
  folder = RunFolder(place)
  make_folder(place)
  with StepLog(_config(), trainer, folder) as log:
    log.begin(0, 0)
    log.begin_step(1, _metrics() | given, 0.0)
    log.finish_step()
    log.flush()
  (line,) = folder.read_metrics()
  assert {k: line[k] for k in given} == {
    'list': [1.0, None], 'array': [[0.0, 1.0], [2.0, 3.0]], 'numpy': 0.5,
    'nan': None, 'text': 'a\u2028b', 'no': None,
    'nested': {'by_layer': [None, 1.0]},
  }  # fmt: skip


@pytest.mark.parametrize('name', ['loss', 'norm'])
def test_loss_and_gradient_norm_must_be_finite(folder, make_log, name: str):
  with make_log() as log:
    log.begin_step(1, _metrics(**{name: math.inf}), 0.0)
    with pytest.raises(NotFiniteError, match='at step 1 .* is inf'):
      log.finish_step()
  with make_log(not_finite='skip') as log:
    log.begin_step(1, _metrics(**{name: math.nan}), 0.0)
    log.finish_step()
  assert [x['skipped'] for x in folder.read_metrics()] == [True]


_DIAGNOSED = {
  'layers': {'gradient_norm': [0.25, 0.5]},
  'others': {'head': {'clipped': 0.75}},
  'gradient_noise': None,
}
_NUMBERS = {
  (1, 'train_loss', 2.0),
  (1, 'layers/gradient_norm/1', 0.25),
  (1, 'layers/gradient_norm/2', 0.5),
  (1, 'others/head/clipped', 0.75),
  (2, 'train_loss', 1.5),
  (2, 'val_loss', 3.5),
}


def _log_two_steps(log: StepLog) -> None:
  log.begin_step(1, _metrics() | _DIAGNOSED, 0.0)
  log.begin_step(2, _metrics(1.5) | {'text': 'no number'}, 0.0)
  log.finish_step({'val_loss': 3.5})


def test_tensorboard_gets_every_number(folder: RunFolder, make_log):
  pb = pytest.importorskip('tensorboardX.proto.event_pb2')
  with make_log(tensorboard=True) as log:
    _log_two_steps(log)
  (file,) = (folder.path / 'tensorboard').iterdir()
  events = {
    (event.step, value.tag, value.simple_value)
    for event in _events(file.read_bytes(), pb.Event)
    for value in event.summary.value
  }
  assert events >= _NUMBERS
  assert not any('noise' in name for _, name, _ in events)


def _events(content: bytes, kind: Any) -> Iterator[Any]:
  """Yields the records of a TFRecord file: length, CRC, content, CRC."""
  while content:
    (size,) = struct.unpack('<Q', content[:8])
    yield kind.FromString(content[12 : 12 + size])
    content = content[16 + size :]


def test_wandb_gets_every_number_and_each_once(
  folder: RunFolder, make_log, offline
):
  with make_log(wandb='project') as log:
    _log_two_steps(log)
  assert _in_wandb(folder) >= _NUMBERS
  # A run that goes on has the same identifier.
  identifier = (folder.path / 'wandb_id.txt').read_text()
  with make_log(2, wandb='project'):
    assert (folder.path / 'wandb_id.txt').read_text() == identifier


def test_wandb_gets_the_steps_before_it_was_asked_for(
  folder: RunFolder, make_log, offline
):
  with make_log() as log:
    _log_two_steps(log)
  with make_log(2, wandb='project'):
    pass
  assert _in_wandb(folder) >= _NUMBERS


@pytest.fixture
def offline(folder: RunFolder, monkeypatch) -> None:
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  (folder.path / 'config.json').write_text('{"config": {"steps": 10}}')


def _in_wandb(folder: RunFolder) -> set[tuple[int, str, Any]]:
  """Returns steps, names and numbers in W&B's file of the run."""
  import wandb  # noqa: PLC0415  Optional.
  from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

  wandb.teardown()  # Waits for its process, which may write after a run's end.
  identifier = (folder.path / 'wandb_id.txt').read_text()
  (file,) = folder.path.glob(f'wandb/offline-run-*/run-{identifier}.wandb')
  histories = [
    Record.FromString(x).history for x in _records(file.read_bytes())
  ]
  return {
    (
      history.step.num,
      item.key or '.'.join(item.nested_key),
      json.loads(item.value_json),
    )
    for history in histories
    for item in history.item
  }


def _records(content: bytes) -> Iterator[bytes]:
  """Yields the records of a LevelDB log with a head of 7 bytes.

  Their parts, each behind a CRC, its size and its kind, do not cross blocks.
  """
  record, at, block = b'', 7, 1 << 15
  while at < len(content):
    if block - at % block < 7:  # Padding.
      at += block - at % block
      continue
    _, size, kind = struct.unpack_from('<IHB', content, at)
    record += content[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # Whole, or the last part.
      yield record
      record = b''


def test_a_pause_begins_when_the_step_has_ended(make_log):
  @jax.jit
  def work(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 999, lambda _, x: x @ x / jnp.max(x), x).max()

  work(jnp.eye(256)).block_until_ready()
  with make_log() as log:
    loss = work(jnp.eye(256))
    log.begin_step(1, _metrics() | {'train_loss': loss}, 0.0)
    assert not loss.is_ready()
    with log.paused():
      assert loss.is_ready()


def test_the_speed_leaves_pauses_out(
  folder: RunFolder, make_log, trainer: Trainer, monkeypatch
):
  clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
  monkeypatch.setattr(log_module, 'time', clock)
  monkeypatch.setattr(hardware, 'peak_flops', lambda _: 1e9)
  with make_log() as log:
    for step, (seconds, pause, waited) in enumerate(
      [(2.0, 0.0, 0.5), (4.0, 100.0, 0.5), (0.5, 0.0, 2.5)], start=1
    ):
      log.begin_step(step, _metrics(), waited)
      clock.now += seconds
      with log.paused():
        clock.now += pause
      log.finish_step()
  lines = folder.read_metrics()
  speeds = [128 / 2, 128 / 4, 128 / 0.5]
  assert [x['tokens_per_second'] for x in lines] == speeds
  mfus = np.array(speeds) * trainer.flops_per_token / (1e9 * jax.device_count())
  assert [x['mfu'] for x in lines] == pytest.approx(mfus)
  assert [x['waited_share'] for x in lines] == [0.25, 0.125, 1.0]
