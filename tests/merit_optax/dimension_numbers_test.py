"""Which axes are rows and columns: all forms of `weight_dimension_numbers`."""

import functools
import itertools
import math
import warnings

import equinox
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers
_NUM_STEPS = 4


def _normal(seed, shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def _init(params, specs):
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=specs
  )
  return transform.init(params)


def _scale(update, param, specs):
  """Returns the scaled updates, given specs in one form or another."""
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=specs
  )
  state = transform.init(param)
  return jax.jit(lambda z, w: transform.update(z, state, w)[0])(update, param)


def _oracle(update, param, rows, columns):
  """Returns Algorithm 1's s z, with a matrix for each index of other axes."""
  z, w = np.asarray(update, np.float64), np.asarray(param, np.float64)

  def ratio(axes):
    norms = [np.max(np.abs(x), axis=axes, keepdims=True) for x in (w, z)]
    return norms[0] / norms[1]

  ratios = [ratio(rows + columns)]
  if rows:
    ratios += [ratio(columns), ratio(rows)]
  return functools.reduce(np.maximum, ratios) * z


def _assert_axes(update, param, specs, rows, columns):
  expected = _oracle(update, param, rows, columns)
  np.testing.assert_allclose(_scale(update, param, specs), expected, rtol=1e-6)


@functools.cache
def _optimizer(specs):
  """Returns the init of MERIT, and its jitted update."""
  optimizer = merit_optax.merit(
    0.1, weight_decay=0.1, weight_dimension_numbers=specs
  )
  return optimizer.init, jax.jit(optimizer.update)


def _steps(params, gradients, specs):
  """Returns the updates of every step of MERIT, under jit."""
  init, update = _optimizer(specs)
  state, result = init(params), []
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    result.append(updates)
  return np.stack(result)


def _problem(shape):
  return _normal(0, shape), [_normal(1 + i, shape) for i in range(_NUM_STEPS)]


# Stacking changes nothing.


@pytest.mark.parametrize(
  ('shape', 'stacked', 'single'),
  [
    ((3, 5, 4), _Spec((1,), (2,)), None),
    ((3, 5), _Spec((), (1,)), None),  # Biases as (layers, features).
    ((3, 2, 4), _Spec((), (1, 2)), _Spec((), (0, 1))),  # Of query heads.
    ((3, 6, 2, 4), _Spec(1, (2, 3)), _Spec(0, (1, 2))),
  ],
)
def test_stacked_layers_get_the_updates_of_separate_ones(
  shape, stacked, single
):
  params, gradients = _problem(shape)
  # A scale of its own for each layer, so that a shared norm would show.
  scales = jnp.array([1.0, 10.0, 0.1]).reshape(-1, *(1,) * (len(shape) - 1))
  params = params * scales
  together = _steps(params, gradients, stacked)
  for i in range(shape[0]):
    alone = _steps(params[i], [g[i] for g in gradients], single)
    np.testing.assert_array_equal(together[:, i], alone)


def test_experts_get_the_updates_of_separate_matrices():
  params, gradients = _problem((2, 3, 5, 4))
  together = _steps(params, gradients, _Spec((-2,), (-1,)))
  for i in range(2):
    for j in range(3):
      alone = _steps(params[i, j], [g[i, j] for g in gradients], None)
      np.testing.assert_array_equal(together[:, i, j], alone)


def test_heads_as_batch_axes_get_the_updates_of_separate_matrices():
  params, gradients = _problem((6, 3, 4))
  together = _steps(params, gradients, _Spec((0,), (2,)))
  for i in range(3):
    alone = _steps(params[:, i], [g[:, i] for g in gradients], None)
    np.testing.assert_array_equal(together[:, :, i], alone)


@pytest.mark.parametrize(
  ('shape', 'spec', 'flat'),
  [
    ((6, 3, 4), _Spec((0,), (1, 2)), (6, 12)),  # (model, heads, head_dim)
    ((3, 4, 6), _Spec((0, 1), (2,)), (12, 6)),  # (heads, head_dim, model)
  ],
)
def test_an_attention_kernel_gets_the_updates_of_its_flat_matrix(
  shape, spec, flat
):
  params, gradients = _problem(shape)
  # Compiled, a product may be rounded before it is added in one program alone.
  with jax.disable_jit():
    kernel = _steps(params, gradients, spec)
    matrix = _steps(
      params.reshape(flat), [g.reshape(flat) for g in gradients], None
    )
  np.testing.assert_array_equal(kernel.reshape(-1, *flat), matrix)


# Forms of a single spec.


@pytest.mark.parametrize(
  ('spec', 'rows', 'columns'),
  [
    (_Spec(0, 1), (0,), (1,)),
    (_Spec(1, 0), (1,), (0,)),
    (_Spec((0,), (1, 2)), (0,), (1, 2)),
    (_Spec([0, 1], [2]), (0, 1), (2,)),
    (_Spec((-2,), -1), (1,), (2,)),
    (_Spec((-3, 1), (2,)), (0, 1), (2,)),
    (_Spec(np.int64(0), (np.int32(-1),)), (0,), (2,)),
    (_Spec((), (1,)), (), (1,)),
    (_Spec((), (1, 2)), (), (1, 2)),
    (_Spec((1,), ()), (), (1,)),
    (None, (1,), (2,)),
  ],
)
@pytest.mark.filterwarnings('ignore:These parameters')
def test_each_form_of_an_axis(spec, rows, columns):
  update, param = _normal(0, (3, 4, 5)), _normal(1, (3, 4, 5))
  _assert_axes(update, param, spec, rows, columns)


@pytest.mark.parametrize('shift', [0, -3])
def test_any_axes_may_be_rows_and_columns(shift):
  cases = {
    f'{rows}, {columns}': (rows, columns)
    for size in (1, 2, 3)
    for axes in itertools.permutations(range(3), size)
    for split in range(size)
    for rows, columns in [(axes[:split], axes[split:])]
  }
  specs = {
    name: _Spec(*(tuple(axis + shift for axis in axes) for axes in case))
    for name, case in cases.items()
  }
  update, param = _normal(2, (2, 3, 4)), _normal(3, (2, 3, 4))
  # A tree of all of them, since each program takes its time to compile.
  scaled = _scale(
    dict.fromkeys(cases, update), dict.fromkeys(cases, param), specs
  )
  for name, case in cases.items():
    np.testing.assert_allclose(
      scaled[name], _oracle(update, param, *case), rtol=1e-6, err_msg=name
    )


@pytest.mark.parametrize('shape', [(), (5,)])
@pytest.mark.parametrize('spec', [None, _Spec(), _Spec((0,), (1, 2))])
def test_a_rank_below_two_is_always_weight_wise(shape, spec):
  update, param = _normal(0, shape), _normal(1, shape)
  _assert_axes(update, param, spec, (), tuple(range(len(shape))))


@pytest.mark.parametrize('shape', [(3,), (2, 3)])
@pytest.mark.parametrize('spec', [_Spec((), ()), _Spec([], [])])
def test_scalars_of_stacked_layers_are_apart(shape, spec):
  update, param = _normal(0, shape), _normal(1, shape)
  expected = np.abs(param) * np.sign(update)
  scaled = _scale(update, param, spec)
  np.testing.assert_allclose(scaled, expected, rtol=1e-6)
  (row,) = merit_optax.describe(
    {'s': param}, weight_dimension_numbers=spec
  ).splitlines()[1:-1]
  assert f'{math.prod(shape)} x 1 ' in row


# Trees of specs.


def _tree(seed):
  return {
    'attention': {'q': _normal(seed, (6, 2, 3)), 'k': _normal(9, (6, 2, 3))},
    'mlp': _normal(seed + 1, (4, 5)),
    'bias': _normal(seed + 2, (3, 4)),
  }


_TREE_SPECS = {
  'attention': {'q': _Spec(0, (1, 2)), 'k': _Spec((0,), (2,))},
  'mlp': _Spec(1, 0),
  'bias': None,
}


def _assert_tree(specs, expected=None):
  """Checks a tree of specs against single specs of its leaves."""
  scaled = _scale(_tree(10), _tree(20), specs)
  flat = jax.tree.leaves(
    _TREE_SPECS if expected is None else expected,
    is_leaf=lambda x: x is None or isinstance(x, _Spec),
  )
  leaves = map(jax.tree.leaves, (scaled, _tree(10), _tree(20)))
  for got, update, param, spec in zip(*leaves, flat, strict=True):
    # In a tree, None means weight-wise; alone, that nothing is said.
    alone = spec or _Spec((), tuple(range(param.ndim)))
    np.testing.assert_array_equal(got, _scale(update, param, alone))


def test_a_tree_of_specs():
  _assert_tree(_TREE_SPECS)


def test_a_prefix_tree_of_specs():
  spec = _Spec((0,), (1, 2))
  _assert_tree(
    _TREE_SPECS | {'attention': spec},
    _TREE_SPECS | {'attention': {'q': spec, 'k': spec}},
  )


def test_none_in_a_prefix_tree_covers_what_is_below():
  _assert_tree(
    _TREE_SPECS | {'attention': None},
    _TREE_SPECS | {'attention': {'q': None, 'k': None}},
  )


def test_a_function_is_given_the_parameters():
  def specs(params):
    assert params['attention']['q'].shape == (6, 2, 3)
    return _TREE_SPECS

  _assert_tree(specs)


def test_a_function_may_return_a_single_spec():
  update, param = _normal(0, (3, 4, 5)), _normal(1, (3, 4, 5))
  _assert_axes(update, param, lambda _: _Spec(2, 0), (2,), (0,))


def test_a_function_that_returns_none_has_said_nothing():
  update, param = _normal(0, (3, 4, 5)), _normal(1, (3, 4, 5))
  with pytest.warns(UserWarning, match='two axes'):
    _assert_axes(update, param, lambda _: None, (1,), (2,))


def test_a_list_of_parameters():
  params = [_normal(0, (3, 4, 5)), _normal(1, (3, 4))]
  got = _scale(params, params, [_Spec(0, 1), _Spec(1, 0)])
  # The update is the parameter, so that every ratio is 1.
  jax.tree.map(np.testing.assert_array_equal, got, params)
  with pytest.raises(ValueError, match="parameter '1' of shape"):
    _init(params, [_Spec(0, 1)])


def test_empty_trees_empty_arrays_and_none_leaves():
  assert _scale({}, {}, {}) == {}
  assert _scale({'a': None}, {'a': None}, {'a': None}) == {'a': None}
  empty = jnp.zeros((0, 3))
  assert _scale(empty, empty, _Spec()).shape == (0, 3)


@pytest.mark.skipif(not hasattr(nnx, 'as_pure'), reason='needs flax 0.12.7')
def test_a_dict_of_specs_fits_an_nnx_state():
  attention = nnx.MultiHeadAttention(
    2, 6, decode=False, use_bias=False, rngs=nnx.Rngs(0)
  )
  params = nnx.state(attention, nnx.Param)
  inner = {'kernel': _Spec((0,), (1, 2))}
  specs = {name: inner for name in ('query', 'key', 'value')}
  specs['out'] = {'kernel': _Spec((0, 1), (2,))}
  updates = jax.tree.map(lambda x: x + 1, params)
  scaled = nnx.as_pure(_scale(updates, params, specs))
  for name, spec in (('query', _Spec(0, (1, 2))), ('out', _Spec((0, 1), 2))):
    update, param = (nnx.as_pure(x)[name]['kernel'] for x in (updates, params))
    np.testing.assert_array_equal(
      scaled[name]['kernel'], _scale(update, param, spec)
    )


class _Layer(equinox.Module):
  """A module whose trees are callable, as all of Equinox's layers are."""

  weight: jax.Array
  bias: jax.Array

  def __call__(self, x):
    return self.weight @ x + self.bias


@pytest.mark.parametrize('weight_spec', [_Spec(1, 0), None])
def test_a_tree_of_specs_that_is_itself_callable(weight_spec):
  params = _Layer(_normal(0, (3, 4)), _normal(1, (3,)))
  updates = _Layer(_normal(2, (3, 4)), _normal(3, (3,)))
  scaled = _scale(updates, params, _Layer(weight_spec, None))
  expected = _scale(
    updates.weight, params.weight, weight_spec or _Spec((), (0, 1))
  )
  np.testing.assert_array_equal(scaled.weight, expected)


def test_a_dict_of_specs_fits_the_attributes_of_a_module():
  params = _Layer(_normal(0, (3, 4)), _normal(1, (3,)))
  updates = _Layer(_normal(2, (3, 4)), _normal(3, (3,)))
  scaled = _scale(updates, params, {'weight': _Spec(1, 0), 'bias': None})
  expected = _scale(updates.weight, params.weight, _Spec(1, 0))
  np.testing.assert_array_equal(scaled.weight, expected)


# Beside other transforms.


@pytest.mark.parametrize('is_prefix', [False, True])
def test_specs_of_parameters_that_are_masked_out(is_prefix):
  params, gradients = _tree(0), _tree(20)
  specs = _TREE_SPECS
  if is_prefix:
    specs = specs | {'attention': _Spec((0,), (1, 2))}
  mask = {'attention': False, 'mlp': True, 'bias': True}
  transform = optax.masked(
    merit_optax.scale_by_max_norm_trust_ratio(weight_dimension_numbers=specs),
    mask,
  )
  got, _ = jax.jit(transform.update)(gradients, transform.init(params), params)
  expected = _scale(gradients, params, specs)
  for name, leaf in gradients['attention'].items():
    np.testing.assert_array_equal(got['attention'][name], leaf)
  for name in ('mlp', 'bias'):
    np.testing.assert_array_equal(got[name], expected[name])


def test_a_masked_parameter_needs_no_spec_and_gives_no_warning():
  params = {'conv': jnp.ones((3, 2, 2)), 'w': jnp.ones((2, 3))}
  mask = {'conv': False, 'w': True}
  with warnings.catch_warnings(action='error'):
    merit_optax.merit(0.1, trust_ratio_mask=mask).init(params)
  merit_optax.merit(
    0.1, trust_ratio_mask=mask, weight_dimension_numbers={'w': _Spec()}
  ).init(params)


def test_specs_in_a_partition():
  params, gradients = _tree(0), _tree(20)
  labels = {'attention': 'merit', 'mlp': 'merit', 'bias': 'sgd'}
  settings = {'weight_dimension_numbers': _TREE_SPECS}
  merit = merit_optax.merit(0.1, **settings)
  optimizer = optax.partition({'merit': merit, 'sgd': optax.sgd(1.0)}, labels)
  got, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
  expected, _ = jax.jit(merit.update)(gradients, merit.init(params), params)
  np.testing.assert_array_equal(got['bias'], -gradients['bias'])
  for name in ('attention', 'mlp'):
    jax.tree.map(np.testing.assert_array_equal, got[name], expected[name])


@pytest.mark.parametrize(
  'specs',
  [
    None,
    _Spec(),
    _TREE_SPECS,
    lambda p: {name: _TREE_SPECS[name] for name in p},
  ],
)
@pytest.mark.filterwarnings('ignore:These parameters')
def test_map_params_finds_the_moments(specs):
  params = _tree(0)
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  # A placeholder stands for the parameters in the init that this calls.
  doubled = optax.tree.map_params(
    optimizer,
    lambda moment, param: moment + 2 * param,
    optimizer.init(params),
    params,
  )
  for moment in ('mu', 'nu'):
    jax.tree.map(
      lambda m, p: np.testing.assert_array_equal(m, 2 * p),
      optax.tree.get(doubled, moment),
      params,
    )
  assert optax.tree.get(doubled, 'count') == 0


# The default.


def test_init_warns_of_each_guess_with_path_and_shape():
  params = _tree(0) | {'experts': [jnp.ones((2, 2, 3, 4)), jnp.ones((2, 3))]}
  with pytest.warns(UserWarning) as record:
    merit_optax.merit(0.1).init(params)
  (warning,) = record
  text = str(warning.message)
  assert 'attention/q (6, 2, 3)' in text
  assert 'attention/k (6, 2, 3)' in text
  assert 'experts/0 (2, 2, 3, 4)' in text
  assert 'experts/1' not in text
  assert 'mlp' not in text
  # How to silence it.
  assert 'weight_dimension_numbers' in text
  assert 'merit_optax.flax_dimension_numbers' in text


@pytest.mark.parametrize(
  ('shape', 'specs'),
  [
    ((), None),
    ((3,), None),
    ((3, 4), None),
    ((3, 4, 5), _Spec()),
    ((3, 4, 5), _Spec((), (2,))),
    ((3, 4, 5), lambda _: _Spec(0, 2)),
  ],
)
def test_init_does_not_warn_where_nothing_is_guessed(shape, specs):
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  with warnings.catch_warnings(action='error'):
    optimizer.init(jnp.ones(shape))


def test_update_does_not_warn():
  params = jnp.ones((3, 4, 5))
  optimizer = merit_optax.merit(0.1)
  with pytest.warns(UserWarning):
    state = optimizer.init(params)
  with warnings.catch_warnings(action='error'):
    jax.eval_shape(optimizer.update, params, state, params)


# Specs that do not fit.

_BAD_SPECS = [
  (_Spec(0, 3), 'got 3'),
  (_Spec((0, -4), 2), 'got -4'),
  (_Spec((0, 0), 1), 'each once'),
  (_Spec((0, -3), 1), 'each once'),
  (_Spec((0, 1), (1, 2)), 'each once'),
  (_Spec(True, 0), 'got True'),
  (_Spec(0, (1, False)), 'got False'),
  (_Spec('0', 1), "got '0'"),
  (_Spec(0.0, 1), r'got 0\.0'),
  (_Spec(None, 1), 'got None'),
  ('rows', "got 'rows'"),
  (7, 'got 7'),
]


@pytest.mark.parametrize(('spec', 'message'), _BAD_SPECS)
@pytest.mark.parametrize('as_function', [False, True])
def test_a_spec_that_does_not_fit(spec, message, as_function):
  params = {'blocks': [{'w': jnp.ones((2, 3, 4))}]}
  specs = {'blocks': [{'w': spec}]}
  given = (lambda _: specs) if as_function else specs
  where = r"parameter 'blocks/0/w' of shape \(2, 3, 4\) "
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=given
  )
  with pytest.raises(ValueError, match=f'{where}.*{message}'):
    transform.init(params)
  with pytest.raises(ValueError, match=f'{where}.*{message}'):
    jax.jit(transform.update)(params, optax.EmptyState(), params)


def test_a_missing_spec():
  params = {'a': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}}
  with pytest.raises(
    ValueError, match=r"parameter 'a/b' of shape \(3,\) are missing"
  ):
    _init(params, {'a': {'w': _Spec()}})


def test_merit_passes_its_specs_on():
  with pytest.raises(ValueError, match=r"parameter 'w' of shape \(2, 3\)"):
    merit_optax.merit(0.1, weight_dimension_numbers={'w': _Spec(0, 2)}).init(
      {'w': jnp.ones((2, 3))}
    )
