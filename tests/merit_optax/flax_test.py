"""Dimension numbers of real Flax modules, Linen and NNX."""

import functools
import re
import warnings

import chex
from flax import linen, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers


def _linen(module, *inputs):
  """Returns the shapes of the parameters of a Linen module."""
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs]
  return jax.eval_shape(module.init, jax.random.key(0), *shapes)['params']


def _nnx(make):
  """Returns the shapes of the parameters of an NNX module."""
  model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _floats(*shape):
  return shape, jnp.float32


def _is_spec(x):
  return x is None or isinstance(x, _Spec)


def _specs(params, **options):
  """Returns rows and columns of each parameter by its path, checked."""
  specs = merit_optax.flax_dimension_numbers(params, **options)
  _assert_explicit(params, specs)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): spec and (*spec,)
    for path, spec in jax.tree_util.tree_leaves_with_path(
      specs, is_leaf=_is_spec
    )
  }


def _assert_explicit(params, specs):
  """Checks that every parameter has a spec that fits it, with no guess."""
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  with warnings.catch_warnings(action='error'):
    jax.eval_shape(optimizer.init, params)
    jax.eval_shape(optimizer.update, params, optimizer.init(params), params)


def _stacked(specs, num=1):
  """Returns specs with all axes moved behind stacked ones."""
  return {
    path: tuple(tuple(axis + num for axis in axes) for axes in spec)
    for path, spec in specs.items()
  }


_INPUT = ((0,), (1, 2))
_OUTPUT = ((0, 1), (2,))
_MATRIX = ((0,), (1,))
_BIAS = ((), (0,))
_HEADS_BIAS = ((), (0, 1))

_ATTENTION = {
  'query/kernel': _INPUT,
  'key/kernel': _INPUT,
  'value/kernel': _INPUT,
  'out/kernel': _OUTPUT,
}
_ATTENTION_BIASES = {
  'query/bias': _HEADS_BIAS,
  'key/bias': _HEADS_BIAS,
  'value/bias': _HEADS_BIAS,
  'out/bias': _BIAS,
}


@pytest.mark.parametrize('use_bias', [False, True])
@pytest.mark.parametrize('normalize_qk', [False, True])
def test_attention(use_bias, normalize_qk):
  expected = dict(_ATTENTION)
  if use_bias:
    expected |= _ATTENTION_BIASES
  of_linen = linen.MultiHeadDotProductAttention(
    2, use_bias=use_bias, normalize_qk=normalize_qk
  )
  norms = {'query_ln/scale': _BIAS, 'key_ln/scale': _BIAS}
  params = _linen(of_linen, _floats(1, 3, 8))
  assert params['query']['kernel'].shape == (8, 2, 4)
  assert _specs(params) == expected | (norms if normalize_qk else {})
  params = _nnx(
    lambda rngs: nnx.MultiHeadAttention(
      2,
      8,
      use_bias=use_bias,
      normalize_qk=normalize_qk,
      decode=False,
      rngs=rngs,
    )
  )
  assert params['out']['kernel'].shape == (2, 4, 8)
  assert _specs(params) == expected | (norms if normalize_qk else {})


@pytest.mark.parametrize(
  'names',
  [
    ('query', 'key', 'value', 'out'),
    ('q', 'k', 'v', 'o'),
    ('q_proj', 'k_proj', 'v_proj', 'o_proj'),
    ('self_query', 'self_key', 'self_value', 'attention_out_proj'),
  ],
)
def test_names_of_projections(names):
  class Attention(nnx.Module):
    def __init__(self, rngs):
      for name in names[:3]:
        setattr(self, name, nnx.LinearGeneral(8, (2, 4), rngs=rngs))
      setattr(
        self, names[3], nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)
      )

  q, k, v, o = names
  assert _specs(_nnx(Attention)) == {
    **{f'{name}/kernel': _INPUT for name in (q, k, v)},
    **{f'{name}/bias': _HEADS_BIAS for name in (q, k, v)},
    f'{o}/kernel': _OUTPUT,
    f'{o}/bias': _BIAS,
  }


class _LinenModel(linen.Module):
  @linen.compact
  def __call__(self, tokens, image, signal):
    x = linen.Embed(10, 8)(tokens)
    x = linen.Dense(6)(linen.LayerNorm()(x))
    x = linen.DenseGeneral(6)(linen.RMSNorm()(x))
    x = linen.DenseGeneral((2, 3), name='query')(x)
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


def test_linen_layers():
  params = _linen(
    _LinenModel(), ((2, 3), jnp.int32), _floats(1, 4, 4, 5), _floats(1, 4, 5)
  )
  assert _specs(params) == {
    'Embed_0/embedding': _MATRIX,
    'LayerNorm_0/scale': _BIAS,
    'LayerNorm_0/bias': _BIAS,
    'Dense_0/kernel': _MATRIX,
    'Dense_0/bias': _BIAS,
    'RMSNorm_0/scale': _BIAS,
    'DenseGeneral_0/kernel': _MATRIX,
    'DenseGeneral_0/bias': _BIAS,
    'query/kernel': _INPUT,
    'query/bias': _HEADS_BIAS,
    'out/kernel': _OUTPUT,
    'out/bias': _BIAS,
    'GroupNorm_0/scale': _BIAS,
    'GroupNorm_0/bias': _BIAS,
    'BatchNorm_0/scale': _BIAS,
    'BatchNorm_0/bias': _BIAS,
    'Conv_0/kernel': ((0, 1, 2), (3,)),
    'Conv_0/bias': _BIAS,
    'Conv_1/kernel': ((0, 1), (2,)),
    'Conv_1/bias': _BIAS,
  }


def test_nnx_layers():
  assert _specs(_nnx(_NnxModel)) == {
    'embed/embedding': _MATRIX,
    'layer_norm/scale': _BIAS,
    'layer_norm/bias': _BIAS,
    'rms_norm/scale': _BIAS,
    'batch_norm/scale': _BIAS,
    'batch_norm/bias': _BIAS,
    'linear/kernel': _MATRIX,
    'linear/bias': _BIAS,
    'einsum/kernel': _MATRIX,
    'general/kernel': _MATRIX,
    'general/bias': _BIAS,
    'conv_1d/kernel': ((0, 1), (2,)),
    'conv_1d/bias': _BIAS,
    'conv_2d/kernel': ((0, 1, 2), (3,)),
    'conv_2d/bias': _BIAS,
    'up_conv/kernel': ((0, 1, 2), (3,)),
    'up_conv/bias': _BIAS,
  }


# Scanned layers.


class _LinenBlock(linen.Module):
  @linen.compact
  def __call__(self, x, _):
    x = linen.MultiHeadDotProductAttention(2, name='attention')(x)
    return linen.Dense(8, name='mlp')(linen.RMSNorm(name='norm')(x)), None


class _NnxBlock(nnx.Module):
  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
    self.norm = nnx.RMSNorm(8, rngs=rngs)
    self.mlp = nnx.Linear(8, 8, rngs=rngs)


_BLOCK = {
  **{f'attention/{k}': v for k, v in (_ATTENTION | _ATTENTION_BIASES).items()},
  'norm/scale': _BIAS,
  'mlp/kernel': _MATRIX,
  'mlp/bias': _BIAS,
}


def _below(prefix, specs):
  return {f'{prefix}/{path}': spec for path, spec in specs.items()}


def test_linen_scan():
  class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
      blocks = linen.scan(
        _LinenBlock,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=3,
      )
      return linen.Dense(4, name='head')(blocks(name='blocks')(x, None)[0])

  params = _linen(Model(), _floats(1, 3, 8))
  assert params['blocks']['attention']['query']['kernel'].shape == (3, 8, 2, 4)
  assert _specs(params, stacked={'blocks/': 1}) == {
    **_below('blocks', _stacked(_BLOCK)),
    'head/kernel': _MATRIX,
    'head/bias': _BIAS,
  }


def test_nnx_vmap():
  class Model(nnx.Module):
    def __init__(self, rngs):
      @nnx.split_rngs(splits=3)
      @nnx.vmap
      def make(rngs):
        return _NnxBlock(rngs)

      self.blocks = make(rngs)
      self.head = nnx.Linear(8, 4, rngs=rngs)

  params = _nnx(Model)
  assert params['blocks']['mlp']['bias'].shape == (3, 8)
  assert _specs(params, stacked={'^blocks/': 1}) == {
    **_below('blocks', _stacked(_BLOCK)),
    'head/kernel': _MATRIX,
    'head/bias': _BIAS,
  }


def _shape(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_the_largest_number_of_stacked_axes_counts():
  experts = {'kernel': _shape(3, 4, 8, 6), 'bias': _shape(3, 4, 6)}
  params = {'blocks': {'experts': experts, 'mlp': {'kernel': _shape(3, 8, 6)}}}
  stacked = {'experts': 2, 'blocks': 1}
  assert _specs(params, stacked=stacked) == {
    'blocks/experts/kernel': ((2,), (3,)),
    'blocks/experts/bias': ((), (2,)),
    'blocks/mlp/kernel': ((1,), (2,)),
  }


def test_stacked_norms_keep_a_spec():
  params = {'blocks': {'temperature': {'scale': _shape(3)}}}
  assert _specs(params, stacked={'blocks': 1}) == {
    'blocks/temperature/scale': ((), ())
  }


def test_stacked_axes_that_do_not_lead():
  # As in MaxText, whose kernels are (model, layers, heads, head_dim).
  params = {
    'layers': {
      'query': {'kernel': _shape(8, 3, 2, 4), 'bias': _shape(2, 3, 4)},
      'mlp': {'kernel': _shape(8, 3, 6)},
      'norm': {'scale': _shape(8, 3)},
    }
  }
  assert _specs(params, stacked={'layers/': (1,)}) == {
    'layers/query/kernel': ((0,), (2, 3)),
    'layers/query/bias': ((), (0, 2)),
    'layers/mlp/kernel': ((0,), (2,)),
    'layers/norm/scale': ((), (0,)),
  }
  last = {'mlp': {'kernel': _shape(8, 6, 3)}}
  assert _specs(last, stacked={'mlp': [-1]}) == {'mlp/kernel': ((0,), (1,))}
  for axes in (3, -1, (2,), (-3,)):
    with pytest.raises(ValueError, match=r"stacked\['norm'\] must name"):
      _specs({'norm': {'scale': _shape(8, 3)}}, stacked={'norm': axes})


def test_a_matrix_named_w_is_a_kernel():
  # As in Haiku and gemma.
  params = {'linear': {'w': _shape(8, 6)}, 'q_proj': {'w': _shape(3, 8, 4)}}
  with pytest.raises(ValueError, match='not recognized: q_proj/w'):
    merit_optax.flax_dimension_numbers(params)
  assert _specs(params, overrides={'q_proj/w': _Spec((0,), (1, 2))}) == {
    'linear/w': _MATRIX,
    'q_proj/w': ((0,), (1, 2)),
  }
  assert _specs({'w': _shape(3, 8, 6)}, stacked={'w': 1}) == {'w': ((1,), (2,))}


@pytest.mark.parametrize(
  'name',
  [
    'conv',
    'conv1',
    'Conv_0',
    'patch_conv',
    'DepthwiseConv',
    'conv_up',
    'ConvTranspose_0',
    'convolution',
    'Convolution2D',
  ],
)
def test_names_of_convolutions(name):
  params = {name: {'kernel': _shape(3, 3, 8, 4)}}
  assert _specs(params) == {f'{name}/kernel': ((0, 1, 2), (3,))}


# Unknown parameters.


def test_unknown_parameters_are_all_named():
  params = {
    'dense': {'kernel': _shape(8, 6)},
    'lora': {'lora_a': _shape(8, 2)},
    'layers': [{'mlp': {'kernel': _shape(3, 8, 6)}}],
    'table': _shape(2, 3),
  }
  with pytest.raises(ValueError, match='not recognized') as error:
    merit_optax.flax_dimension_numbers(params)
  text = str(error.value)
  assert 'lora/lora_a (8, 2)' in text
  assert 'layers/0/mlp/kernel (3, 8, 6)' in text
  assert 'table (2, 3)' in text
  assert 'dense' not in text
  # What to do about it.
  assert 'stacked' in text
  assert 'overrides' in text


@pytest.mark.parametrize(
  ('path', 'shape'),
  [
    ('query/kernel', (3, 8, 2, 4)),  # Scanned, but nothing says so.
    ('out/kernel', (3, 2, 4, 8)),
    ('mlp/kernel', (8, 2, 4)),
    ('monkey/kernel', (8, 2, 4)),  # Not a key.
    ('pout/kernel', (2, 4, 8)),
    ('output_gate/kernel', (2, 4, 8)),
    ('query_gate/kernel', (8, 2, 4)),
    ('about/kernel', (2, 4, 8)),
    ('unconventional/kernel', (3, 8, 4)),
    ('reconv/kernel', (3, 8, 4)),
    ('Convert_0/kernel', (3, 8, 4)),
    ('dense/kernel', (8,)),
    ('embed/embedding', (2, 3, 4)),
  ],
)
def test_kernels_that_are_not_guessed(path, shape):
  owner, leaf = path.split('/')
  with pytest.raises(ValueError, match=f'not recognized: {path}'):
    merit_optax.flax_dimension_numbers({owner: {leaf: _shape(*shape)}})


# Overrides.


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
    'table': None,
  }
  # Axes of an override count from the whole array, stacked or not.
  assert _specs(params, stacked={'blocks/': 1}, overrides=overrides) == {
    'blocks/general/kernel': ((1,), (2, 3)),
    'dense/kernel': (1, 0),
    'table': None,
    'other/kernel': _MATRIX,
  }


def test_the_first_override_that_fits_counts():
  params = {'dense': {'kernel': _shape(8, 6)}}
  overrides = {'kernel': _Spec(1, 0), 'dense': None}
  assert _specs(params, overrides=overrides) == {'dense/kernel': (1, 0)}


# Given to the optimizer.


@pytest.mark.skipif(not hasattr(nnx, 'as_pure'), reason='needs flax 0.12.7')
@pytest.mark.parametrize('as_function', [False, True])
def test_an_nnx_optimizer_takes_the_specs(as_function):
  model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
  pure = nnx.as_pure(nnx.state(model, nnx.Param))
  specs = merit_optax.flax_dimension_numbers
  if not as_function:
    specs = specs(pure)
  tx = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  with warnings.catch_warnings(action='error', category=UserWarning):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  updates, _ = jax.jit(tx.update)(pure, tx.init(pure), pure)
  expected = optax.apply_updates(pure, updates)
  gradients = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
  nnx.jit(nnx.Optimizer.update)(optimizer, model, gradients)
  got = nnx.as_pure(nnx.state(model, nnx.Param))
  for name in ('query', 'out'):
    assert jnp.allclose(got[name]['kernel'], expected[name]['kernel'])
    assert not jnp.allclose(got[name]['kernel'], pure[name]['kernel'])


def test_an_nnx_state_gives_the_specs_of_its_pure_tree():
  model = nnx.eval_shape(lambda: _NnxModel(nnx.Rngs(0)))
  state = nnx.state(model, nnx.Param)
  values = {
    path.removesuffix('/value'): spec for path, spec in _specs(state).items()
  }
  assert values == _specs(nnx.to_pure_dict(state))
  assert 'kernel/value' not in merit_optax.describe(
    state, weight_dimension_numbers=merit_optax.flax_dimension_numbers
  )


def test_a_leaf_named_value_keeps_its_name():
  projections = {
    name: jnp.zeros((8, 2, 4)) for name in ('query', 'key', 'value')
  }
  specs = {'attn/(query|key)$': _Spec(0, (1, 2)), 'attn/value$': None}
  assert _specs({'attn': projections}, overrides=specs) == {
    'attn/query': (0, (1, 2)),
    'attn/key': (0, (1, 2)),
    'attn/value': None,
  }


@chex.dataclass(frozen=True)
class _Projections:
  query: jax.Array
  key: jax.Array
  value: jax.Array


def test_an_attribute_named_value_keeps_its_name():
  # Only a variable of nnx, which holds nothing else, has another one.
  params = {'attn': _Projections(**{
    name: jnp.zeros((8, 2, 4)) for name in ('query', 'key', 'value')
  })}  # fmt: skip
  overrides = {'attn/(query|key|value)$': _Spec(0, (1, 2))}
  specs = merit_optax.flax_dimension_numbers(params, overrides=overrides)
  table = merit_optax.describe(params, weight_dimension_numbers=specs)
  assert 'attn/value' in table
  updates = merit_optax.update_statistics(params, params)
  assert {x.split('/')[1] for x in updates} == {'query', 'key', 'value'}


def test_patterns_may_be_compiled():
  params = {'up': {'kernel': _shape(8, 6)}}
  found = _specs(params, overrides={re.compile('up/'): _Spec(1, 0)})
  assert found == {'up/kernel': (1, 0)}
  unused = {re.compile('down/'): None, re.compile('out/'): None}
  with pytest.raises(ValueError, match='match none: .*down/.*out/'):
    merit_optax.flax_dimension_numbers(params, overrides=unused)


def test_the_function_sees_a_part_of_the_parameters():
  params = {
    'blocks': {'up': {'kernel': jnp.ones((2, 3, 4))}},
    'experts': {'up': {'kernel': jnp.ones((2, 3, 4))}},
    'position': jnp.ones((1, 3, 4)),
  }
  numbers = functools.partial(
    merit_optax.flax_dimension_numbers,
    stacked={'blocks/': 1, 'experts/': 1},
    overrides={'^position$': None},
  )
  mask = {'blocks': True, 'experts': True, 'position': False}
  merit = merit_optax.merit(
    0.1, weight_dimension_numbers=numbers, trust_ratio_mask=mask
  )
  masked, whole = (
    optimizer.update(params, optimizer.init(params), params)[0]
    for optimizer in (
      merit,
      merit_optax.merit(0.1, weight_dimension_numbers=numbers),
    )
  )
  for name in ('blocks', 'experts'):
    assert jnp.array_equal(
      masked[name]['up']['kernel'], whole[name]['up']['kernel']
    )
  optimizer = optax.partition(
    {
      'merit': merit_optax.merit(0.1, weight_dimension_numbers=numbers),
      'adam': optax.adam(0.1),
    },
    {'blocks': 'merit', 'experts': 'adam', 'position': 'adam'},
  )
  optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize('argument', ['stacked', 'overrides'])
def test_patterns_that_match_nothing_are_named(argument):
  params = {'blocks': {'kernel': jnp.zeros((2, 2))}}
  with pytest.raises(ValueError, match="none: \\['blokcs/'\\]"):
    entry = 1 if argument == 'stacked' else None
    merit_optax.flax_dimension_numbers(params, **{argument: {'blokcs/': entry}})
