"""Dimension numbers of real Flax modules, Linen and NNX."""

import ast
import functools
import re
import warnings

from flax import linen, nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers


def _linen(module, *inputs):
  """Returns the shapes of the parameters of a Linen module."""
  return jax.eval_shape(module.init, jax.random.key(0), *inputs)['params']


def _nnx(make):
  """Returns the shapes of the parameters of an NNX module."""
  model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _shape(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _specs(params, **options):
  """Returns rows and columns of each parameter by its path, checked."""
  specs = merit_optax.flax_dimension_numbers(params, **options)
  # Every parameter has a spec that fits it, with no guess.
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  with warnings.catch_warnings(action='error'):
    jax.eval_shape(optimizer.init, params)
    jax.eval_shape(optimizer.update, params, optimizer.init(params), params)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): spec and (*spec,)
    for path, spec in jax.tree_util.tree_leaves_with_path(
      specs, is_leaf=lambda x: x is None or isinstance(x, _Spec)
    )
  }


_INPUT = ((0,), (1, 2))
_OUTPUT = ((0, 1), (2,))
_MATRIX = ((0,), (1,))
_BIAS = ((), (0,))
_HEADS_BIAS = ((), (0, 1))


def _attention(names=('query', 'key', 'value', 'out')):
  """Returns rows and columns of the kernels and biases of an attention."""
  specs = {f'{names[-1]}/kernel': _OUTPUT, f'{names[-1]}/bias': _BIAS}
  for name in names[:-1]:
    specs |= {f'{name}/kernel': _INPUT, f'{name}/bias': _HEADS_BIAS}
  return specs


class _LinenModel(linen.Module):
  @linen.compact
  def __call__(self, tokens, image, signal):
    x = linen.Embed(10, 8)(tokens)
    x = linen.Dense(6)(linen.LayerNorm()(x))
    x = linen.DenseGeneral((2, 3), name='query')(linen.RMSNorm()(x))
    x = linen.DenseGeneral(8, axis=(-2, -1), name='out')(x)
    x = linen.BatchNorm(use_running_average=True)(linen.GroupNorm(2)(x))
    return x, linen.Conv(4, (3, 3))(image), linen.Conv(4, (3,))(signal)


class _NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(10, 8, rngs=rngs)
    self.layer_norm = nnx.LayerNorm(8, rngs=rngs)
    self.rms_norm = nnx.RMSNorm(8, rngs=rngs)
    self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
    self.linear = nnx.Linear(8, 6, rngs=rngs)
    self.einsum = nnx.Einsum('bi,ij->bj', (8, 6), rngs=rngs)
    self.general = nnx.LinearGeneral(8, 6, rngs=rngs)
    self.conv_1d = nnx.Conv(5, 4, (3,), rngs=rngs)
    self.conv_2d = nnx.Conv(5, 4, (3, 3), rngs=rngs)
    self.up_conv = nnx.ConvTranspose(5, 4, (3, 3), rngs=rngs)


def _assert_layers(specs, others):
  """Checks specs: matrices and biases, but for some."""
  for path, spec in specs.items():
    is_vector = path.endswith(('bias', 'scale'))
    assert spec == others.get(path, _BIAS if is_vector else _MATRIX), path
  assert others.keys() <= specs.keys()


def test_linen_layers():
  tokens = _shape(2, 3, dtype=jnp.int32)
  params = _linen(_LinenModel(), tokens, _shape(1, 4, 4, 5), _shape(1, 4, 5))
  others = {
    'query/kernel': _INPUT,
    'query/bias': _HEADS_BIAS,
    'out/kernel': _OUTPUT,
    'Conv_0/kernel': ((0, 1, 2), (3,)),
    'Conv_1/kernel': ((0, 1), (2,)),
  }
  _assert_layers(_specs(params), others)


def test_nnx_layers():
  others = {
    'conv_1d/kernel': ((0, 1), (2,)),
    'conv_2d/kernel': ((0, 1, 2), (3,)),
    'up_conv/kernel': ((0, 1, 2), (3,)),
  }
  _assert_layers(_specs(_nnx(_NnxModel)), others)


@pytest.mark.parametrize(
  'names',
  [
    ('q', 'k', 'v', 'o'),
    ('q_proj', 'k_proj', 'v_proj', 'o_proj'),
    ('self_query', 'self_key', 'self_value', 'attention_out_proj'),
  ],
)
def test_names_of_projections(names):
  one = {'kernel': _shape(8, 2, 4), 'bias': _shape(2, 4)}
  params = dict.fromkeys(names, one)
  params[names[-1]] = {'kernel': _shape(2, 4, 8), 'bias': _shape(8)}
  assert _specs(params) == _attention(names)
  for projection in params.values():
    projection.pop('bias', None)
  kernels = {
    k: spec for k, spec in _attention(names).items() if k.endswith('kernel')
  }
  assert _specs(params) == kernels


def test_names_of_convolutions():
  names = (
    *('conv', 'conv1', 'Conv_0', 'patch_conv', 'DepthwiseConv', 'conv_up'),
    *('ConvTranspose_0', 'convolution', 'Convolution2D'),
  )
  params = dict.fromkeys(names, {'kernel': _shape(3, 3, 8, 4)})
  assert set(_specs(params).values()) == {((0, 1, 2), (3,))}


_UNKNOWN = {
  'query/kernel': (3, 8, 2, 4),  # Scanned, but nothing says so.
  'out/kernel': (3, 2, 4, 8),
  'layers/0/mlp/kernel': (3, 8, 6),
  'monkey/kernel': (8, 2, 4),  # Not a key.
  'pout/kernel': (2, 4, 8),
  'output_gate/kernel': (2, 4, 8),
  'unconventional/kernel': (3, 8, 4),
  'Convert_0/kernel': (3, 8, 4),
  'vector/kernel': (8,),
  'embed/embedding': (2, 3, 4),
  'q_proj/w': (3, 8, 4),
}


def test_vectors_have_any_name():
  names = ('dt_bias', 'A_log', 'norm/weight', 'gain', 'kernel_scale')
  stacked = {f'blocks/{name}': _shape(3, 8) for name in names}
  params = dict.fromkeys(names, _shape(8)) | {'temperature': _shape()} | stacked
  for name, spec in _specs(params, stacked={'blocks': 1}).items():
    axes = (1,) if name in stacked else (0,) * (name in names)
    assert spec == ((), axes)


def test_unrecognized_parameters_are_named():
  shapes = _UNKNOWN | {'dense/kernel': (8, 6)}
  params = {path: _shape(*shape) for path, shape in shapes.items()}
  with pytest.raises(
    ValueError, match='not recognized: .*stacked.*overrides'
  ) as error:
    merit_optax.flax_dimension_numbers(params)
  named = re.findall(r'([\w/]+) (\([\d, ]+\))', str(error.value))
  assert dict(named) == {path: str(shape) for path, shape in _UNKNOWN.items()}


@hypothesis.given(
  st.sampled_from(['wq', 'experts/w_in', 'lora_a', 'embed', 'bias', 'q_bias']),
  st.integers(0, 2),
  st.integers(1, 4),
)
def test_two_axes_beside_layers_are_a_matrix_of_any_name(name, layers, others):
  path, ndim = f'layers/{name}', layers + others
  params = {path: _shape(*range(2, 2 + ndim))}
  options = {'stacked': {'layers/': layers}}
  is_vector = others == 1 or name.endswith('bias')
  expected = (*range(layers, ndim),)
  expected = ((), expected) if is_vector else (expected[:1], expected[1:])
  if others > 2 and not is_vector:
    with pytest.raises(ValueError, match='not recognized') as error:
      merit_optax.flax_dimension_numbers(params, **options)
    # A hint that was followed is not repeated. The other one can be copied.
    assert ('by stacked' in str(error.value)) == (layers == 0)
    (overrides,) = re.findall(r'overrides=({.*?})', str(error.value))
    overrides = overrides.replace(_Spec.__name__, '')
    (pattern, expected) = ast.literal_eval(overrides).popitem()
    options['overrides'] = {pattern: _Spec(*expected)}
  assert _specs(params, **options) == {path: expected}


@pytest.mark.parametrize(
  'name, kernel, bias',
  [
    ('value', (2, 16, 1), (2, 1)),  # Two critics.
    ('out', (6, 8, 4), (6, 4)),  # Six layers.
    ('query', (3, 8, 16), (16,)),  # A convolution with a window of three.
    ('query', (8, 8, 4), (8, 4)),  # Heads, or eight layers.
  ],
)
def test_a_name_that_the_bias_contradicts_is_refused(name, kernel, bias):
  params = {name: {'kernel': jnp.ones(kernel), 'bias': jnp.ones(bias)}}
  # Of a matrix it may be anything.
  params['matrix'] = {'kernel': jnp.ones((4, 3)), 'bias': jnp.ones(4)}
  for take in (
    merit_optax.flax_dimension_numbers,
    merit_optax.muon_hyperball(0.1, hidden='kernel').init,
  ):
    with pytest.raises(ValueError, match=f'{name}/kernel .* beside a bias'):
      take(params)
  if name != 'query':  # As the message advises.
    merit_optax.flax_dimension_numbers(params, stacked={name: 1})


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  *[st.integers(2, 6)] * 4,
  st.sets(st.sampled_from(['query', 'key', 'value', 'out']), min_size=1),
)
def test_layers_as_the_second_axis_are_not_read_as_heads(
  model, layers, heads, size, names
):
  """As T5X scans them: (model, layers, heads times head_dim)."""
  hypothesis.assume(layers != heads * size)
  width = heads * size
  # Without the output beside them, only a width as the model's gives it away.
  hypothesis.assume(model == width or 'out' in names and len(names) > 1)
  scanned = {
    name: (width, layers, model) if name == 'out' else (model, layers, width)
    for name in names
  }
  params = {f'attention/{x}/kernel': _shape(*s) for x, s in scanned.items()}
  init = functools.partial(jax.eval_shape, merit_optax.muon(0.1).init)
  for take in (merit_optax.flax_dimension_numbers, init):
    with pytest.raises(ValueError, match=r'not recognized: .*stacked.*\(1,\)'):
      take(params)
  assert {*_specs(params, stacked={'attention': (1,)}).values()} == {
    ((0,), (2,))
  }
  # Attention with fewer heads of keys.
  kernels = {
    name: (heads, size, model)
    if name == 'out'
    else (model, heads if name == 'query' else 1, size)
    for name in names
  }
  params = {f'attention/{x}/kernel': _shape(*s) for x, s in kernels.items()}
  if 'out' in names or size != model:
    assert len(_specs(params)) == len(names)


# Stacked layers.


@pytest.mark.parametrize(
  'make',
  [
    lambda: _linen(
      linen.MultiHeadDotProductAttention(2, normalize_qk=True), _shape(1, 3, 8)
    ),
    lambda: _nnx(
      lambda rngs: nnx.MultiHeadAttention(
        2, 8, decode=False, normalize_qk=True, rngs=rngs
      )
    ),
  ],
  ids=['linen', 'nnx'],
)
def test_an_attention_and_a_stack_of_them(make):
  params = make()
  specs = _attention() | {'query_ln/scale': _BIAS, 'key_ln/scale': _BIAS}
  assert _specs(params) == specs
  blocks = jax.tree.map(lambda x: _shape(3, *x.shape), params)
  of_blocks = {
    f'blocks/{path}': tuple(tuple(axis + 1 for axis in axes) for axes in spec)
    for path, spec in specs.items()
  }
  # As in Haiku and gemma.
  params = {'blocks': blocks, 'head': {'w': _shape(8, 4)}}
  expected = {'head/w': _MATRIX, **of_blocks}
  assert _specs(params, stacked={'^blocks/': 1}) == expected


def test_the_largest_number_of_stacked_axes_counts():
  experts = {'kernel': _shape(3, 4, 8, 6), 'bias': _shape(3, 4, 6)}
  params = {'blocks': {'experts': experts, 'mlp': {'w': _shape(3, 8, 6)}}}
  params['blocks']['temperature'] = {'scale': _shape(3)}
  stacked = {'experts': 2, 'blocks': 1}
  assert _specs(params, stacked=stacked) == {
    'blocks/experts/kernel': ((2,), (3,)),
    'blocks/experts/bias': ((), (2,)),
    'blocks/mlp/w': ((1,), (2,)),
    'blocks/temperature/scale': ((), ()),
  }


def test_stacked_axes_that_do_not_lead():
  # As in MaxText, whose kernels are (model, layers, heads, head_dim).
  params = {
    'layers': {
      'query': {'kernel': _shape(8, 3, 2, 4), 'bias': _shape(2, 3, 4)},
      'norm': {'scale': _shape(8, 3)},
    },
    'last': {'kernel': _shape(8, 6, 3)},
  }
  assert _specs(params, stacked={'layers/': (1,), 'last': [-1]}) == {
    'layers/query/kernel': ((0,), (2, 3)),
    'layers/query/bias': ((), (0, 2)),
    'layers/norm/scale': ((), (0,)),
    'last/kernel': ((0,), (1,)),
  }
  for axes in (3, -1, (-3,)):
    with pytest.raises(ValueError, match=r"stacked\['norm'\] must name"):
      _specs({'norm': {'scale': _shape(8, 3)}}, stacked={'norm': axes})


# Patterns.


def test_overrides_come_first():
  params = {
    'blocks': {'general': {'kernel': _shape(3, 8, 2, 4)}},
    'dense': {'kernel': _shape(8, 6)},
    'table': _shape(2, 3),
    'other': {'kernel': _shape(8, 6)},
  }
  overrides = {
    'general/kernel$': _Spec((1,), (2, 3)),
    '^dense': _Spec(1, 0),
    'kernel': None,
    re.compile('table'): None,
  }
  # Axes of an override count from the whole array, stacked or not.
  assert _specs(params, stacked={'blocks/': 1}, overrides=overrides) == {
    'blocks/general/kernel': ((1,), (2, 3)),
    'dense/kernel': (1, 0),
    'table': None,
    'other/kernel': None,
  }


@pytest.mark.parametrize(
  'argument, entry', [('stacked', 1), ('overrides', None)]
)
def test_patterns_that_match_nothing_are_named(argument, entry):
  params = {'blocks': {'kernel': jnp.zeros((2, 2))}}
  patterns = {'blokcs/': entry, re.compile('down/'): entry}
  with pytest.raises(ValueError, match='match none: .*blokcs/.*down/'):
    merit_optax.flax_dimension_numbers(params, **{argument: patterns})


def test_patterns_may_match_nothing_where_parameters_are_left_out():
  options = {'stacked': {'blocks/': 1}, 'overrides': {'^position$': None}}
  for absent in (None, optax.MaskedNode()):
    params = {'blocks': {'kernel': _shape(2, 3, 4)}, 'position': absent}
    assert _specs(params, **options)['blocks/kernel'] == ((1,), (2,))
