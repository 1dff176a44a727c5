import types

import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices import chips
from examples.gpt2.devices.chips import Chip
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import make_model_config
from examples.plan import roofline
from examples.plan.collectives import Collective

_CHIP = Chip(flops=1e12, hbm=1e9, hbm_bandwidth=1e11, link_bandwidth=1e10)
# A torus of 4 x 4.
_DEVICES = [types.SimpleNamespace(coords=[i % 4, i // 4, 0]) for i in range(16)]
_ROW = ((0, 1, 2, 3),)
_ALL = (tuple(range(16)),)


def _seconds(kind: str, groups, executions: int = 1) -> float:
  one = Collective(kind, ((1000,),), 16_000_000, executions, groups)
  return roofline.collective_seconds(one, _CHIP, _DEVICES)


@pytest.mark.parametrize(
  ('kind', 'groups', 'seconds'),
  [
    ('all-gather', _ROW, 12e6 / 2e10),
    ('reduce-scatter', _ROW, 12e6 / 2e10),
    ('all-reduce', _ROW, 24e6 / 2e10),
    ('all-gather', _ALL, 15e6 / 4e10),
    ('all-reduce', ((0, 4, 8, 12),), 24e6 / 2e10),
    ('all-to-all', _ROW, 12e6 / 2e10),
    ('collective-permute', (), 16e6 / 1e10),
  ],
)
def test_seconds_of_collectives(kind: str, groups, seconds: float):
  assert _seconds(kind, groups) == pytest.approx(seconds)
  assert _seconds(kind, groups, executions=7) == pytest.approx(7 * seconds)


def test_an_all_to_all_passes_through_a_quarter_of_a_ring():
  devices = [types.SimpleNamespace(coords=[i]) for i in range(16)]
  one = Collective('all-to-all', ((1000,),), 16_000_000, 1, _ALL)
  seconds = roofline.collective_seconds(one, _CHIP, devices)
  assert seconds == pytest.approx(15e6 * 4 / 2e10)


@pytest.mark.parametrize(
  ('flops', 'hbm_bytes', 'executions', 'bound'),
  [
    (1e12, 5e10, 100, 'compute'),
    (1e11, 5e10, 100, 'memory'),
    (1e11, 1e9, 1000, 'network'),
  ],
)
def test_the_longest_time_binds(
  flops: float, hbm_bytes: float, executions: int, bound: str
):
  one = Collective('all-gather', ((1000,),), 16_000_000, executions, _ROW)
  times = roofline.estimate(_CHIP, _DEVICES, flops, hbm_bytes, [one])
  assert times.compute == flops / 1e12
  assert times.memory == hbm_bytes / 1e11
  assert times.network == pytest.approx(executions * 6e-4)
  assert times.bound == bound
  assert times.seconds == getattr(times, bound)
  assert times.seconds_without_overlap == pytest.approx(sum(times))


def _model_config(remat: str) -> ModelConfig:
  config = resolve(Config(preset='small', remat=remat))
  return make_model_config(config, config.vocab_size)


def test_recomputed_flops():
  blocks, head, attention = 6 * 85e6, 6 * 50304 * 768, 12 * 12 * 768 * 1024
  total = blocks + head + attention
  assert roofline.recomputed_flops(_model_config('none'), total) == 0
  # Two of six products of a layer's forward and backward pass.
  dots = roofline.recomputed_flops(_model_config('dots'), total)
  assert dots == attention / 3
  full = roofline.recomputed_flops(_model_config('full'), total)
  assert full == pytest.approx((blocks + attention) / 3)


@pytest.mark.parametrize(
  ('kind', 'gibibytes'),
  [('TPU v4', 30.75), ('TPU v5 lite', 15.75), ('TPU v5', 95.74),
   ('TPU v6 lite', 31.25)],
)  # fmt: skip
def test_tpus_have_memory_and_bandwidths(kind: str, gibibytes: float):
  chip = chips.find(kind)
  assert chip.hbm == gibibytes * 2**30
  assert chip.flops > chip.hbm_bandwidth > chip.link_bandwidth > 1e10
