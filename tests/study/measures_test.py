import dataclasses
import json
import sys

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import Trainer, TrainState
from examples.study import curvature, measures, preconditioned, rows

_VOCAB = 64


def _config(**changes):
  settings = dict(
    num_layers=1, num_heads=2, width=4, context_length=8, batch_size=4,
    micro_batch_size=2, steps=100, unroll=1, learning_rate=0.01,
  )  # fmt: skip
  return resolve(Config(**settings | changes))


def _trainer(config) -> Trainer:
  return Trainer(config, _VOCAB, make_mesh('', jax.devices()[:1]))


def _random(trainer):
  """Returns parameters none of which is zero."""
  params = trainer.init().params
  noise = optax.tree.random_like(jax.random.key(1), params)
  return jax.tree.map(lambda x, y: x + 0.3 * y, params, noise)


def _tokens(*allowed: int) -> Tokens:
  data = np.random.default_rng(0).choice(allowed, size=400).astype(np.uint16)
  return Tokens('', 800, 'x', data, data, None, _VOCAB, 1.0)


def _dense(trainer, params, batch_ABT):
  """Returns the Hessian as a matrix, by another loss and reverse mode."""
  flat, unravel = ravel_pytree(params)

  def loss(flat):
    tokens_BT = batch_ABT.reshape(-1, batch_ABT.shape[-1])
    logits_BTV = trainer.model(unravel(flat))(tokens_BT[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV, tokens_BT[:, 1:]
    )
    return losses.mean()

  return np.asarray(jax.jit(jax.jacrev(jax.grad(loss)))(flat), float)


def test_eigenvalues_and_trace_are_those_of_the_dense_hessian(monkeypatch):
  monkeypatch.setattr(curvature, 'SEQUENCES', 8)
  monkeypatch.setattr(curvature, 'TRACE_SAMPLES', 400)
  config, tokens = _config(optimizer='adamw'), _tokens(*range(_VOCAB))
  trainer = _trainer(config)
  state = TrainState(_random(trainer), None)
  found = curvature.measure(trainer, config, tokens, state)
  hessian = _dense(
    trainer, state.params, curvature.sample(trainer, config, tokens)
  )
  size = np.abs(np.asarray(ravel_pytree(state.params)[0], float))
  relative = size[:, None] * hessian * size
  assert found['top_eigenvalue'] == pytest.approx(
    np.linalg.eigvalsh(hessian)[-1], rel=1e-3
  )
  assert found['relative_eigenvalue'] == pytest.approx(
    np.linalg.eigvalsh(relative)[-1], rel=1e-3
  )
  assert found['residual'] < 0.05
  assert abs(found['trace'] - np.trace(hessian)) < 4 * found['trace_error']
  # What deviates are the elements off the diagonal.
  off = np.sum(hessian**2) - np.sum(np.diag(hessian) ** 2)
  expected = np.sqrt(2 * off / curvature.TRACE_SAMPLES)
  assert found['trace_error'] == pytest.approx(expected, rel=0.2)


def test_the_top_eigenvalue_is_not_the_largest_in_size():
  diagonal = {'a': jnp.array([-9.0, 3.0, 1.0]), 'b': jnp.array([[5.0, 2.0]])}
  product = curvature.times(diagonal)
  value, residual = curvature.top_eigenvalue(product, diagonal)
  assert value == pytest.approx(5, rel=1e-5)
  assert residual < 1e-5
  trace, error = curvature.estimate_trace(product, diagonal)
  # Signs make it exact for a diagonal matrix.
  assert (float(trace), float(error)) == pytest.approx((2, 0), abs=1e-5)


def test_an_eigenvalue_is_within_the_residual(monkeypatch):
  monkeypatch.setattr(curvature, 'LANCZOS_STEPS', 5)
  diagonal = jnp.linspace(-1, 1, 40) ** 3
  product = curvature.times(diagonal)
  value, residual = curvature.top_eigenvalue(product, diagonal)
  assert 1e-3 < residual < 0.5
  assert np.abs(diagonal - value).min() <= residual * value


@pytest.mark.slow
def test_the_relative_eigenvalue_ignores_how_weights_are_scaled(monkeypatch):
  monkeypatch.setattr(curvature, 'SEQUENCES', 8)
  config, tokens = _config(optimizer='adamw'), _tokens(*range(_VOCAB))
  trainer = _trainer(config)
  params = _random(trainer)
  # The same function: the norm gives twice as much, and the matrix half.
  scaled = jax.tree.map(lambda x: x, params)
  block = scaled['blocks']
  block['mlp_norm'] = jax.tree.map(lambda x: 2 * x, block['mlp_norm'])
  block['mlp']['up']['kernel'] /= 2
  found, other = (
    curvature.measure(trainer, config, tokens, TrainState(x, None))
    for x in (params, scaled)
  )
  assert other['relative_eigenvalue'] == pytest.approx(
    found['relative_eigenvalue'], rel=1e-3
  )
  assert other['trace'] != pytest.approx(found['trace'], rel=1e-2)


def _step(optimizer):
  """Returns the state of an optimizer after a step, and gradients."""
  trainer = _trainer(_config(optimizer=optimizer, weight_decay=0.0))
  state = trainer.init()
  gradients = optax.tree.random_like(jax.random.key(2), state.params)
  _, opt_state = trainer.optimizer.update(
    gradients, state.opt_state, state.params
  )
  return opt_state, gradients


def test_adamw_divides_by_the_root_of_its_second_moment():
  opt_state, gradients = _step('adamw')
  root = preconditioned.make_root(opt_state)
  second = optax.tree.get(opt_state, 'nu')
  expected = jax.tree.map(
    lambda g, v: g / (jnp.sqrt(v) + 1e-8), gradients, second
  )
  for x, y in zip(
    *map(jax.tree.leaves, (root(root(gradients)), expected)), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4)


@pytest.mark.parametrize('name', ['up', 'down'])
def test_muon_makes_its_momentum_orthogonal(name):
  opt_state, gradients = _step('muon')
  root = preconditioned.make_root(opt_state)
  # After one step the momentum has the direction of the gradient.
  step = root(root(gradients))['blocks']['mlp'][name]['kernel'][0]
  gradient = gradients['blocks']['mlp'][name]['kernel'][0]
  left, _, right = np.linalg.svd(gradient, full_matrices=False)
  cosine = np.vdot(step, left @ right) / np.linalg.norm(step) / 2
  assert cosine == pytest.approx(1, abs=1e-4)
  singular = np.linalg.svd(step, compute_uv=False)
  np.testing.assert_allclose(singular, singular[0], rtol=1e-3)


@pytest.mark.slow
def test_the_preconditioned_eigenvalue_is_that_of_the_dense_matrix(
  monkeypatch,
):
  monkeypatch.setattr(curvature, 'SEQUENCES', 8)
  config = _config(optimizer='muon')
  tokens, trainer = _tokens(*range(_VOCAB)), _trainer(config)
  opt_state, _ = _step('muon')
  state = TrainState(_random(trainer), opt_state)
  found = preconditioned.measure(trainer, config, tokens, state)
  hessian = _dense(
    trainer, state.params, curvature.sample(trainer, config, tokens)
  )
  root = preconditioned.make_root(opt_state)
  flat, unravel = ravel_pytree(state.params)
  columns = jax.lax.map(
    lambda x: ravel_pytree(root(unravel(x)))[0], jnp.eye(flat.size)
  )
  matrix = np.asarray(columns, float)
  np.testing.assert_allclose(matrix, matrix.T, rtol=1e-3, atol=1e-5)
  assert found['preconditioned_eigenvalue'] == pytest.approx(
    np.linalg.eigvalsh(matrix @ hessian @ matrix)[-1], rel=1e-2
  )
  assert found['top_eigenvalue'] > 0


def test_rows_are_grouped_by_the_steps_that_saw_them():
  config = _config(optimizer='adamw', untied_head=True, weight_decay=0.0)
  data = np.full(800, 5, np.uint16)
  data[::2] = 6
  data[200] = 7
  tokens = dataclasses.replace(_tokens(0), train=data)
  trainer = _trainer(config)
  state = trainer.init()
  params = jax.tree.map(lambda x: x, state.params)
  embedding = params['token_embedding']['embedding']
  params['token_embedding']['embedding'] = embedding.at[5:7].mul(3)
  found = rows.measure(trainer, config, tokens, TrainState(params, None))
  json.dumps(found, allow_nan=False)
  groups = found['embedding']
  seen = rows.steps_seen(trainer, config, tokens)['embedding']
  assert list(seen[5:7]) == [100, 100]
  assert 0 < seen[7] < 10
  assert seen.sum() == 200 + seen[7]
  assert groups['common']['growth'] == [3, 3, 3]
  assert groups['common']['moved'] == 2
  assert groups['rare']['rows'] == 1
  assert groups['never']['growth'] == [1, 1, 1]
  assert sum(x['rows'] for x in groups.values()) == _VOCAB
  assert found['head']['common']['growth'] == [1, 1, 1]


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matfree', None)
  monkeypatch.delitem(sys.modules, 'examples.study.curvature')
  with pytest.raises(UsageError, match='pip install matfree'):
    measures.find('curvature')
