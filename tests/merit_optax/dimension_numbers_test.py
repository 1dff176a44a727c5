"""Which axes are rows and columns: all forms of `weight_dimension_numbers`."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices.dimension_numbers import MatrixAxes, matrix_axes
from tests.merit_optax.arrays import normal, oracle_ratios, oracle_scale, run

_Spec = optax.contrib.MuonDimensionNumbers
_Fused = merit_optax.FusedDimensionNumbers


def _scale(update, param, specs):
  """Returns the scaled updates, given specs in one form or another."""
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=specs
  )
  state = transform.init(param)
  return jax.jit(lambda z, w: transform.update(z, state, w)[0])(update, param)


def _axes(specs, shapes):
  """Returns the axes of arrays of some shapes."""
  params = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    shapes,
    is_leaf=lambda x: type(x) is tuple,
  )
  return matrix_axes(specs, params)


# Stacking changes nothing.


def _updates(params, gradients, specs):
  """Returns the updates of every step of MERIT."""
  optimizer = merit_optax.merit(
    0.1, weight_decay=0.1, weight_dimension_numbers=specs
  )
  return np.stack([x.updates for x in run(optimizer, params, gradients)])


@pytest.mark.parametrize(
  'shape, batch, spec, single',
  [
    ((3, 5), (0,), _Spec((), (1,)), None),  # Biases as (layers, features).
    ((3, 2, 4), (0,), _Spec((), (1, 2)), _Spec((), (0, 1))),  # Of query heads.
    ((3, 6, 2, 4), (0,), _Spec(1, (2, 3)), _Spec(0, (1, 2))),
    ((2, 3, 5, 4), (0, 1), _Spec((-2,), (-1,)), None),  # Layers and experts.
    ((6, 3, 4), (1,), _Spec((0,), (2,)), None),  # Heads.
  ],
)
def test_a_stack_gets_the_updates_of_separate_matrices(
  shape, batch, spec, single
):
  def matrix(x, index):
    return np.moveaxis(np.asarray(x), batch, range(len(batch)))[index]

  # A scale of its own for each matrix, so that a shared norm would show.
  sizes = [n if axis in batch else 1 for axis, n in enumerate(shape)]
  params = np.array(normal(0, shape)) * 10.0 ** np.array(normal(9, sizes))
  gradients = [normal(1 + i, shape) for i in range(2)]
  together = _updates(params, gradients, spec)
  for index in np.ndindex(*(shape[axis] for axis in batch)):
    alone = _updates(
      matrix(params, index), [matrix(g, index) for g in gradients], single
    )
    for step, expected in zip(together, alone, strict=True):
      np.testing.assert_array_equal(matrix(step, index), expected)


# Forms of a single spec.


@pytest.mark.parametrize(
  'spec, rows, columns',
  [
    (_Spec(1, 0), (1,), (0,)),
    (_Spec([0, 1], [2]), (0, 1), (2,)),
    (_Spec(np.int64(0), (np.int32(-1),)), (0,), (2,)),
    (None, (1,), (2,)),
    (lambda _: _Spec(2, 0), (2,), (0,)),
    (lambda _: None, (1,), (2,)),
  ],
)
def test_each_form_of_a_spec(spec, rows, columns):
  assert _axes(spec, (3, 4, 5)) == MatrixAxes(rows, columns)


def test_any_axes_may_be_rows_and_columns():
  cases = {
    f'{rows}, {columns}': (rows, columns)
    for axes in itertools.permutations(range(3))
    for rows, columns in [
      (axes[:1], axes[1:2]),
      (axes[:1], axes[1:]),
      (axes[:2], axes[2:]),
      ((), axes[:2]),
    ]
  }
  # Counted from the end.
  specs = {
    name: _Spec(*(tuple(axis - 3 for axis in axes) for axes in case))
    for name, case in cases.items()
  }
  update, param = normal(2, (2, 3, 4)), normal(3, (2, 3, 4))
  # A tree of all of them, since each program takes its time to compile.
  scaled = _scale(
    dict.fromkeys(cases, update), dict.fromkeys(cases, param), specs
  )
  for name, axes in cases.items():
    rows, columns = (x if isinstance(x, tuple) else (x,) for x in axes)
    ratios = oracle_ratios(update, param, rows, columns)
    expected = oracle_scale(update, ratios.values())
    np.testing.assert_allclose(scaled[name], expected, rtol=1e-6)


@pytest.mark.parametrize('shape', [(), (5,)])
@pytest.mark.parametrize('spec', [None, _Spec((0,), (1, 2))])
def test_a_rank_below_two_is_always_weight_wise(shape, spec):
  assert _axes(spec, shape) == MatrixAxes((), tuple(range(len(shape))))


@pytest.mark.parametrize('shape', [(6,), (2, 3)])
def test_scalars_of_stacked_layers_are_apart(shape):
  update, param, spec = normal(0, shape), normal(1, shape), _Spec((), ())
  scaled = _scale(update, param, spec)
  expected = np.abs(param) * np.sign(update)
  np.testing.assert_allclose(scaled, expected, rtol=1e-6)
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=spec)
  table = merit_optax.describe({'s': param}, optimizer)
  assert '6 x 1 ' in table


# Trees of specs.


_SHAPES = {
  'attention': {'q': (6, 2, 3), 'k': (6, 2, 3)},
  'mlp': (4, 5),
  'bias': (3, 4),
}
_QUERY = _Spec((0,), (1, 2))
_TREE_SPECS = {
  'attention': {'q': _QUERY, 'k': _Spec((0,), (2,))},
  'mlp': _Spec(1, 0),
  'bias': None,
}


@pytest.mark.parametrize(
  'specs, attention',
  [
    (lambda _: _TREE_SPECS, _TREE_SPECS['attention']),
    (_TREE_SPECS | {'attention': _QUERY}, {'q': _QUERY, 'k': _QUERY}),
    (_TREE_SPECS | {'attention': None}, {'q': None, 'k': None}),
  ],
  ids=['function', 'prefix', 'none'],
)
def test_a_tree_of_specs_has_one_for_each_parameter(specs, attention):
  # In a tree, None means weight-wise; alone, that nothing is said.
  expected = {
    'attention': {
      name: MatrixAxes((0,), tuple(np.ravel(spec[1])))
      if spec
      else MatrixAxes((), (0, 1, 2))
      for name, spec in attention.items()
    },
    'mlp': MatrixAxes((1,), (0,)),
    'bias': MatrixAxes((), (0, 1)),
  }
  assert _axes(specs, _SHAPES) == expected
  # And so it is for the others, if some are masked out.
  masked = {'attention': optax.MaskedNode()}
  assert _axes(specs, _SHAPES | masked) == expected | masked


# Beside other transforms.


def test_a_masked_parameter_needs_no_spec_and_gives_no_warning():
  params = {'conv': jnp.ones((3, 2, 2)), 'w': jnp.ones((2, 3))}
  mask = {'conv': False, 'w': True}
  with warnings.catch_warnings(action='error'):
    merit_optax.merit(0.1, trust_ratio_mask=mask).init(params)
  merit_optax.merit(
    0.1, trust_ratio_mask=mask, weight_dimension_numbers={'w': _Spec()}
  ).init(params)


# The default.


def test_init_alone_warns_of_each_guess_with_path_and_shape():
  shapes = _SHAPES | {'experts': [(2, 2, 3, 4), (2, 3)]}
  params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: type(x) is tuple)
  optimizer = merit_optax.merit(0.1)
  with pytest.warns(UserWarning) as record:
    state = optimizer.init(params)
  (warning,) = record
  text = str(warning.message)
  assert re.findall(r'[\w/]+ \([\d, ]+\)', text.split('two:')[1]) == [
    'attention/k (6, 2, 3)',
    'attention/q (6, 2, 3)',
    'experts/0 (2, 2, 3, 4)',
  ]
  # How to silence it.
  assert 'merit_optax.flax_dimension_numbers' in text
  with warnings.catch_warnings(action='error'):
    jax.eval_shape(optimizer.update, params, state, params)


@pytest.mark.parametrize('spec', [_Spec, _Fused, dict])
def test_a_class_is_no_spec(spec):
  transform = merit_optax.scale_by_muon(weight_dimension_numbers=spec)
  with pytest.raises(ValueError) as error:
    transform.init(jnp.ones((3, 3)))
  assert str(error.value).endswith(f'got the class {spec.__name__}.')


# Specs that do not fit.


@pytest.mark.parametrize(
  'spec, message',
  [
    (_Spec(0, 3), 'got 3'),
    (_Spec((0, -3), 1), 'each once'),
    (_Spec((0, 1), (1, 2)), 'each once'),
    (_Spec(0, (1, False)), 'got False'),
    (_Spec(0.0, 1), r'got 0\.0'),
    ('rows', "got 'rows'"),
    ({}, 'missing'),
    *(
      (_Fused(1, 2, parts), 'must have parts that divide the last')
      for parts in (5, 0, (8, 2), (4, 0), (2.0, 2), 'abc', None)
    ),
  ],
)
def test_a_spec_that_does_not_fit_is_refused(spec, message):
  params = {'blocks': [{'w': jnp.ones((2, 3, 4))}]}
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers={'blocks': [{'w': spec}]}
  )
  where = r"parameter 'blocks/0/w' of shape \(2, 3, 4\) "
  for call in (
    lambda: transform.init(params),
    lambda: transform.update(params, optax.EmptyState(), params),
  ):
    with pytest.raises(ValueError, match=f'{where}.*{message}'):
      call()


# Matrices side by side.

_TRANSFORMS = {
  'muon': merit_optax.scale_by_muon,
  'max': merit_optax.scale_by_max_norm_trust_ratio,
  'l2': merit_optax.scale_by_l2_norm_trust_ratio,
  'row': functools.partial(merit_optax.scale_by_lmo, 'row'),
  'shape': functools.partial(merit_optax.scale_by_shape, lambda m, n: m / n),
  'kept': merit_optax.keep_matrix_norms,
  'hyperball': functools.partial(merit_optax.hyperball, optax.identity(), 0.1),
}


@pytest.mark.parametrize('sizes', [3, (8, 2, 2)], ids=['equal', 'grouped'])
@pytest.mark.parametrize('make', _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_fused_matrices_get_the_updates_of_separate_ones(make, sizes):
  kernel, spec = normal(0, (5, 4, 12)), _Fused(1, 2, sizes)
  # The last part has much smaller gradients.
  gradient = normal(1, (5, 4, 12)).at[..., 10:].multiply(1e-3)
  fused = make(weight_dimension_numbers=spec)
  alone = make(weight_dimension_numbers=_Spec(1, 2))
  ends = (4, 8) if sizes == 3 else (8, 10)
  params, gradients = (jnp.split(x, ends, axis=-1) for x in (kernel, gradient))
  updates, _ = jax.jit(fused.update)(gradient, fused.init(kernel), kernel)
  expected, _ = jax.jit(alone.update)(gradients, alone.init(params), params)
  np.testing.assert_allclose(
    updates, jnp.concatenate(expected, -1), rtol=1e-5, atol=1e-6
  )


def test_calibrated_ratios_refuse_fused_matrices():
  transform = merit_optax.scale_by_l2_norm_trust_ratio(
    calibrate=True, weight_dimension_numbers=_Fused(0, 1, 3)
  )
  with pytest.raises(ValueError, match='must not hold FusedDimensionNumbers'):
    transform.init(jnp.ones((4, 12)))
