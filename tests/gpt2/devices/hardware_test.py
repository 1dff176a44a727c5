import math
import os
from pathlib import Path
import signal
import sys
import types

import hypothesis
from hypothesis import strategies as st
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices import hardware
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.presets import PRESETS, resolve
from examples.gpt2.run.step import Trainer


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    ('TPU v3', 61.5),
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5e', 197),
    ('TPU v5', 459),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 NVL', 835),
    ('NVIDIA H200', 989),
    ('NVIDIA B200', 2250),
    ('NVIDIA L4', 121),
    ('NVIDIA L40S', 362),
    ('Tesla V100-SXM2-16GB', 125),
  ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, tera: float):
  device = types.SimpleNamespace(device_kind=kind)
  assert hardware.peak_flops(device) == tera * 1e12


@pytest.mark.parametrize('kind', ['cpu', 'NVIDIA GeForce GTX 1080', ''])
def test_an_unknown_device_has_no_peak(kind: str):
  device = types.SimpleNamespace(device_kind=kind)
  assert math.isnan(hardware.peak_flops(device))


@hypothesis.given(
  layers=st.integers(1, 4),
  heads=st.integers(1, 4),
  head_width=st.sampled_from([2, 4, 8]),
  length=st.integers(1, 64),
  architecture=st.sampled_from(['gpt2', 'llama']),
)
@hypothesis.settings(max_examples=10)
def test_flops_of_a_token_are_the_known_formula(
  layers: int, heads: int, head_width: int, length: int, architecture: str
):
  width = heads * head_width
  config = resolve(
    Config(
      num_layers=layers,
      num_heads=heads,
      width=width,
      context_length=length,
      architecture=architecture,
      mlp_width=4 * width,
      untied_head=architecture == 'llama',
    )
  )
  trainer = Trainer(config, 128, make_mesh('', jax.devices()[:1]))
  found = hardware.flops_per_token(trainer.model_config, trainer.shapes.params)
  # Four matrices of attention; two of the MLP, or three.
  matrices = {'gpt2': 4 + 2 * 4, 'llama': 4 + 3 * 4}[architecture]
  weights = layers * matrices * width**2 + 128 * width
  assert found == 6 * weights + 12 * layers * width * length


def test_flops_of_the_small_preset_are_those_of_gpt2():
  sizes = PRESETS['small']
  trainer = Trainer(
    resolve(Config(preset='small')), 50304, make_mesh('', jax.devices()[:1])
  )
  layers, width = sizes['num_layers'], sizes['width']
  weights = 12 * layers * width**2 + 50304 * width
  assert (
    hardware.flops_per_token(trainer.model_config, trainer.shapes.params)
    == 6 * weights + 12 * layers * width * 1024
  )


def test_bytes_of_a_device_count_its_shards():
  mesh = make_mesh('fsdp=4,tensor=2')

  def shape(dims, dtype, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

  tree = {
    'split': shape((8, 6), 'float32', 'fsdp', 'tensor'),
    'half': shape((8, 6), 'bfloat16', None, 'tensor'),
    'whole': shape((5,), 'int32'),
  }
  assert hardware.bytes_per_device(tree) == 2 * 3 * 4 + 8 * 3 * 2 + 5 * 4


def test_bytes_of_a_device_are_what_it_holds():
  mesh = make_mesh('fsdp=4,tensor=2')
  config = resolve(
    Config(num_layers=1, width=64, num_heads=2, micro_batch_size=8)
  )
  shapes = Trainer(config, 64, mesh).shapes
  state = jax.tree.map(
    lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes
  )
  held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
  )
  assert hardware.bytes_per_device(shapes) == held


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='asks the device')
def test_peak_memory_on_cpu_is_that_of_the_process():
  held = np.ones(2**23)
  status = Path('/proc/self/status').read_text()
  kilobytes = int(status.split('VmHWM:')[1].split()[0])
  assert hardware.peak_memory() == pytest.approx(kilobytes * 1024, rel=0.05)
  assert hardware.peak_memory() > held.nbytes


def test_versions_name_packages_and_devices():
  found = hardware.versions()
  assert {'python', 'jax', 'merit_optax'} <= set(found['versions'])
  assert found['versions']['jax'] == jax.__version__
  assert len(found['devices']) == jax.device_count()
  assert found['processes'] == 1


@pytest.mark.parametrize(
  ('environment', 'expected'),
  [
    ({}, 0),
    ({'SLURM_STEP_NUM_TASKS': '1'}, 0),
    ({'SLURM_STEP_NUM_TASKS': '4'}, 1),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, 0),
    ({'TPU_WORKER_HOSTNAMES': 'a,b'}, 1),
  ],
)
def test_processes_join_where_there_are_peers(
  monkeypatch, environment: dict[str, str], expected: int
):
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda *a: calls.append(a))
  for name in ('SLURM_STEP_NUM_TASKS', 'TPU_WORKER_HOSTNAMES'):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  hardware.connect(Config())
  assert calls == [()] * expected
  given = Config(coordinator='a:1', num_processes=2, process_id=1)
  hardware.connect(given)
  assert calls[expected:] == [('a:1', 2, 1)]


@pytest.fixture
def handlers():
  numbers = (signal.SIGTERM, signal.SIGINT)
  before = {n: signal.getsignal(n) for n in numbers}
  yield lambda: {n: signal.getsignal(n) for n in numbers} == before
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_until_the_end(handlers, number: int, capsys):
  with hardware.StopRequest() as stop:
    assert not handlers()
    assert stop.received(1) is None
    os.kill(os.getpid(), number)
    assert stop.received(2) == number
    assert stop.received(3) == number
  assert handlers()
  assert signal.Signals(number).name in capsys.readouterr().err


@pytest.mark.parametrize('first', [signal.SIGTERM, signal.SIGINT])
def test_the_second_interrupt_stops_at_once(handlers, first: int):
  with hardware.StopRequest() as stop:
    os.kill(os.getpid(), first)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received(1) is not None
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert handlers()
