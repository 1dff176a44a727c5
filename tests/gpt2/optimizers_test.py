import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2.config import Config, change
from examples.gpt2.optimizers import OPTIMIZERS
from examples.gpt2.resolve import resolve
from examples.gpt2.schedules import make_optimizer, make_schedule
from examples.gpt2.sharding import by_path, make_mesh
import merit_optax

_LAYERS = 3
_ALL = pytest.mark.parametrize('optimizer', OPTIMIZERS)


@pytest.fixture(autouse=True)
def mesh():
  with jax.set_mesh(make_mesh('', jax.devices()[:1])):
    yield


def _config(**settings) -> Config:
  # A norm that no gradient has: the clip has a test of its own.
  defaults = dict(
    num_layers=_LAYERS, num_heads=2, width=32, context_length=16, steps=10,
    warmup=0.0, max_gradient_norm=1e6,
  )  # fmt: skip
  return resolve(change(Config(), **defaults | settings))


_SHAPES = {
  'token_embedding': {'embedding': (64, 32)},
  'blocks': {
    'attention': {
      'qkv': {'kernel': (_LAYERS, 32, 2, 3, 16), 'bias': (_LAYERS, 2, 3, 16)}
    },
    'mlp_norm': {'scale': (_LAYERS, 32)},
    'mlp': {'down': {'kernel': (_LAYERS, 48, 32)}},
  },
}


def _random(shapes, scale: float, seed: int):
  """Returns random arrays, none of them zero."""
  generator = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(scale * generator.normal(size=x), 'float32'),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def _trees(shapes=_SHAPES):
  """Returns parameters and the gradients of three steps."""
  return _random(shapes, 0.1, 0), [_random(shapes, 0.01, i) for i in (1, 2, 3)]


def _updates(
  optimizer: optax.GradientTransformation, params, gradients, compiled=True
):
  """Returns the updates of several steps."""
  update_fn = jax.jit(optimizer.update) if compiled else optimizer.update
  state, found = optimizer.init(params), []
  for gradient in gradients:
    update, state = update_fn(gradient, state, params)
    params = optax.apply_updates(params, update)
    found.append(update)
  return found


def _difference(a, b) -> dict[str, float]:
  """Returns the largest difference in each parameter."""
  return by_path(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b))


def _rates(**settings) -> np.ndarray:
  config = resolve(change(Config(), learning_rate=2.0, **settings))
  schedule = make_schedule(config)
  return np.asarray(jax.vmap(schedule)(jnp.arange(config.steps)))


@hypothesis.given(
  steps=st.sampled_from([4, 100]),
  share=st.floats(0, 0.99),
  min_rate=st.sampled_from([0.0, 0.3]),
)
@hypothesis.settings(max_examples=8)
@hypothesis.example(steps=4, share=1.0, min_rate=0.0)
def test_the_cosine_is_that_of_optax(steps: int, share: float, min_rate: float):
  warmup = min(round(share * steps), steps - 1)
  expected = optax.warmup_cosine_decay_schedule(
    2 / max(1, warmup), 2, warmup, steps, 2 * min_rate
  )
  # In steps and as a share of them.
  for given in (warmup, warmup / steps):
    rates = _rates(steps=steps, warmup=given, min_rate=min_rate)
    assert (rates > 0).all()
    np.testing.assert_allclose(
      rates, expected(np.arange(steps)), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (dict(schedule='linear'), [2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]),
    (dict(schedule='linear', min_rate=0.5), np.linspace(2, 1.125, 8)),
    (dict(schedule='wsd'), [2, 2, 2, 2, 2, 2, 2, 1]),
    (dict(schedule='wsd', decay=0), [2] * 8),
    (
      dict(schedule='wsd', decay=0.4, decay_shape='1-sqrt', min_rate=0.2),
      [2] * 4 + [2 * (1 - 0.8 * np.sqrt(i / 4)) for i in range(4)],
    ),
    (
      dict(schedule='inverse-sqrt', min_rate=0.5),
      [max(2 * np.sqrt(2 / (2 + i)), 1) for i in range(8)],
    ),
  ],
)
def test_schedules_after_the_warmup(settings: dict, expected):
  rates = _rates(steps=10, warmup=2, **settings)
  np.testing.assert_allclose(rates[:2], [1, 1.5], rtol=1e-6)
  np.testing.assert_allclose(rates[2:], expected, rtol=1e-5)


@_ALL
def test_settings_reach_the_optimizer(optimizer: str):
  # A parameter of Muon's, and one of its Adam.
  shapes = _SHAPES | {'blocks': {'mlp': _SHAPES['blocks']['mlp']}}
  params, gradients = _trees(shapes)
  base = dict(optimizer=optimizer, learning_rate=1e-3, weight_decay=0.0)

  def updates(**settings):
    config = _config(**base | settings)
    return _updates(make_optimizer(config), params, gradients[:2])

  expected = updates()
  # Adam beside MERIT has a rate of its own.
  adam = {'adam_rate': 0.008} if optimizer == 'merit-hidden' else {}
  faster = updates(learning_rate=2e-3, **adam)
  # A norm that is kept bends a step a little.
  rtol, atol = (5e-3, 1e-6) if optimizer == 'muon-hyperball' else (1e-4, 1e-8)
  chex.assert_trees_all_close(
    faster[0], optax.tree.scale(2, expected[0]), rtol=rtol, atol=atol
  )
  has = {'b1', 'b2', 'weight_decay'} & {*OPTIMIZERS[optimizer].defaults}
  for settings in ({name: 0.5} for name in sorted(has)):
    changed = _difference(updates(**settings)[1], expected[1])
    assert max(changed.values()) > 1e-6, settings


def _matrices(kernel: jax.Array, qkv: str) -> dict[str, jax.Array]:
  """Returns the matrices of a kernel, (layers, D, groups, X, K), by name."""
  _, rows, heads, parts, _ = kernel.shape
  found = {}
  for i, layer in enumerate(kernel):
    if qkv == 'fused':
      found[f'{i}'] = layer.reshape(rows, -1)
    elif qkv == 'split':
      for part in range(parts):
        found[f'{i}.{part}'] = layer[:, :, part].reshape(rows, -1)
    else:
      for head, part in np.ndindex(heads, parts):
        found[f'{i}.{part}.{head}'] = layer[:, head, part]
  return found


_QKV = {'blocks': {'attention': _SHAPES['blocks']['attention']}}
# Of a llama whose two queries share a key.
_GROUPED = {'blocks': {'qkv': {'kernel': (_LAYERS, 32, 2, 4, 16)}}}


@pytest.mark.parametrize(
  ('shapes', 'qkv', 'parts'),
  [
    (_SHAPES, 'fused', 1),
    (_QKV, 'heads', 6),
    (_GROUPED, 'split', 4),
  ],
)
def test_each_matrix_gets_the_updates_of_one_alone(shapes, qkv, parts):
  params, gradients = _trees(shapes)
  config = _config(qkv=qkv)

  def separate(tree) -> dict[str, jax.Array]:
    found = {}
    for name, x in by_path(tree).items():
      if name.endswith('.qkv.kernel'):
        for key, matrix in _matrices(x, qkv).items():
          found[f'{name} {key}'] = matrix
      elif name.endswith('.qkv.bias'):
        for key, matrix in _matrices(x[:, None], qkv).items():
          found[f'{name} {key}'] = matrix[0]
      else:
        for i, one in enumerate(x if name.startswith('blocks.') else [x]):
          found[f'{name} {i}'] = one
    return found

  alone = merit_optax.merit(make_schedule(config), weight_decay=0.01)
  trees = [separate(x) for x in (params, *gradients)]
  assert sum('qkv.kernel' in name for name in trees[0]) == _LAYERS * parts
  # One operation at a time: XLA rounds fused ones as it likes.
  for found, expected in zip(
    _updates(make_optimizer(config), params, gradients[:2], compiled=False),
    _updates(alone, trees[0], trees[1:3], compiled=False),
    strict=True,
  ):
    for name, x in separate(found).items():
      np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.parametrize('optimizer', ['merit-hidden', 'muon'])
def test_embeddings_biases_and_norms_take_steps_of_adam(optimizer: str):
  params, gradients = _trees()
  config = _config(adam_rate=0.25, weight_decay=0.3, optimizer=optimizer)
  found = _updates(make_optimizer(config), params, gradients[:1])[0]
  for name, g in by_path(gradients[0]).items():
    direction = g / (jnp.abs(g) + 1e-6) + 0.3 * by_path(params)[name]
    is_adam = np.allclose(by_path(found)[name], -0.25 * direction, rtol=1e-4)
    assert is_adam != name.endswith('kernel'), name


@pytest.mark.parametrize('optimizer', ['muon', 'muon-hyperball'])
def test_adam_beside_muon_has_moments_of_its_own(optimizer: str):
  params, gradients = _trees()
  config = _config(
    optimizer=optimizer, b1=0.5, adam_rate=0.25, weight_decay=0.0, steps=1000,
    schedule='wsd', decay=0.0,
  )  # fmt: skip
  adam = merit_optax.scale_by_adam(
    0.9, 0.95, bias_correction=optimizer == 'muon'
  )
  direction = _updates(adam, params, gradients)[-1]['token_embedding']
  found = _updates(make_optimizer(config), params, gradients)[-1]
  chex.assert_trees_all_close(
    found['token_embedding'], optax.tree.scale(-0.25, direction), rtol=1e-4
  )


def test_the_gradient_is_clipped_to_its_global_norm():
  params, (first, second, _) = _trees()
  optimizer = make_optimizer(_config(max_gradient_norm=0.01))
  found, expected = (
    _updates(optimizer, params, [first, optax.tree.scale(scale, second)])
    for scale in (1000.0, 1.0)
  )
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-7)
