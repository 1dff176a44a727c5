import functools
import re

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2.compile_for import compile_step
from examples.gpt2.config import Config, change
from examples.gpt2.optimizers import OPTIMIZERS, Optimizer
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import (
  batch_sharding,
  make_mesh,
  num_batch_shards,
)
from examples.gpt2.step import Trainer, TrainState

# A first token that makes something of the step infinite or not a number.
_NAN_LOSS, _INFINITE_LOSS, _NAN_GRADIENT = 61, 62, 63
_SLOW = ('adamw', 'lamb', 'muon', 'muon-hyperball')
_MOST_OPTIMIZERS = pytest.mark.parametrize(
  'optimizer',
  [
    pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ())
    for name in OPTIMIZERS
  ],
)


class _Fragile(Trainer):
  """A trainer that has bad steps on command."""

  def loss(self, params, tokens_BT):
    loss = super().loss(params, tokens_BT)
    bias = params['final_norm']['bias']
    zero = jnp.sum((bias - jax.lax.stop_gradient(bias)) ** 2)
    branches = [
      lambda loss, zero: loss,
      lambda loss, zero: loss * jnp.nan,
      lambda loss, zero: loss * jnp.inf,
      # Zero, with an infinite slope times zero.
      lambda loss, zero: loss + jnp.sqrt(zero),
    ]
    kind = jnp.clip(tokens_BT[0, 0] - 60, 0, 3)
    return jax.lax.switch(kind, branches, loss, zero)


def _config(**settings) -> Config:
  defaults = dict(
    num_layers=2, num_heads=2, width=16, context_length=16, batch_size=16,
    micro_batch_size=16, steps=30, unroll=1,
  )  # fmt: skip
  return resolve(change(Config(), **defaults | settings))


@functools.cache
def _trainer(optimizer: str = 'merit', mesh: str = '') -> Trainer:
  """Returns a trainer on a mesh of all devices, without one on the first."""
  config = _config(optimizer=optimizer, mesh=mesh)
  devices = jax.devices() if mesh else jax.devices()[:1]
  return _Fragile(config, 64, make_mesh(mesh, devices))


def _tokens(seed: int, first: int | None = None, size: int = 16) -> np.ndarray:
  """Returns a step's tokens, a micro-batch of the lower half of them."""
  generator = np.random.default_rng(seed)
  tokens = generator.integers(32, size=(1, size, 17)).astype(np.int32)
  if first is not None:
    tokens[:, 0, 0] = first
  return tokens


def _put(trainer: Trainer, tokens: np.ndarray) -> jax.Array:
  return jax.device_put(tokens, batch_sharding(trainer.mesh))


def _train(trainer: Trainer, steps: int) -> tuple[TrainState, list[float]]:
  with jax.set_mesh(trainer.mesh):
    state, losses = trainer.init(), []
    for step in range(steps):
      state, metrics = trainer.step(state, _put(trainer, _tokens(step)))
      assert set(metrics) == {'train_loss', 'gradient_norm'}
      losses.append(float(metrics['train_loss']))
  return state, losses


@pytest.mark.parametrize('mesh', ['', 'fsdp=4,tensor=2'])
def test_a_new_optimizer_is_one_entry(mesh: str, monkeypatch):
  # Its state is factored: leaves of other shapes than the parameters.
  new = Optimizer(optax.adafactor, dict(learning_rate=0.1))
  monkeypatch.setitem(OPTIMIZERS, 'new', new)
  config = _config(optimizer='new', width=256)
  devices = jax.devices() if mesh else jax.devices()[:1]
  trainer = Trainer(config, 64, make_mesh(mesh, devices))
  _, losses = _train(trainer, 3)
  assert losses[-1] < losses[0]


@_MOST_OPTIMIZERS
def test_a_bad_step_changes_nothing_but_counters(optimizer: str):
  trainer = _trainer(optimizer)
  state, losses = _train(trainer, 12)
  assert losses[-1] < losses[0] - 0.02
  for kind in (_NAN_LOSS, _INFINITE_LOSS, _NAN_GRADIENT):
    expected = jax.tree.map(
      lambda x: x + jnp.issubdtype(x.dtype, jnp.integer), jax.device_get(state)
    )
    state, metrics = trainer.step(state, _put(trainer, _tokens(0, kind)))
    assert np.isfinite(metrics['train_loss']) == (kind == _NAN_GRADIENT)
    assert not np.isfinite(metrics['gradient_norm'])
    chex.assert_trees_all_equal(state, expected)
  assert state.step == 15
  params = jax.device_get(state.params)
  state, metrics = trainer.step(state, _put(trainer, _tokens(1)))
  assert np.isfinite(metrics['train_loss'])
  trees = params, state.params
  for old, new in zip(*map(jax.tree.leaves, trees), strict=True):
    assert np.isfinite(new).all()
    assert (old != new).any()


@_MOST_OPTIMIZERS
def test_a_mesh_gives_the_losses_of_one_device(optimizer: str):
  meshes = {'adamw': 'data=2,fsdp=2,tensor=2', 'lamb': 'data=8'}
  trainer = _trainer(optimizer, meshes.get(optimizer, 'fsdp=4,tensor=2'))
  _, expected = _train(_trainer(optimizer), 12)
  state, losses = _train(trainer, 12)
  # Muon turns small gradients into large updates, rounding errors too.
  tolerance = 1e-2 if 'muon' in optimizer else 1e-4
  np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance)
  for first in (False, True):
    found = trainer.init() if first else state
    jax.tree.map(_check_place, found, trainer.shapes)


def _check_place(x: jax.Array, shape: jax.ShapeDtypeStruct) -> None:
  assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
  assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)


@pytest.mark.usefixtures('full_compilation')
@pytest.mark.parametrize(
  'remat', ['dots', pytest.param('full', marks=pytest.mark.slow)]
)
def test_gathered_parameters_are_kept_of_no_layer(remat: str):
  mesh = make_mesh('fsdp=8')
  config = _config(
    num_layers=3, width=32, mlp_width=64, remat=remat, micro_batch_size=1
  )
  trainer = Trainer(config, 64, mesh)
  text = compile_step(resolve(config, mesh), trainer).as_text()
  kernels = {'32,64', '64,32', '32,2,3,16', '32,32'}
  gathered = {
    shape.removeprefix('1,')
    for shape in re.findall(r'\w\[([\d,]+)\][^ ]* all-gather\(', text)
  }
  assert kernels <= gathered
  shapes = set(re.findall(r'\w\[([\d,]+)\]', text))
  assert '3,4,64' in shapes
  assert not shapes & {f'3,{kernel}' for kernel in kernels}


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
def test_flops_are_about_those_that_xla_counts(architecture: str):
  config = _config(
    architecture=architecture, width=64, context_length=64, unroll=2
  )
  trainer = Trainer(config, 512, make_mesh('', jax.devices()[:1]))
  tokens = jax.ShapeDtypeStruct((4, 65), jnp.int32)
  step = jax.jit(jax.value_and_grad(trainer.loss))
  counted = step.lower(trainer.shapes.params, tokens).cost_analysis()['flops']
  # It leaves out what no gradient needs, and counts norms and activations.
  assert trainer.flops_per_token == pytest.approx(counted / (4 * 64), rel=0.15)


@hypothesis.given(
  mesh=st.sampled_from(['', 'tensor=4', 'data=2,fsdp=4']),
  part=st.integers(1, 200),
  most=st.none() | st.integers(1, 300),
)
def test_the_micro_batch_is_the_largest_divisor_up_to_the_setting(
  mesh: str, part: int, most: int | None
):
  size = part * num_batch_shards(make_mesh(mesh))
  config = resolve(change(Config(), batch_size=size, micro_batch_size=most))
  expected = max(n for n in range(1, (most or part) + 1) if part % n == 0)
  fitted = resolve(config, make_mesh(mesh))
  assert fitted.micro_batch_size == expected
  assert resolve(fitted, make_mesh(mesh)) == fitted


@pytest.mark.parametrize(('layers', 'unroll'), [(4, 4), (5, 1)])
def test_layers_of_small_models_are_unrolled_on_cpu(layers: int, unroll: int):
  mesh = make_mesh('', jax.local_devices(backend='cpu')[:1])
  config = change(Config(), num_layers=layers)
  assert resolve(config, mesh).model.unroll == unroll
  assert resolve(change(config, unroll=2), mesh).model.unroll == 2
