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

from examples.gpt2 import hardware, run as step_log
from examples.gpt2.config import Config, change, resolve
from examples.gpt2.memory import OutOfMemoryError
from examples.gpt2.optimizers import make_schedule
from examples.gpt2.run import MEASURED, RunFolder, StepLog
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer
from examples.gpt2.train import train


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
def clock(monkeypatch) -> SimpleNamespace:
  """Stands in for the module ``time``."""
  clock = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now)
  monkeypatch.setattr(step_log, 'time', clock)
  return clock


def _metrics(loss: float = 2.0, norm: float = 1.0) -> dict[str, jax.Array]:
  return {'train_loss': jnp.float32(loss), 'gradient_norm': jnp.float32(norm)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
  return RunFolder(tmp_path)


@pytest.fixture
def make_log(folder: RunFolder, trainer: Trainer) -> Callable[..., StepLog]:
  """Makes the log of a run, after some steps and with some settings."""
  return lambda done=0, tokens_done=0, **settings: StepLog(
    _config(**settings), trainer, folder, done, tokens_done
  )


def test_a_step_is_a_line(folder: RunFolder, make_log):
  with make_log() as log:
    for step in range(1, 11):
      diagnosed = {'attention_entropy': [1.0]} if step == 3 else {}
      log.begin_step(step, _metrics(loss=1 / step), diagnosed, 0.0)
      # The step itself is on the device, the one before it is logged.
      lines = folder.read_metrics() if step > 1 else []
      assert [line['step'] for line in lines] == [*range(1, step)]
    log.finish_step({'val_loss': 0.5})
    log.finish_step({'val_loss': 0.25})
  lines = folder.read_metrics()
  rates = jax.vmap(make_schedule(_config()))(jnp.arange(10)).tolist()
  has_no_peak = math.isnan(hardware.peak_flops(jax.devices()[0]))
  for step, line in enumerate(lines, start=1):
    measured = {name: line.pop(name) for name in MEASURED}
    assert measured['peak_bytes'] > 0
    assert (measured['mfu'] is None) == has_no_peak
    expected = {
      'step': step,
      'train_loss': 1 / step,
      'gradient_norm': 1.0,
      'tokens': step * 8 * 16,
      'batch_size': 8,
      'learning_rate': rates[step - 1],
    }
    if step == 3:
      assert line.pop('attention_entropy') == [1.0]
    if step == 10:
      expected['val_loss'] = 0.5
    assert line == pytest.approx(expected)
  assert len(lines) == 10
  # TensorBoard is not written unless it is wanted.
  assert [x.name for x in folder.path.iterdir()] == ['metrics.jsonl']


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
  log.begin_step(1, _metrics(), _DIAGNOSED, 0.0)
  log.begin_step(2, _metrics(1.5), {}, 0.0)
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
  folder: RunFolder, make_log, monkeypatch
):
  datastore = pytest.importorskip('wandb.sdk.internal.datastore')
  records = pytest.importorskip('wandb.proto.wandb_internal_pb2')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  (folder.path / 'config.json').write_text('{"config": {"steps": 10}}')
  with make_log(wandb='project') as log:
    _log_two_steps(log)
  identifier = (folder.path / 'wandb_id.txt').read_text()
  (file,) = folder.path.glob(f'wandb/offline-run-*/run-{identifier}.wandb')
  store = datastore.DataStore()
  store.open_for_scan(str(file))
  found = set()
  while (data := store.scan_data()) is not None:
    for item in records.Record.FromString(data).history.item:
      name = item.key or '.'.join(item.nested_key)
      found.add((name, json.loads(item.value_json)))
  assert found >= {(name, value) for _, name, value in _NUMBERS}
  # A run that goes on has the same identifier.
  with make_log(2, wandb='project'):
    assert (folder.path / 'wandb_id.txt').read_text() == identifier


def test_a_step_that_cannot_fit_ends_before_it_is_taken(tiny, monkeypatch):
  monkeypatch.setattr(hardware, 'memory_bytes', lambda _: 1000)
  with pytest.raises(OutOfMemoryError, match='needs .* has 1000 B'):
    train(tiny)
  assert not (tiny.out_dir / 'metrics.jsonl').exists()


def test_the_speed_leaves_pauses_out(
  folder: RunFolder, make_log, trainer: Trainer, clock, monkeypatch
):
  monkeypatch.setattr(hardware, 'peak_flops', lambda _: 1e9)
  with make_log() as log:
    for step, (seconds, pause, waited) in enumerate(
      [(2.0, 0.0, 0.5), (4.0, 100.0, 0.5), (0.5, 0.0, 2.5)], start=1
    ):
      log.begin_step(step, _metrics(), {}, waited)
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
