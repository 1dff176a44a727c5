from collections.abc import Callable
import itertools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from examples.gpt2.config import Config, change
from examples.gpt2.diagnostics import make_diagnostics
from examples.gpt2.log import as_json
from examples.gpt2.model import causal_attention
from examples.gpt2.optimizers import merit_arguments
from examples.gpt2.resolve import resolve
from examples.gpt2.schedules import optimizer_settings
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer, TrainState
import merit_optax

_SHARES = (
  'decided_by_weight', 'decided_by_row', 'decided_by_column', 'clipped',
  'fallback',
)  # fmt: skip
_MERIT_KEYS = ('trust_ratio_min', 'trust_ratio_max', *_SHARES)


def _config(**settings) -> Config:
  defaults = dict(
    num_layers=3, num_heads=2, width=16, context_length=16, batch_size=16,
    micro_batch_size=16, steps=10, warmup=0.0, max_gradient_norm=0.05,
    unroll=1,
  )  # fmt: skip
  config = change(Config(), **defaults | settings)
  return resolve(config, _mesh(config.mesh))


def _mesh(text: str) -> Mesh:
  devices = jax.devices() if text else jax.devices()[:1]
  return make_mesh(text, devices)


def _trainer(config: Config, kind: type[Trainer] = Trainer) -> Trainer:
  return kind(config, 64, _mesh(config.mesh))


def _tokens(shape=(1, 16, 17), seed: int = 0) -> np.ndarray:
  generator = np.random.default_rng(seed)
  return generator.integers(64, size=shape).astype(np.int32)


def _state(trainer: Trainer) -> TrainState:
  """Returns random parameters and moments, placed as the trainer's."""
  generator = np.random.default_rng(0)

  def make(x: jax.ShapeDtypeStruct) -> jax.Array:
    values = np.square(0.3 * generator.normal(size=x.shape))
    if jnp.issubdtype(x.dtype, jnp.integer):
      values = np.full(x.shape, 2)
    return jax.device_put(values.astype(x.dtype), x.sharding)

  state = jax.tree.map(make, trainer.shapes)
  params = jax.tree.map(
    lambda x: x * generator.choice([-1.0, 1.0], size=x.shape).astype(x.dtype),
    state.params,
  )
  # Attention that is far from even, and of each head another.
  params['blocks']['attention']['qkv']['kernel'] *= 10
  return state._replace(params=params)


def _diagnostics(config: Config, trainer: Trainer) -> Callable[..., Any]:
  """Returns the diagnostics of a step, as they are logged."""
  measure = make_diagnostics(config, trainer)
  return lambda *step: as_json(measure(*step))


@pytest.fixture(scope='module')
def seen():
  """Returns a trainer, its state, a batch and the diagnostics of a step."""
  config = _config()
  trainer = _trainer(config)
  state, tokens = _state(trainer), jnp.asarray(_tokens())
  measured = _diagnostics(config, trainer)(state, tokens)
  return config, trainer, state, tokens, measured


@pytest.fixture(scope='module')
def gradients(seen):
  _, trainer, state, tokens, _ = seen
  return jax.jit(trainer.loss_and_gradients)(state.params, tokens)[1]


def test_attention_equals_a_plain_computation(seen):
  config, trainer, state, tokens, measured = seen

  def attend(q: jax.Array, k: jax.Array, v: jax.Array):
    return causal_attention(q, k, v)[0], (q, k)

  model = trainer.model(state.params)
  _, (queries, keys) = jax.device_get(model.features(tokens[0, :, :-1], attend))
  for layer, (q, k) in enumerate(zip(queries, keys, strict=True)):
    largest, centred, entropies = [], [], []
    for b, h, t in np.ndindex(16, config.model.num_heads, 16):
      logits = k[b, : t + 1, h] @ q[b, t, h] / math.sqrt(8)
      p = np.exp(logits - logits.max())
      p /= p.sum()
      largest.append(logits.max())
      centred.append((logits - logits.mean()).max())
      entropies.append(-np.sum(p * np.log(np.maximum(p, 1e-300))))
    for name, value in (
      ('max_attention_logit', max(largest)),
      ('max_centred_attention_logit', max(centred)),
      ('attention_entropy', np.mean(entropies)),
    ):
      assert measured[name][layer] == pytest.approx(value, rel=1e-4)


def _merit(config: Config) -> dict[str, Any]:
  return merit_arguments(**optimizer_settings(config))


def _layer(tree, number: int):
  return jax.tree.map(lambda x: x[number], tree)


def test_gradient_norms_add_up_to_the_global_one(seen, gradients):
  _, _, _, _, measured = seen
  norms = measured['layers']['gradient_norm']
  for layer, norm in enumerate(norms):
    alone = _layer(gradients['blocks'], layer)
    assert norm == pytest.approx(float(optax.tree.norm(alone)), rel=1e-4)
  others = [x['gradient_norm'] for x in measured['others'].values()]
  total = math.sqrt(sum(x**2 for x in norms + others))
  assert total == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-4)
  assert total > 0.05, 'the clip does something'


def test_ratios_of_a_layer_are_those_of_the_layer_alone(seen, gradients):
  config, _, state, _, measured = seen
  norm = optax.tree.norm(gradients)
  gradients = optax.tree.scale(jnp.minimum(1, 0.05 / norm), gradients)
  adam = optax.tree.get(state.opt_state, 'ScaleByAdamState')
  statistics = jax.jit(merit_optax.merit_statistics(**_merit(config)))

  def expect(part) -> dict[str, float]:
    g, mu, nu, w = map(part, (gradients, adam.mu, adam.nu, state.params))
    found = statistics(g, optax.ScaleByAdamState(adam.count, mu, nu), w)
    by_key = {
      key: [v for k, v in found.items() if k.endswith('/' + key)]
      for key in _MERIT_KEYS
    }
    sizes = [x.size for x in jax.tree.leaves(w)]
    return {
      'trust_ratio_min': min(by_key['trust_ratio_min']),
      'trust_ratio_max': max(by_key['trust_ratio_max']),
      **{k: np.average(by_key[k], weights=sizes) for k in _SHARES},
    }

  smallest = measured['layers']['trust_ratio_min']
  assert len(set(smallest)) == 3
  found, expected = {}, {}
  for i in range(3):
    found[f'{i}'] = {k: measured['layers'][k][i] for k in _MERIT_KEYS}
    expected[f'{i}'] = expect(lambda x, i=i: _layer(x['blocks'], i))
    assert expected[f'{i}']['decided_by_row'] > 0
  for name, values in measured['others'].items():
    found[name] = {k: values[k] for k in _MERIT_KEYS}
    expected[name] = expect(lambda x, n=name: {n: x[n]})
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)


_TABLE = np.array([[1.0, -2.0], [0.5, 3.0], [-4.0, 0.25]])


class _Linear(Trainer):
  """A trainer whose gradients of a sequence are rows of a table."""

  def loss(self, params, tokens_BT):
    rows = jnp.asarray(_TABLE, jnp.float32)[tokens_BT[:, 0]]
    return jnp.mean(rows @ params['final_norm']['bias'][:2])


def test_the_noise_estimate_is_without_bias():
  shape, sizes = (1, 4, 17), {'batch_size': 4, 'micro_batch_size': 4}
  config = _config(optimizer='adamw', num_layers=1, **sizes)
  trainer = _trainer(config, _Linear)
  state, diagnostics = _state(trainer), _diagnostics(config, trainer)
  found = []
  # The mean over all batches that may be drawn.
  for rows in itertools.product(range(3), repeat=4):
    tokens = np.zeros(shape, np.int32)
    tokens[..., 0] = np.reshape(rows, shape[:2])
    measured = diagnostics(state, jnp.asarray(tokens))
    noise, scale = measured['gradient_noise'], measured['noise_scale_tokens']
    found.append((noise['trace'], noise['squared_norm']))
    if noise['squared_norm'] <= 0:
      assert math.isnan(scale)
      continue
    ratio = noise['trace'] / noise['squared_norm']
    assert scale == pytest.approx(ratio * config.model.context_length)
  trace, square = np.mean(found, axis=0)
  assert trace == pytest.approx(_TABLE.var(axis=0).sum(), rel=1e-4)
  assert square == pytest.approx(np.sum(_TABLE.mean(0) ** 2), rel=1e-3)


@pytest.mark.parametrize('optimizer', ['merit', 'merit-hidden', 'muon'])
def test_updates_are_those_of_the_step(optimizer: str):
  config = _config(optimizer=optimizer, num_layers=2)
  trainer = _trainer(config, _Linear)
  state, tokens = _state(trainer), jnp.asarray(_tokens() % 3)
  measured = _diagnostics(config, trainer)(state, tokens)
  new, _ = trainer.step(jax.tree.map(jnp.copy, state), tokens)

  def ratio(part: Callable[[Any], Any]) -> float:
    before, after = part(state.params), part(new.params)
    change = optax.tree.sub(after, before)
    return float(optax.tree.norm(change) / optax.tree.norm(before))

  layers = [ratio(lambda x, i=i: _layer(x['blocks'], i)) for i in range(2)]
  found = measured['layers']['update_to_weight']
  assert found == pytest.approx(layers, rel=1e-3)
  assert layers[0] != layers[1]
  for name, values in measured['others'].items():
    expected = ratio(lambda x, n=name: x[n])
    assert values['update_to_weight'] == pytest.approx(expected, rel=1e-3)
