import types
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, FittedConfig, UsageError
from examples.gpt2.devices import hardware
from examples.gpt2.devices.sharding import (
  AXES,
  make_mesh,
  num_batch_shards,
)
from examples.gpt2.presets import resolve
from examples.gpt2.run.memory import (
  OutOfMemoryError,
  advice,
  explain,
  fit,
)
from examples.gpt2.run.step import Trainer

_EXHAUSTED = 'RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes.\nmore'


def _make(devices: int = 8, **settings) -> tuple[FittedConfig, Trainer]:
  defaults = dict(
    num_layers=3, num_heads=4, width=64, context_length=64, batch_size=16,
    steps=10, vocab_size=512, unroll=1,
  )  # fmt: skip
  resolved = resolve(Config(**defaults | settings))
  mesh = make_mesh(resolved.mesh, jax.devices()[:devices])
  config = fit(resolved, mesh)
  return config, Trainer(config, config.vocab_size, mesh)


@pytest.mark.parametrize(
  'error', [jax.errors.JaxRuntimeError(_EXHAUSTED), MemoryError()], ids=type
)
def test_a_failed_allocation_becomes_advice(error: Exception):
  config, trainer = _make()
  with pytest.raises(OutOfMemoryError) as found, advice(config, trainer):
    raise error
  first, *others = str(found.value).splitlines()
  assert '12345' in first or isinstance(error, MemoryError)
  assert others == explain(config, trainer).splitlines()
  assert found.value.__cause__ is error


@pytest.mark.parametrize(
  'error',
  [
    jax.errors.JaxRuntimeError('INTERNAL: broken'),
    ValueError('RESOURCE_EXHAUSTED'),
  ],
  ids=type,
)
def test_other_errors_pass(error: Exception):
  with pytest.raises(type(error), match=str(error)), advice(*_make()):
    raise error


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (
      {'micro_batch_size': 4, 'devices': 1, 'remat': 'dots'},
      '--micro-batch-size 2, --remat full, --dtype bfloat16, --mesh fsdp=N',
    ),
    (
      {'mesh': 'tensor=2', 'micro_batch_size': 1},
      '--remat dots, --dtype bfloat16, --mesh fsdp=4,tensor=2',
    ),
    (
      {'mesh': 'fsdp=8', 'remat': 'full', 'dtype': 'bfloat16'},
      '--micro-batch-size 1',
    ),
  ],
)
def test_only_what_helps_is_advised(settings: dict, expected: str):
  text = explain(*_make(**settings))
  hints = text.partition('in this order:\n')[2].splitlines()
  for hint, flag in zip(hints, expected.split(', '), strict=True):
    assert flag in hint


def test_weights_and_moments_are_counted_by_device():
  config, trainer = _make(width=1024, mesh='fsdp=8', num_layers=12)
  params = hardware.bytes_per_device(trainer.shapes.params) / 2**30
  text = explain(config, trainer)
  assert params > 0.05
  assert f'weights: {params:.2f} GiB' in text
  assert f'moments: {2 * params:.2f} GiB' in text
  assert f'gradients: {params:.2f} GiB' in text


@hypothesis.given(
  mesh=st.sampled_from(['', 'tensor=4', 'data=2,fsdp=4']),
  part=st.integers(1, 200),
  most=st.none() | st.integers(1, 300),
)
def test_the_micro_batch_is_the_largest_divisor_up_to_the_setting(
  mesh: str, part: int, most: int | None
):
  size = part * num_batch_shards(make_mesh(mesh))
  config = resolve(Config(batch_size=size, micro_batch_size=most))
  expected = max(n for n in range(1, (most or part) + 1) if part % n == 0)
  fitted = fit(config, make_mesh(mesh))
  assert fitted.micro_batch_size == expected
  assert fit(fitted, make_mesh(mesh)) == fitted


@pytest.mark.parametrize(
  ('platform', 'fsdp', 'settings', 'unroll'),
  [
    ('cpu', 1, {'num_layers': 4}, 4),
    ('cpu', 1, {'num_layers': 12}, 1),
    ('tpu', 1, {'num_layers': 4}, 1),
    ('gpu', 1, {'num_layers': 12}, 12),
    ('gpu', 1, {'num_layers': 12, 'remat': 'full'}, 1),
    ('gpu', 2, {'num_layers': 12}, 1),
    ('gpu', 1, {'num_layers': 4, 'unroll': 2}, 2),
  ],
)
def test_layers_are_unrolled_where_that_is_quicker(
  platform: str, fsdp: int, settings: dict[str, Any], unroll: int
):
  device = types.SimpleNamespace(platform=platform)
  mesh = types.SimpleNamespace(
    devices=np.array([device]), shape=dict.fromkeys(AXES, 1) | {'fsdp': fsdp}
  )
  config = resolve(Config(**settings))
  assert fit(config, mesh).unroll == unroll


_GROUPED = {'architecture': 'llama', 'num_heads': 8, 'num_kv_heads': 2}


@pytest.mark.parametrize(
  ('mesh', 'settings', 'message'),
  [
    ('', {'batch_size': 12}, '8 of --mesh must divide --batch-size 12'),
    ('tensor=8', {}, 'tensor = 8 .*--num-kv-heads 4'),
    ('tensor=4', _GROUPED, 'tensor = 4 .*--num-kv-heads 2'),
  ],
)
def test_batch_and_heads_must_fit_the_mesh(
  mesh: str, settings: dict, message: str
):
  with pytest.raises(UsageError, match=message):
    fit(resolve(Config(**settings)), make_mesh(mesh))
