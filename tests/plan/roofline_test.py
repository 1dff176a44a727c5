import types

import pytest

from examples.gpt2 import hardware
from examples.gpt2.config import PRESETS, ModelConfig, change, resolve
from examples.plan import roofline
from examples.plan.collectives import Collective

_KIND = 'TPU v5 lite'
_CHIP = hardware.find_chip(_KIND)
# A torus of 4 x 4.
_DEVICES = [
  types.SimpleNamespace(device_kind=_KIND, coords=[i % 4, i // 4, 0])
  for i in range(16)
]
_ROW = (0, 1, 2, 3)
_ALL = tuple(range(16))


def _link_bytes(kind: str, group, executions: int = 1, devices=_DEVICES):
  """Returns the bytes through a link, of a collective of 16 MB."""
  one = Collective(kind, ((1000,),), 16_000_000, executions, group)
  times = roofline.estimate(_CHIP, devices, 0.0, 0.0, [one])
  return times['network_seconds'] * _CHIP.link_bandwidth


@pytest.mark.parametrize(
  ('kind', 'group', 'size'),
  [
    ('all-gather', _ROW, 12e6 / 2),
    ('reduce-scatter', _ROW, 12e6 / 2),
    ('all-reduce', _ROW, 24e6 / 2),
    ('all-gather', _ALL, 15e6 / 4),
    ('all-reduce', (0, 4, 8, 12), 24e6 / 2),
    ('all-to-all', _ROW, 12e6 / 2),
    ('collective-permute', (), 16e6),
  ],
)
def test_bytes_through_a_link(kind: str, group, size: float):
  assert _link_bytes(kind, group) == pytest.approx(size)
  assert _link_bytes(kind, group, executions=7) == pytest.approx(7 * size)


def test_an_all_to_all_passes_through_a_quarter_of_a_ring():
  ring = [
    types.SimpleNamespace(device_kind=_KIND, coords=[i]) for i in range(16)
  ]
  size = _link_bytes('all-to-all', _ALL, devices=ring)
  assert size == pytest.approx(15e6 * 4 / 2)


@pytest.mark.parametrize('bound', ['compute', 'memory', 'network'])
def test_the_longest_time_binds(bound: str):
  seconds = {'compute': 1.0, 'memory': 2.0, 'network': 3.0} | {bound: 4.0}
  # Each sends 6 MB through a link.
  executions = round(seconds['network'] * _CHIP.link_bandwidth / 6e6)
  times = roofline.estimate(
    _CHIP,
    _DEVICES,
    seconds['compute'] * _CHIP.flops,
    seconds['memory'] * _CHIP.hbm_bandwidth,
    [Collective('all-gather', ((1000,),), 16_000_000, executions, _ROW)],
  )
  for name, value in seconds.items():
    assert times[f'{name}_seconds'] == pytest.approx(value)
  assert times['bound'] == bound
  assert times['seconds'] == times[f'{bound}_seconds'] == pytest.approx(4)
  assert times['seconds_without_overlap'] == pytest.approx(
    sum(seconds.values())
  )


def _model_config(remat: str) -> ModelConfig:
  config = resolve(change(PRESETS['small'], remat=remat))
  return config.model


def test_recomputed_flops():
  blocks, head, attention = 6 * 85e6, 6 * 50304 * 768, 12 * 12 * 768 * 1024
  total = blocks + head + attention
  assert roofline.recomputed_flops(_model_config('none'), total) == 0
  # Two of six products of a layer's forward and backward pass.
  dots = roofline.recomputed_flops(_model_config('dots'), total)
  assert dots == attention / 3
  full = roofline.recomputed_flops(_model_config('full'), total)
  assert full == pytest.approx((blocks + attention) / 3)


_H100 = hardware.find_chip('NVIDIA H100 80GB HBM3')
# Two hosts of four GPUs.
_GPUS = [types.SimpleNamespace(process_index=i // 4) for i in range(8)]
_HOST, _PAIRS, _ACROSS = (0, 1, 2, 3), (0, 1, 4, 5), (0, 4)


@pytest.mark.parametrize(
  ('kind', 'group', 'seconds'),
  [
    ('all-gather', _HOST, 12e6 / 450e9),
    ('all-reduce', _HOST, 24e6 / 450e9),
    # Two adapters on each host; one.
    ('all-gather', _PAIRS, 12e6 / (2 * 50e9)),
    ('all-gather', _ACROSS, 8e6 / 50e9),
    ('reduce-scatter', tuple(range(8)), 14e6 / (4 * 50e9)),
    # Of 14 MB, 8 go to the four GPUs of the other host.
    ('all-to-all', tuple(range(8)), 8e6 / 50e9),
    ('all-to-all', _HOST, 12e6 / 450e9),
    ('collective-permute', (), 16e6 / 50e9),
  ],
)
def test_gpus_send_over_nvlink_and_between_hosts(kind, group, seconds: float):
  one = Collective(kind, ((1000,),), 16_000_000, 1, group)
  times = roofline.estimate(_H100, _GPUS, 0.0, 0.0, [one])
  assert times['network_seconds'] == pytest.approx(seconds)


@pytest.mark.parametrize(
  ('kind', 'gigabytes'),
  [
    ('TPU v4', 32), ('TPU v5 lite', 16), ('TPU v5', 96), ('TPU v6 lite', 32),
    # Three quarters, which jax takes.
    ('NVIDIA A100-SXM4-80GB', 60), ('NVIDIA H100 80GB HBM3', 60),
    ('NVIDIA H200', 105.75), ('NVIDIA B200', 135),
  ],
)  # fmt: skip
def test_chips_have_memory_and_bandwidths(kind: str, gigabytes: float):
  chip = hardware.find_chip(kind)
  # What is sold as so many GB may be GiB.
  assert chip.hbm == pytest.approx(1e9 * gigabytes, rel=0.08)
  assert chip.flops > chip.hbm_bandwidth > chip.link_bandwidth > 1e10
  if 'NVIDIA' in kind:
    assert chip.link_bandwidth > chip.network_bandwidth > 1e10
