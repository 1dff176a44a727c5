import functools
import math

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices.sharding import make_mesh, path_name
from examples.gpt2.optim.optimizers import (
  OTHERS_B1,
  decay_mask,
  dimension_numbers,
  hidden_or_others,
  is_matrix,
  make_optimizer,
  make_schedule,
  merit_settings,
  muon_dimension_numbers,
  with_clips,
)
from examples.gpt2.presets import OPTIMIZERS, resolve
from examples.gpt2.run.step import Trainer
import merit_optax

_LAYERS = 3
_ALL = pytest.mark.parametrize('optimizer', OPTIMIZERS)


def _config(**settings) -> Config:
  defaults = dict(
    num_layers=_LAYERS,
    num_heads=2,
    width=32,
    context_length=16,
    steps=10,
    warmup_share=0.0,
    # A norm that no gradient has: the clip has tests of its own.
    max_gradient_norm=1e6,
  )
  return resolve(Config(**defaults | settings))


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


def _model_shapes(**settings):
  trainer = Trainer(_config(**settings), 64, make_mesh('', jax.devices()[:1]))
  return jax.tree.map(lambda x: x.shape, trainer.shapes.params)


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


def _named(tree) -> dict[str, jax.Array]:
  return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _difference(a, b) -> dict[str, float]:
  return {
    name: float(jnp.abs(x - _named(b)[name]).max())
    for name, x in _named(a).items()
  }


@hypothesis.given(
  steps=st.sampled_from([1, 2, 7, 100]),
  share=st.floats(0, 1),
  rate=st.floats(1e-6, 10),
)
@hypothesis.settings(max_examples=15)
def test_the_schedule_warms_up_and_ends_near_zero(
  steps: int, share: float, rate: float
):
  config = resolve(Config(steps=steps, warmup_share=share, learning_rate=rate))
  rates = np.asarray(jax.vmap(make_schedule(config))(jnp.arange(steps)))
  warmup = round(share * steps)
  assert (rates > 0).all()
  assert rates.max() <= rate * (1 + 1e-5)
  rising, falling = rates[: warmup + 1], rates[warmup:]
  # One step of warm-up has the whole rate already.
  assert warmup == 1 or (np.diff(rising) > 0).all()
  assert (np.diff(falling) < 0).all()
  if warmup < steps:
    assert rates[warmup] == pytest.approx(rate, rel=1e-5)
    share_left = np.arange(steps - warmup) / (steps - warmup)
    cosine = rate * (1 + np.cos(np.pi * share_left)) / 2
    np.testing.assert_allclose(falling, cosine, rtol=1e-3, atol=1e-6 * rate)


def _rates(**settings) -> np.ndarray:
  config = resolve(Config(learning_rate=2.0, **settings))
  schedule = make_schedule(config)
  return np.asarray(jax.vmap(schedule)(jnp.arange(config.steps)))


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (dict(schedule='linear'), [2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]),
    (dict(schedule='linear', min_rate=0.5), np.linspace(2, 1.125, 8)),
    (
      dict(schedule='cosine', min_rate=0.5),
      1.5 + 0.5 * np.cos(np.pi * np.arange(8) / 8),
    ),
    (dict(schedule='wsd'), [2, 2, 2, 2, 2, 2, 2, 1]),
    (dict(schedule='wsd', decay_steps=0), [2] * 8),
    (dict(schedule='wsd', decay_steps=4), [2, 2, 2, 2, 2, 1.5, 1, 0.5]),
    (
      dict(schedule='wsd', decay_steps=4, decay_shape='1-sqrt', min_rate=0.2),
      [2] * 4 + [2 * (1 - 0.8 * np.sqrt(i / 4)) for i in range(4)],
    ),
    (
      dict(schedule='inverse-sqrt', min_rate=0.5),
      [max(2 * np.sqrt(2 / (2 + i)), 1) for i in range(8)],
    ),
  ],
)
def test_schedules_after_the_warmup(settings: dict, expected):
  rates = _rates(steps=10, warmup_steps=2, **settings)
  np.testing.assert_allclose(rates[:2], [1, 1.5], rtol=1e-6)
  np.testing.assert_allclose(rates[2:], expected, rtol=1e-5)


@pytest.mark.parametrize(
  'settings',
  [dict(schedule='wsd', decay_steps=5), dict(schedule='inverse-sqrt')],
)
def test_what_can_be_made_longer_does_not_depend_on_its_end(settings: dict):
  short, long = (_rates(steps=n, warmup_steps=3, **settings) for n in (20, 40))
  np.testing.assert_array_equal(short[:15], long[:15])


@_ALL
def test_settings_reach_the_optimizer(optimizer: str):
  # A parameter of Muon's, and one of its Adam.
  names = ('token_embedding', 'blocks')
  shapes = {name: _SHAPES[name] for name in names}
  shapes['blocks'] = {'mlp': _SHAPES['blocks']['mlp']}
  params, gradients = _trees(shapes)
  base = dict(optimizer=optimizer, learning_rate=1e-3, weight_decay=0.0)

  def updates(**settings):
    config = _config(**base | settings)
    return _updates(make_optimizer(config), params, gradients[:2])

  expected = updates()
  faster = updates(learning_rate=2e-3)
  for one, other in zip(
    jax.tree.leaves(faster[0]), jax.tree.leaves(expected[0]), strict=True
  ):
    # A norm that is kept bends a step a little.
    rtol, atol = (5e-3, 1e-6) if optimizer == 'muon-hyperball' else (1e-4, 1e-8)
    np.testing.assert_allclose(one, 2 * other, rtol=rtol, atol=atol)
  for settings in ({'b1': 0.5}, {'b2': 0.5}):
    changed = _difference(updates(**settings)[1], expected[1])
    assert max(changed.values()) > 1e-6, settings


@_ALL
@pytest.mark.parametrize('decay', ['all', 'matrices'])
def test_weight_decay_leaves_alone_what_it_shall(optimizer: str, decay: str):
  params, gradients = _trees()

  def update(weight_decay: float):
    config = _config(
      optimizer=optimizer,
      learning_rate=1e-2,
      weight_decay=weight_decay,
      decay=decay,
    )
    return _updates(make_optimizer(config), params, gradients[:1])[0]

  decayed, plain = update(0.5), update(0.0)
  for name, changed in _difference(decayed, plain).items():
    decays = decay == 'all' or name.endswith(('kernel', 'embedding'))
    # The norm would undo it.
    decays &= optimizer != 'muon-hyperball' or not name.endswith('kernel')
    assert (changed > 1e-5) == decays, name
    assert decays or changed == 0, name
    if decays and optimizer in ('adamw', 'lion', 'muon'):
      np.testing.assert_allclose(
        _named(decayed)[name] - _named(plain)[name],
        -1e-2 * 0.5 * _named(params)[name],
        atol=1e-7,
      )


def test_matrices_are_kernels_and_embeddings():
  params, _ = _trees(_model_shapes(architecture='llama', qk_norm=True))
  found = {name for name, x in _named(is_matrix(params)).items() if x}
  assert found == {
    'token_embedding.embedding',
    *(
      f'blocks.{name}.kernel'
      for name in (
        'attention.qkv', 'attention.out', 'mlp.gate', 'mlp.up', 'mlp.down',
      )
    ),
  }  # fmt: skip


def test_trust_ratios_can_be_for_matrices_only():
  params, gradients = _trees()
  settings = dict(learning_rate=0.5, weight_decay=0.1)
  found, everything = (
    _updates(
      make_optimizer(_config(trust_ratio=value, **settings)),
      params,
      gradients[:1],
    )[0]
    for value in ('matrices', 'all')
  )
  adam = optax.chain(
    merit_optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-6),
    optax.add_decayed_weights(0.1),
    merit_optax.elementwise_clip(1.0),
    optax.scale_by_learning_rate(0.5),
  )
  plain = _named(_updates(adam, params, gradients[:1])[0])
  for name, x in _named(found).items():
    if name.endswith(('kernel', 'embedding')):
      np.testing.assert_array_equal(x, _named(everything)[name])
    else:
      np.testing.assert_allclose(x, plain[name], rtol=1e-5, atol=1e-7)
      assert jnp.abs(x - _named(everything)[name]).max() > 1e-3


def _matrices(kernel: jax.Array, qkv: str) -> dict[str, jax.Array]:
  """Returns the matrices of a kernel, (layers, D, groups, X, K), by name."""
  found = {}
  for i, layer in enumerate(kernel):
    rows = len(layer)
    if qkv == 'fused':
      found[f'{i}'] = layer.reshape(rows, -1)
      continue
    for part in range(layer.shape[2]):
      if qkv == 'split':
        found[f'{i}.{part}'] = layer[:, :, part].reshape(rows, -1)
        continue
      for head in range(layer.shape[1]):
        found[f'{i}.{part}.{head}'] = layer[:, head, part]
  return found


@pytest.mark.parametrize('qkv', ['fused', 'split', 'heads'])
@pytest.mark.parametrize('group', [1, 2])
def test_qkv_get_the_updates_of_kernels_of_their_own(qkv: str, group: int):
  shapes = dict(_SHAPES['blocks']['attention']['qkv'])
  if group > 1:  # Of llama, without a bias.
    *sizes, _, features = shapes['kernel']
    shapes = {'kernel': (*sizes, group + 2, features)}
  params, gradients = _trees({'blocks': {'attention': {'qkv': shapes}}})
  config = _config(qkv=qkv)
  kept = [
    _named(x)['blocks.attention.qkv.kernel']
    # One operation at a time: XLA rounds fused ones as it likes.
    for x in _updates(make_optimizer(config), params, gradients, compiled=False)
  ]
  apart = [
    _matrices(_named(x)['blocks.attention.qkv.kernel'], qkv)
    for x in (params, *gradients)
  ]
  counts = {'fused': 1, 'split': group + 2, 'heads': 2 * (group + 2)}
  assert len(apart[0]) == _LAYERS * counts[qkv]
  alone = merit_optax.merit(make_schedule(config), weight_decay=0.01)
  for found, expected in zip(
    kept, _updates(alone, apart[0], apart[1:], compiled=False), strict=True
  ):
    for name, x in _matrices(found, qkv).items():
      np.testing.assert_array_equal(x, expected[name])


@pytest.mark.parametrize(
  'settings',
  [
    None,
    pytest.param({'architecture': 'gpt2'}, marks=pytest.mark.slow),
    pytest.param(
      {'architecture': 'llama', 'untied_head': True, 'qk_norm': True},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_stacked_layers_get_the_updates_of_separate_ones(settings):
  params, gradients = _trees(_model_shapes(**settings) if settings else _SHAPES)
  config = _config()

  def separate(tree) -> dict[str, jax.Array]:
    found = {}
    for name, x in _named(tree).items():
      for i, one in enumerate(x if name.startswith('blocks.') else [x]):
        # Query, key and value as one matrix, and their bias as one vector.
        rows = (len(one), -1) if name.endswith('kernel') else (-1,)
        shape = rows if '.qkv.' in name else one.shape
        found[f'{name}[{i}]'] = one.reshape(shape)
    return found

  alone = merit_optax.merit(make_schedule(config), weight_decay=0.01)
  trees = [separate(x) for x in (params, *gradients)]
  for found, expected in zip(
    _updates(make_optimizer(config), params, gradients[:2], compiled=False),
    _updates(alone, trees[0], trees[1:3], compiled=False),
    strict=True,
  ):
    for name, x in separate(found).items():
      np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_dimension_numbers_fit_layers_that_are_not_stacked():
  params, _ = _trees()
  layer = jax.tree.map(lambda x: x[0], params['blocks'])
  # A layer alone, as diagnostics see it, and layers beside each other.
  for tree, found in (
    (layer, lambda specs: specs),
    ({'blocks': {'0': layer, '1': layer}}, lambda specs: specs['blocks']['1']),
  ):
    specs = dimension_numbers(tree, 'heads')
    assert merit_optax.describe(tree, weight_dimension_numbers=specs)
    one = found(specs)
    kernel = one['attention']['qkv']['kernel']
    assert (kernel.reduction_axis, kernel.output_axis) == ((-4,), (-1,))
    down = one['mlp']['down']['kernel']
    assert (down.reduction_axis, down.output_axis) == ((0,), (1,))


def test_muon_has_moments_of_hidden_matrices_only():
  params, _ = _trees(_model_shapes(untied_head=True))
  assert 'head' in params
  state = make_optimizer(_config(optimizer='muon')).init(params)
  momentum = _named(optax.tree.get(state, 'MuonState').mu)
  hidden = {
    f'blocks.{name}.kernel'
    for name in ('attention.qkv', 'attention.out', 'mlp.up', 'mlp.down')
  }
  assert set(momentum) == hidden
  adam = optax.tree.get(state, 'ScaleByAdamState')
  assert set(_named(adam.mu)) == set(_named(params)) - hidden


@pytest.mark.parametrize('qkv', ['fused', 'split', 'heads'])
def test_muon_makes_each_matrix_orthogonal(qkv: str):
  params, gradients = _trees()
  config = _config(
    optimizer='muon', qkv=qkv, learning_rate=1.0, weight_decay=0.0
  )
  update = _updates(make_optimizer(config), params, gradients[:1])[0]
  kernel = _named(update)['blocks.attention.qkv.kernel']
  for matrix in _matrices(kernel, qkv).values():
    values = jnp.linalg.svd(matrix, compute_uv=False)
    # A root mean square of 0.2, as Adam's updates have.
    values /= 0.2 * math.sqrt(max(matrix.shape))
    assert jnp.median(values) > 0.65
    assert values.max() < 1.3


def test_adam_beside_muon_has_a_rate_of_its_own():
  params, gradients = _trees()
  one, quarter = (
    _named(
      _updates(
        make_optimizer(
          _config(optimizer='muon', adam_rate=rate, weight_decay=0.0)
        ),
        params,
        gradients[:1],
      )[0]
    )
    for rate in (None, 0.25)
  )
  for name, update in one.items():
    factor = 1.0 if name.endswith('.kernel') else 0.25
    np.testing.assert_allclose(quarter[name], factor * update, rtol=1e-6)


@pytest.mark.parametrize('qkv', ['fused', 'split', 'heads'])
def test_hyperball_keeps_the_norms_of_hidden_matrices(qkv: str):
  params, gradients = _trees()
  config = _config(optimizer='muon-hyperball', qkv=qkv, learning_rate=0.5)
  updates = _updates(make_optimizer(config), params, gradients[:1])[0]
  before, after = (
    _named(x) for x in (params, jax.jit(optax.apply_updates)(params, updates))
  )
  kernel = 'blocks.attention.qkv.kernel'
  old, new = (_matrices(x[kernel], qkv) for x in (before, after))
  for name, matrix in old.items():
    size = jnp.linalg.norm(matrix)
    np.testing.assert_allclose(jnp.linalg.norm(new[name]), size, rtol=1e-5)
    assert jnp.linalg.norm(new[name] - matrix) > 0.3 * size
  embedding = 'token_embedding.embedding'
  sizes = [jnp.linalg.norm(x[embedding]) for x in (before, after)]
  assert abs(sizes[0] - sizes[1]) > 1e-3 * sizes[0]


def _former(config: Config) -> optax.GradientTransformation:
  """Returns what made muon and muon-hyperball before merit_optax had both."""
  rate = make_schedule(config)
  adam_rate = 1.0 if config.adam_rate is None else config.adam_rate
  specs = functools.partial(dimension_numbers, qkv=config.qkv)
  if config.optimizer == 'muon':
    muon = optax.contrib.muon(
      rate,
      adam_learning_rate=lambda step: adam_rate * rate(step),
      beta=config.b1,
      adam_b2=config.b2,
      muon_weight_dimension_numbers=functools.partial(
        muon_dimension_numbers, qkv=config.qkv
      ),
      consistent_rms=0.2,
    )
    decay = optax.add_decayed_weights(
      lambda step: -config.weight_decay * rate(step), decay_mask(config)
    )
    return with_clips(optax.chain(muon, decay), config)
  hidden = optax.chain(
    optax.contrib.scale_by_muon(beta=config.b1, weight_dimension_numbers=specs),
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=specs),
    optax.scale_by_learning_rate(rate),
    merit_optax.keep_matrix_norms(weight_dimension_numbers=specs),
  )
  others = optax.chain(
    merit_optax.scale_by_adam(OTHERS_B1, config.b2),
    optax.add_decayed_weights(config.weight_decay, decay_mask(config)),
    optax.scale_by_learning_rate(lambda step: adam_rate * rate(step)),
  )
  labels = functools.partial(hidden_or_others, qkv=config.qkv)
  optimizer = optax.partition({'hidden': hidden, 'others': others}, labels)
  return with_clips(optimizer, config)


_MUONS = pytest.mark.parametrize('optimizer', ['muon', 'muon-hyperball'])


@_MUONS
@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'qkv': 'split', 'adam_rate': 0.25, 'weight_decay': 0.3},
    {'qkv': 'heads', 'decay': 'matrices', 'weight_decay': 0.3},
    {'qk_clip': 100.0, 'b1': 0.5, 'warmup_share': 0.5},
  ],
)
def test_muon_is_what_it_was_when_optax_made_it(optimizer: str, settings: dict):
  params, gradients = _trees()
  config = _config(optimizer=optimizer, **settings)
  made, former = make_optimizer(config), _former(config)
  # So that checkpoints from before can be read.
  states = [jax.eval_shape(x.init, params) for x in (made, former)]
  chex.assert_trees_all_equal_structs(*states)
  chex.assert_trees_all_equal_shapes_and_dtypes(*states)
  for found, expected in zip(
    _updates(made, params, gradients),
    _updates(former, params, gradients),
    strict=True,
  ):
    for name, x in _named(expected).items():
      np.testing.assert_allclose(
        _named(found)[name],
        x,
        rtol=0,
        atol=1e-5 * jnp.abs(x).max(),
        err_msg=name,
      )


@_MUONS
def test_products_of_muon_can_be_in_bfloat16(optimizer: str):
  params, gradients = _trees()

  def updates(**settings):
    config = _config(optimizer=optimizer, **settings)
    return _updates(make_optimizer(config), params, gradients[:2])[1]

  usual, rounded = updates(), updates(ns_dtype='bfloat16')
  chex.assert_trees_all_equal(
    updates(dtype='bfloat16', ns_dtype='float32'), usual
  )
  chex.assert_trees_all_equal(updates(dtype='bfloat16'), rounded)
  for name, x in _named(usual).items():
    change = jnp.linalg.norm(_named(rounded)[name] - x) / jnp.linalg.norm(x)
    if name.endswith('.kernel'):
      assert 1e-3 < change < 0.05, name
    else:
      assert change == 0, name


def test_an_infinite_clip_threshold_is_no_clip():
  params, gradients = _trees()
  # A smaller bound of the norms makes ratios that the clip would cut.
  settings = dict(learning_rate=1.0, weight_decay=0.0, min_norm=5.0)
  assert (
    merit_settings(_config(clip_threshold=math.inf))['clip_threshold'] is None
  )
  params = jax.tree.map(lambda x: 100 * x, params)
  clipped, free = (
    _updates(
      make_optimizer(_config(clip_threshold=threshold, **settings)),
      params,
      gradients[:1],
    )[0]
    for threshold in (1.0, math.inf)
  )
  largest = [
    max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))
    for tree in (clipped, free)
  ]
  assert largest[0] == 1.0
  assert largest[1] > 2.0
  np.testing.assert_allclose(
    _named(clipped)['blocks.mlp_norm.scale'],
    jnp.clip(_named(free)['blocks.mlp_norm.scale'], -1, 1),
    rtol=1e-6,
  )


@_ALL
def test_the_gradient_is_clipped_to_its_global_norm(optimizer: str):
  params, gradients = _trees({'blocks': {'mlp': _SHAPES['blocks']['mlp']}})
  found, expected = (
    _updates(
      make_optimizer(_config(optimizer=optimizer, max_gradient_norm=norm)),
      params,
      [optax.tree.scale(scale, g) for g in gradients[:2]],
    )
    for norm, scale in ((0.01, 1.0), (0.01, 1000.0))
  )
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-5)
