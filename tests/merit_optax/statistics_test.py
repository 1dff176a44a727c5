"""`merit_statistics` against a NumPy oracle and against the optimizer."""

import functools
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, oracle_ratios, run

_Spec = optax.contrib.MuonDimensionNumbers
_SHARES = ('decided_by_weight', 'decided_by_row', 'decided_by_column')
_RATIOS = ('trust_ratio_min', 'trust_ratio_median', 'trust_ratio_max')
_NAMES = {*_RATIOS, *_SHARES, 'fallback', 'clipped', 'update_to_weight'}


def _tree(seed, scale=1.0):
  return {
    'w': scale * normal(seed, (4, 5)),
    'blocks': [{'w': scale * normal(seed + 1, (4, 5))}],
    'b': scale * normal(seed + 2, (5,)),
  }


def _watch(params, gradients, **settings):
  """Returns the statistics before the first step.

  Without jit, which would compile them for each setting: like shapes share.
  """
  settings = {'learning_rate': 0.1} | settings
  state = merit_optax.merit(**settings).init(params)
  return merit_optax.merit_statistics(**settings)(gradients, state, params)


def _watch_matrix(w, g, **settings):
  watched = _watch({'w': w}, {'w': g}, **settings)
  return {key.removeprefix('w/'): value for key, value in watched.items()}


def _oracle(w, g, rate, decay=0.0, clip=1.0):
  """Returns the statistics of a matrix's first step, in float64."""
  w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
  z = 0.1 * g / (np.sqrt(0.05 * g * g) + 1e-6) + decay * w
  ratios = [*oracle_ratios(z, w).values()]
  largest = np.max(ratios, axis=0)
  void = np.isinf(largest)
  ratio = np.where(void, 1, largest)
  first = np.where(void, -1, np.argmax(ratios, axis=0))
  update = ratio * z
  moved = rate * np.max(np.abs(np.clip(update, -clip, clip)))
  return {
    'trust_ratio_min': np.min(ratio),
    'trust_ratio_median': np.median(ratio),
    'trust_ratio_max': np.max(ratio),
    **{name: np.mean(first == i) for i, name in enumerate(_SHARES)},
    'fallback': np.mean(void),
    'clipped': np.mean(np.abs(update) > clip),
    'update_to_weight': moved / np.max(np.abs(w)),
  }


def _assert_moves(watched, updates, params):
  """Checks update_to_weight against what the optimizer really did."""
  params = jax.tree.leaves(params)
  for (path, update), param in zip(
    jax.tree.leaves_with_path(updates), params, strict=True
  ):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    expected = np.max(np.abs(update)) / np.max(np.abs(param))
    np.testing.assert_allclose(
      watched[f'{name}/update_to_weight'], expected, rtol=1e-5
    )


# Against the oracle.

_W, _G = normal(0, (4, 5)), normal(10, (4, 5))
# Of the size of eps, so that Adam's update is not a sign, with its ties.
_SMALL_G = _G * np.array([[1e-6, 3e-6, 1e-7, 1e-8]]).T


@pytest.mark.parametrize(
  'w, g, decay, clip, found',
  [
    (_W.at[0].multiply(9), _SMALL_G, 0.1, 0.5, ['clipped']),
    (_W.at[0].multiply(9), _SMALL_G, 0.1, None, []),
    # u is 0.1 / sqrt(0.05) nearly everywhere, less where the gradient is near
    # eps: in the first row the row decides, in the last column the column.
    (
      jnp.ones((4, 5)).at[0, 0].set(4),
      jnp.ones((4, 5)).at[0].set(1e-6).at[:, -1].set(1e-7),
      *(0.0, 1.0, _SHARES),
    ),
    # A dead row and a dead column.
    (3 * _W.at[1].set(0), _G.at[:, 2].set(0), 0.0, 1.0, ['fallback']),
  ],
)
def test_a_matrix_agrees_with_the_oracle(w, g, decay, clip, found):
  watched = _watch_matrix(w, g, weight_decay=decay, clip_threshold=clip)
  expected = _oracle(w, g, 0.1, decay, np.inf if clip is None else clip)
  assert watched.keys() == expected.keys() == _NAMES
  for name, value in expected.items():
    np.testing.assert_allclose(watched[name], value, rtol=1e-5, err_msg=name)
  shares = sum(watched[name] for name in (*_SHARES, 'fallback'))
  assert shares == pytest.approx(1)
  assert all(0 < expected[name] < 1 for name in found)


def test_only_the_ratios_in_use_decide():
  watched = _watch_matrix(_W, _G, ratios=('row',))
  assert [watched[name] for name in _SHARES] == [0, 1, 0]


def test_the_median_of_an_even_number_lies_between_two():
  w = jnp.array([[1.0, 1.0], [4.0, 4.0]])
  watched = _watch_matrix(w, jnp.ones((2, 2)), ratios=('row',))
  least, median, largest = (watched[name] for name in _RATIOS)
  assert median == (least + largest) / 2 > least


@pytest.mark.parametrize('shape', [(4, 5), (5,)])
def test_of_equal_ratios_the_first_counts(shape):
  watched = _watch_matrix(jnp.ones(shape), jnp.ones(shape))
  assert [watched[name] for name in _SHARES] == [1, 0, 0]


# Against the optimizer.

_OF_ADAM = ('b1', 'b2', 'eps', 'eps_root', 'bias_correction')


@pytest.mark.parametrize(
  'settings',
  [
    {'b1': 0.5, 'b2': 0.8, 'eps': 0.1, 'eps_root': 0.2},
    {
      'bias_correction': True,
      'learning_rate': optax.linear_schedule(0.1, 0.3, 5),
    },
    {'ratios': ('row', 'column'), 'clip_threshold': 0.3, 'min_norm': 0.5},
    {'weight_decay': lambda count: 0.5 * count},
    {
      'mask': lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
      'trust_ratio_mask': {'w': False, 'blocks': True, 'b': True},
    },
    {'weight_dimension_numbers': _Spec((), (0,))},
  ],
)
def test_moves_and_ratios_are_those_of_the_optimizer(settings):
  settings = {'learning_rate': 0.1, 'weight_decay': 0.3} | settings
  optimizer = merit_optax.merit(**settings)
  statistics = merit_optax.merit_statistics(**settings)
  # max|Δw| hardly depends on the decay, which the ratio undoes: look at ratios.
  ascent = {'learning_rate': -1.0, 'clip_threshold': None}
  scaled = merit_optax.merit(**settings | ascent)
  direction = optax.chain(
    merit_optax.scale_by_adam(
      **{name: settings[name] for name in _OF_ADAM if name in settings}
    ),
    optax.add_decayed_weights(settings['weight_decay'], settings.get('mask')),
  )
  params = _tree(0, scale=2.0)
  optimizers = optimizer, scaled, direction
  states = [x.init(params) for x in optimizers]
  for seed in (10, 20):
    watched = statistics(_tree(seed), states[0], params)
    steps = [
      x.update(_tree(seed), state, params)
      for x, state in zip(optimizers, states, strict=True)
    ]
    (updates, scaled_z, z), states = zip(*steps, strict=True)
    _assert_moves(watched, updates, params)
    for name in ('w', 'b'):
      ratio = scaled_z[name] / z[name]
      np.testing.assert_allclose(
        [watched[f'{name}/{statistic}'] for statistic in _RATIOS],
        [np.min(ratio), np.median(ratio), np.max(ratio)],
        rtol=1e-4,
      )
    params = optax.apply_updates(params, updates)


def test_masked_parameters_have_no_ratios():
  mask = {'w': False, 'blocks': True, 'b': True}
  watched = _watch(
    _tree(0),
    _tree(9),
    trust_ratio_mask=mask,
    # Nor does it need a spec.
    weight_dimension_numbers={'blocks': _Spec(), 'b': None},
  )
  names = (*_SHARES, 'fallback', 'clipped')
  assert [watched[f'w/{name}'] for name in names] == [0] * 5


# Where the state comes from.


def _assert_follows(optimizer, statistics, state):
  """Checks update_to_weight in two steps; returns all of the first."""
  params, found = _tree(0), []
  for seed in (10, 20):
    found.append(statistics(_tree(seed), state, params))
    updates, state = optimizer.update(_tree(seed), state, params)
    _assert_moves(found[-1], updates, params)
    params = optax.apply_updates(params, updates)
  return found[0]


_injected = optax.inject_hyperparams(merit_optax.merit)


def test_a_rate_changed_in_the_state():
  optimizer = _injected(learning_rate=0.05, weight_decay=0.1, min_norm=0.0)
  state = optimizer.init(_tree(0))
  state.hyperparams['learning_rate'] = jnp.array(0.25)
  state.hyperparams['min_norm'] = jnp.array(5.0)
  statistics = merit_optax.merit_statistics(0.05, weight_decay=0.1)
  _assert_follows(optimizer, statistics, state)


@pytest.mark.parametrize('build', [merit_optax.merit, _injected])
def test_schedules_are_read_at_their_own_counts(build):
  optimizer, statistics = (
    function(
      learning_rate=optax.linear_schedule(0.1, 0.0, 10),
      weight_decay=optax.linear_schedule(2.0, 0.0, 10),
    )
    for function in (build, merit_optax.merit_statistics)
  )

  def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)

  # After taking over from AdamW, whose count goes on.
  state = jax.tree.map(
    lambda x: x._replace(count=jnp.int32(500)) if is_adam(x) else x,
    optimizer.init(_tree(0)),
    is_leaf=is_adam,
  )
  first = _assert_follows(optimizer, statistics, state)
  # The decay, which the ratio hides from the size of the step.
  expected = _watch(_tree(0), _tree(10), weight_decay=2.0)
  name = 'w/trust_ratio_median'
  np.testing.assert_allclose(first[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize(
  'build, other, num_adams',
  [(merit_optax.merit, optax.sgd(0.1), 1), (_injected, _injected(0.3), 2)],
)
def test_a_partition(build, other, num_adams):
  params, gradients = _tree(0), _tree(10)
  both = merit_optax.partition_hidden(
    build(learning_rate=0.1), other, hidden='w'
  )
  state = both.init(params)
  statistics = merit_optax.merit_statistics(0.1)
  if num_adams == 2:
    with pytest.raises(ValueError, match='found 2') as error:
      statistics(gradients, state, params)
    (part,) = re.findall(r"state\.inner_states\['(\w+)'\]", str(error.value))
    state = state.inner_states[part]
  expected = _watch(params, gradients)
  chex.assert_trees_all_close(
    statistics(gradients, state, params),
    {k: v for k, v in expected.items() if not k.startswith('b/')},
  )


def test_a_state_without_adam_is_refused():
  params = _tree(0)
  with pytest.raises(ValueError, match='ScaleByAdamState, found 0'):
    merit_optax.merit_statistics(0.1)(params, optax.EmptyState(), params)


@pytest.mark.skipif(not hasattr(nnx, 'as_pure'), reason='needs flax 0.12.7')
def test_an_nnx_optimizer_gives_what_plain_trees_give():
  model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
  merit = merit_optax.merit(0.1)
  statistics = nnx.jit(merit_optax.merit_statistics(0.1))
  optimizer = nnx.Optimizer(model, merit, wrt=nnx.Param)
  params = nnx.state(model, nnx.Param)
  pure = jax.tree.map(jnp.copy, nnx.as_pure(params))
  (step,) = run(merit, pure, [pure])
  nnx.jit(nnx.Optimizer.update)(optimizer, model, params)
  params = nnx.state(model, nnx.Param)
  watched = statistics(params, optimizer.opt_state, params)
  expected = statistics(step.params, step.state, step.params)
  chex.assert_trees_all_close(watched, expected)
  assert len(watched) == 2 * len(_NAMES)


@pytest.mark.parametrize(
  'gradients, of_state, message',
  [
    ({'w': jnp.ones((4, 5))}, _tree(0), r"\('b', \(5,\)\)"),
    (_tree(9), _tree(0) | {'w': jnp.ones(3)}, r"\('w', \(3,\)\)"),
    (
      {'0' if k == 'w' else k: v for k, v in _tree(9).items()},
      _tree(0),
      r"\('w', \(4, 5\)\)",
    ),
  ],
)
def test_trees_that_do_not_belong_together_are_refused(
  gradients, of_state, message
):
  state = merit_optax.merit(0.1).init(of_state)
  with pytest.raises(ValueError, match=f'must belong together.*{message}'):
    merit_optax.merit_statistics(0.1)(gradients, state, _tree(0))


# What comes back.


def test_values_are_float32_scalars_and_need_no_promotion():
  params = {'w': jnp.ones((4, 5), jnp.bfloat16)}
  with jax.numpy_dtype_promotion('strict'):
    values = jax.jit(_watch)(params, params).values()
  assert {(x.shape, x.dtype) for x in values} == {((), jnp.dtype('float32'))}


@pytest.fixture
def debug_infs():
  jax.config.update('jax_debug_infs', True)
  yield
  jax.config.update('jax_debug_infs', False)


@pytest.mark.parametrize('jit', [jax.jit, lambda f: f], ids=['jit', 'eager'])
@pytest.mark.usefixtures('debug_infs')
def test_zeros_give_finite_values(jit):
  params = _tree(0) | {'zero': jnp.zeros((4, 5)), 'moves': jnp.zeros(5)}
  gradients = jax.tree.map(jnp.zeros_like, params) | {'moves': jnp.ones(5)}
  optimizer = merit_optax.merit(0.1)
  state = optimizer.init(params)
  updates, _ = jax.jit(optimizer.update)(gradients, state, params)
  found = (
    jit(merit_optax.merit_statistics(0.1))(gradients, state, params),
    jit(merit_optax.update_statistics)(updates, params),
  )
  for watched in found:
    assert all(np.isfinite(value) for value in watched.values())
    assert watched['zero/update_to_weight'] == 0
    assert watched['moves/update_to_weight'] == np.finfo(np.float32).max
  assert found[0]['zero/fallback'] == found[0]['moves/fallback'] == 1


def test_empty_arrays_have_no_statistics():
  params = {'empty': jnp.zeros((0, 3)), 'w': normal(0, (4, 5)), 'none': None}
  watched = _watch(params, params)
  assert {key.split('/')[0] for key in watched} == {'w'}
  assert _watch({}, {}) == {}


# Of any optimizer.

_MOVES = {
  *('update_to_weight', 'update_to_weight_min', 'update_to_weight_max'),
  *('l2_update_to_weight', 'l2_update_to_weight_min'),
  *('l2_update_to_weight_max', 'unmoved_rows', 'not_finite'),
}


@pytest.mark.parametrize(
  'spec, axes', [(_Spec(1, 2), (1, 2)), (None, (0, 1, 2))]
)
def test_moves_of_each_matrix_of_a_stack(spec, axes):
  w = normal(0, (3, 4, 5)) * jnp.array([0.1, 1.0, 10.0])[:, None, None]
  u = normal(1, (3, 4, 5)).at[1, 2].set(0)
  others = {'none': None, 'empty': jnp.zeros((0, 3))}
  measure = functools.partial(
    merit_optax.update_statistics,
    weight_dimension_numbers={'w': spec, 'none': None, 'empty': None},
  )
  watched = jax.jit(measure)({'w': u, **others}, {'w': w, **others})
  assert watched.keys() == {f'w/{name}' for name in _MOVES}
  w, u = np.asarray(w, np.float64), np.asarray(u, np.float64)
  for name, norm in (
    ('update_to_weight', lambda x, a: np.max(np.abs(x), a)),
    ('l2_update_to_weight', lambda x, a: np.sqrt(np.sum(x * x, a))),
  ):
    each = norm(u, axes) / norm(w, axes)
    np.testing.assert_allclose(
      [watched[f'w/{name}{suffix}'] for suffix in ('', '_min', '_max')],
      [norm(u, None) / norm(w, None), np.min(each), np.max(each)],
      rtol=1e-5,
    )
  assert watched['w/unmoved_rows'] == pytest.approx(1 / 12 if spec else 0)
  assert watched['w/not_finite'] == 0


def test_rows_stay_where_an_update_is_too_small_for_the_dtype():
  params = {'w': jnp.ones((4, 2), jnp.bfloat16)}
  updates = {
    'w': jnp.array([[1e-4, 1e-4], [0, 0], [1e-4, 0.1], [jnp.inf, jnp.nan]])
  }
  watched = jax.jit(merit_optax.update_statistics)(updates, params)
  assert watched['w/unmoved_rows'] == 0.5
  assert watched['w/not_finite'] == 2 / 8
  assert {x.dtype for x in watched.values()} == {jnp.dtype('float32')}
