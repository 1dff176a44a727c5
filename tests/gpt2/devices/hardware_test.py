import math
from pathlib import Path
import sys
import types

import hypothesis
from hypothesis import strategies as st
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices import chips, hardware
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
    ('TPU v6e', 918),
    ('TPU7x', 1153.5),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 NVL', 835),
    ('NVIDIA H200', 989),
    ('NVIDIA B200', 2250),
    ('NVIDIA GB200', 2500),
    ('NVIDIA GH200 480GB', 989),
    ('NVIDIA GH200 144G HBM3e', 989),
    ('NVIDIA H800', 989),
    ('NVIDIA H800 PCIe', 756),
    ('NVIDIA A800-SXM4-80GB', 312),
    ('NVIDIA A800 80GB PCIe', 312),
    ('NVIDIA A10', 125),
    ('NVIDIA A10G', 70),
    ('NVIDIA L4', 121),
    ('NVIDIA L40S', 362),
    ('NVIDIA L40', 181),
    ('Tesla V100-SXM2-16GB', 125),
    ('Tesla V100S-PCIE-32GB', 130),
    ('NVIDIA GeForce RTX 4090', 165.2),
    ('NVIDIA GeForce RTX 5090', 209.5),
    ('NVIDIA RTX 6000 Ada Generation', 364.25),
    ('NVIDIA RTX PRO 6000 Blackwell Workstation Edition', 503.8),
    ('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', 438.9),
    ('AMD Instinct MI300X', 1307.4),
  ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, tera: float):
  device = types.SimpleNamespace(device_kind=kind)
  assert hardware.peak_flops(device) == tera * 1e12


@hypothesis.given(
  kind=st.sampled_from(sorted(chips._CHIPS)),
  maker=st.sampled_from(['', 'NVIDIA ', 'NVIDIA GeForce ', 'Tesla ', 'AMD ']),
  end=st.sampled_from(['', ' (of a kind)', '-SXM2-16GB', ' Edition']),
)
def test_every_chip_is_found_by_its_own_name(kind: str, maker: str, end: str):
  assert chips.find(f'{maker}{kind}{end}') is chips._CHIPS[kind]


@hypothesis.given(
  kind=st.sampled_from(sorted(chips._CHIPS)),
  glued=st.text('GLSXe012', min_size=1, max_size=2),
)
def test_a_name_within_a_word_is_another_chip(kind: str, glued: str):
  for name in (f'{kind}{glued}', f'{glued}{kind}'):
    assert name in chips._CHIPS or chips.find(name) is not chips._CHIPS[kind]


@pytest.mark.parametrize(
  'kind',
  [
    'cpu', 'NVIDIA GeForce GTX 1080', '', 'NVIDIA GeForce RTX 4090 Laptop GPU',
    'NVIDIA GeForce RTX 5090 D', 'NVIDIA RTX A1000', 'NVIDIA H20',
    'Quadro RTX 6000',
  ],
)  # fmt: skip
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
  found = trainer.flops_per_token
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
  assert trainer.flops_per_token == 6 * weights + 12 * layers * width * 1024


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
  config = resolve(Config(num_layers=1, width=64, num_heads=2))
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
  ('platform', 'kind', 'stats', 'expected'),
  [
    ('cpu', 'cpu', {'bytes_limit': 5}, None),
    ('tpu', 'TPU v5 lite', {'bytes_limit': 5}, 15.75 * 2**30),
    ('gpu', 'NVIDIA H100 80GB HBM3', {'bytes_limit': 5}, 5),
    ('tpu', 'TPU v5 lite', None, 15.75 * 2**30),
    ('gpu', 'NVIDIA H100 80GB HBM3', None, 0.75 * 84942979072),
    ('gpu', 'of tomorrow', {}, None),
  ],
)
def test_memory_is_what_the_kind_has_or_the_device_says(
  platform: str, kind: str, stats: dict | None, expected: float | None
):
  device = types.SimpleNamespace(
    platform=platform, device_kind=kind, memory_stats=lambda: stats
  )
  assert hardware.memory_bytes(device) == expected
