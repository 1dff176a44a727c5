import hypothesis
from hypothesis import strategies as st
import jax
import pytest

from examples.gpt2.config import Config, change, resolve
from examples.gpt2.memory import (
  OutOfMemoryError,
  advice,
  explain,
  fit,
)
from examples.gpt2.sharding import (
  make_mesh,
  num_batch_shards,
)
from examples.gpt2.step import Trainer

_EXHAUSTED = 'RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes.\nmore'


def _make(devices: int = 8, **settings) -> tuple[Config, Trainer]:
  defaults = dict(
    num_layers=3, num_heads=4, width=64, context_length=64, batch_size=16,
    steps=10, vocab_size=512, unroll=1,
  )  # fmt: skip
  resolved = resolve(change(Config(), **defaults | settings))
  mesh = make_mesh(resolved.mesh, jax.devices()[:devices])
  config = fit(resolved, mesh)
  return config, Trainer(config, config.model.vocab_size, mesh)


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
