"""The table of `describe`."""

import functools
import re
import textwrap

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal

_Spec = optax.contrib.MuonDimensionNumbers
_Fused = merit_optax.FusedDimensionNumbers


def _shapes(**shapes):
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }


def test_matrices_stacks_vectors_scalars_and_empty_arrays():
  # By their shapes, as of a model that is not made yet.
  params = _shapes(
    a=(1,),
    attention=(12, 64, 4, 16),
    bias=(12, 64),
    empty=(0, 3),
    experts=(12, 8, 64, 32),
    head=(2, 3),
    masked=(2, 3, 4),
    s=(),
  )
  specs = dict.fromkeys(('a', 'empty', 'head', 'masked', 'none', 's'))
  specs |= {'attention': _Spec(1, (2, 3)), 'bias': _Spec((), (1,))}
  specs |= {'experts': _Spec((-1,), (-2,))}
  optimizer = merit_optax.merit(
    0.1,
    weight_dimension_numbers=specs,
    trust_ratio_mask=dict.fromkeys(specs, True) | {'masked': False},
  )
  expected = """
    parameter  shape            part     matrices      products
    a          (1,)             vectors  1 x 1         -
    attention  (12, 64, 4, 16)  hidden   12 x 64 x 64  -
    bias       (12, 64)         vectors  12 x 64       -
    empty      (0, 3)           vectors  1 x 0         -
    experts    (12, 8, 64, 32)  ?        96 x 32 x 64  -
    head       (2, 3)           others   1 x 6         -
    masked     (2, 3, 4)        ?        -             -
    s          ()               vectors  1 x 1         -
    """
  table = merit_optax.describe(params | {'none': None}, optimizer)
  assert table == textwrap.dedent(expected).strip()


@pytest.mark.parametrize(
  'hidden, up, w',
  [
    (None, 'hidden', '?'),
    (['^w$'], 'others', 'hidden'),
    ({'mlp': False, 'embedding': False, 'w': True}, 'others', 'hidden'),
  ],
)
def test_parts(hidden, up, w):
  params = {'mlp': {'up': _shapes(kernel=(2, 3), bias=(3,))}}
  params |= _shapes(embedding=(5, 2), w=(2, 3))
  table = merit_optax.describe(params, merit_optax.muon(0.1, hidden=hidden))
  assert {name: part for name, (part, _) in _columns(table).items()} == {
    'embedding': 'others',
    'mlp/up/bias': 'vectors',
    'mlp/up/kernel': up,
    'w': w,
  }


_KERNELS = {
  'attention/query/kernel': lambda d, h, f: (d, h, f),
  'attention/out/kernel': lambda d, h, f: (h, f, d),
  'mlp/up/kernel': lambda d, h, f: (d, 3 * f),
  'mlp/down/kernel': lambda d, h, f: (3 * f, d),
  'embedding': lambda d, h, f: (11, d),
  'mlp/up/bias': lambda d, h, f: (3 * f,),
  'conv/kernel': lambda d, h, f: (3, h, d),
}


def _columns(table):
  """Returns the part and the matrices of each parameter."""
  header, *lines = table.splitlines()
  cells = [re.split('  +', line) for line in lines if '  ' in line]
  part, matrices = map(re.split('  +', header).index, ('part', 'matrices'))
  return {x[0]: (x[part], x[matrices]) for x in cells}


@hypothesis.settings(max_examples=3)
@hypothesis.given(
  st.sampled_from([(4, 2, 3), (3, 4, 2)]),
  st.sets(st.sampled_from([*_KERNELS]), min_size=1),
  st.sampled_from([0, 2]),
)
def test_the_table_has_what_muon_orthogonalizes(sizes, names, layers):
  names |= {'mlp/up/kernel', 'attention/query/kernel', 'attention/out/kernel'}
  shapes = {
    name: (layers,) * (layers > 0) + _KERNELS[name](*sizes) for name in names
  }
  specs = functools.partial(
    merit_optax.flax_dimension_numbers, stacked={'': int(layers > 0)}
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    merit_optax.muon(
      -5.0,
      others=optax.sgd(0.0),
      weight_dimension_numbers=specs if layers else None,
      ns_coeffs='polar_express',
      ns_steps=9,
    ),
  )
  params = {name: normal(i, shapes[name]) for i, name in enumerate(shapes)}
  table = _columns(merit_optax.describe(params, optimizer))
  state = optimizer.init(params)
  updates, _ = jax.jit(optimizer.update)(params, state, params)
  for name, update in updates.items():
    part, matrices = table[name]
    is_hidden = part == 'hidden'
    assert is_hidden == bool(np.any(update)) == (matrices != '-'), name
    if is_hidden:
      count, m, n = map(int, matrices.split(' x '))
      values = np.linalg.svd(np.reshape(update, (count, m, n)))[1]
      np.testing.assert_allclose(values / max(m, n) ** 0.5, 1.0, rtol=0.1)


def test_the_table_of_a_partition_and_of_a_chain():
  params = _shapes(w=(2, 3, 4), embedding=(5, 2))
  spec = _Spec(0, (1, 2))
  chain = optax.chain(
    merit_optax.scale_by_muon(weight_dimension_numbers=spec),
    merit_optax.scale_by_shape(max, weight_dimension_numbers=_Spec(-2, -1)),
  )
  both = merit_optax.partition_hidden(chain, optax.sgd(0.1), hidden='w')
  expected = [
    ('parameter', 'shape', 'part', 'matrices', 'products'),
    ('embedding', '(5, 2)', 'others', '-', '-'),
    ('w', '(2, 3, 4)', 'hidden', '1 x 2 x 12; 2 x 3 x 4', 'on one device'),
  ]
  for _ in range(2):  # A trace is not remembered.
    lines = merit_optax.describe(params, both).splitlines()
    assert [(*re.split('  +', line),) for line in lines] == expected
  table = merit_optax.describe(params, merit_optax.merit(0.1))
  assert _columns(table)['embedding'] == ('others', '1 x 5 x 2')
  assert '\ninit warns: These parameters have more than two axes' in table


def test_without_an_optimizer_it_has_what_plain_ones_read():
  params = _shapes(**{'attn/query/kernel': (8, 2, 4), 'attn/bias': (3,)})
  header, bias, query, note = merit_optax.describe(params).splitlines()
  assert header.split()[3:] == ['merit', 'muon', 'products']
  assert re.split('  +', bias)[3:] == ['1 x 3', '-', '-']
  assert re.split('  +', query)[3:5] == ['8 x 2 x 4', '1 x 8 x 8']
  assert note.startswith('merit warns: These parameters have more than two')
  params |= _shapes(**{'attn/qkv/kernel': (3, 8, 2, 4)})
  table = merit_optax.describe(params)
  assert 'muon raises: params holds parameters that are not rec' in table


def test_products_on_a_mesh():
  params = _shapes(blocks=(8, 64, 64), embedding=(6, 64))

  def products(shardings):
    optimizer = merit_optax.muon(
      0.1,
      hidden='blocks',
      weight_dimension_numbers=_Spec(-2, -1),
      shardings=shardings,
    )
    _, blocks, embedding = merit_optax.describe(params, optimizer).splitlines()
    assert embedding.endswith('  -')
    return re.split('  +', blocks)[-1]

  with pytest.raises(ValueError, match=r'^shardings name axes .*jax.set_mesh'):
    products(P('fsdp'))
  assert products(None) == 'on one device'
  with jax.set_mesh(make_mesh(data=2, fsdp=4)):
    assert products(None) == 'whole, over fsdp, moved by the compiler'
    assert products({'blocks': P(None, 'data', 'fsdp')}) == (
      'whole, over data, fsdp'
    )
    assert products(P('fsdp')) == 'whole already'
  with jax.set_mesh(make_mesh(x=8)):
    assert products(None) == 'left to the compiler'


def test_matrices_side_by_side_are_counted_by_their_sizes():
  params = _shapes(heads=(2, 8, 12), grouped=(8, 12), tall=(12, 8))
  specs = {'heads': _Fused(1, 2, 4), 'grouped': _Fused(0, 1, (8, 2, 2))}
  specs['tall'] = _Fused(1, 0, 3)
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  table = _columns(merit_optax.describe(params, optimizer))
  assert {name: matrices for name, (_, matrices) in table.items()} == {
    'heads': '8 x 8 x 3',
    'grouped': '1 x 8 x 8 + 2 x 8 x 2',
    'tall': '3 x 8 x 4',
  }


@pytest.mark.parametrize(
  'hidden, note',
  [
    (None, "No parameter's name tells that it is a hidden matrix"),
    ('no', "hidden must match parameters, got 'no'"),
  ],
)
def test_an_error_of_init_follows_a_table_of_what_is_known(hidden, note):
  optimizer = merit_optax.muon(0.1, hidden=hidden)
  table = merit_optax.describe(_shapes(a=(2, 3), bias=(3,)), optimizer)
  assert _columns(table) == {'a': ('?', '?'), 'bias': ('vectors', '?')}
  assert f'\ninit raises: {note}' in table


@hypothesis.given(
  st.sampled_from(['bias', 'norm/weight', 'ln/kernel', 'up', 'wte', 'q_bias']),
  st.lists(st.integers(2, 4), min_size=1, max_size=3),
  st.sampled_from([_Spec(-2, -1), _Spec((), (-1,)), _Fused(-2, -1, 1), None]),
)
def test_stacked_vectors_taken_as_matrices_are_noted(name, shape, spec):
  params = _shapes(**{f'layers/{name}': tuple(shape)}, w=(3, 3))
  specs = {f'layers/{name}': spec if len(shape) > 1 else None, 'w': _Spec(0, 1)}
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  table = merit_optax.describe(params, optimizer)
  is_vector = len(shape) > 1 and name not in ('up', 'wte')
  is_matrix = spec is not None and spec[0] != ()
  notes = table.split('init takes biases or scales')[1:]
  assert len(notes) == (is_vector and is_matrix)
  assert all(f': layers/{name} {tuple(shape)}. ' in text for text in notes)


# Transforms of Optax that initialize another, and may change the paths.
_AROUND = {
  'lookahead': lambda x: optax.lookahead(x, 2, 0.5),
  'multi_steps': lambda x: optax.MultiSteps(x, 2),
  'finite': lambda x: optax.apply_if_finite(x, 2),
  'chain': lambda x: optax.chain(optax.clip(1.0), x),
  'partition': lambda x: optax.partition({'a': x}, lambda _: 'a'),
}


@pytest.mark.parametrize('name', _AROUND)
def test_transforms_around_an_optimizer_change_nothing(name):
  params = {'mlp': {'up': _shapes(kernel=(2, 3)), 'down': _shapes(bias=(2,))}}
  plain = merit_optax.muon(0.1)
  expected = _columns(merit_optax.describe(params, plain))
  if name == 'lookahead':
    params = optax.LookaheadParams(params, params)
    expected = {f'fast/{path}': x for path, x in expected.items()}
  found = _columns(merit_optax.describe(params, _AROUND[name](plain)))
  assert found.items() >= expected.items()


@pytest.mark.parametrize('bad', [merit_optax.muon, 0.02, 'muon', {}])
@pytest.mark.parametrize(
  'call',
  [
    lambda x, params: merit_optax.describe(params, x),
    merit_optax.state_shardings,
  ],
)
def test_what_is_no_optimizer_is_refused(call, bad):
  hint = r' Call it: muon\(\.\.\.\)' if callable(bad) else '$'
  with pytest.raises(ValueError, match=f'^optimizer must be .*{hint}'):
    call(bad, _shapes(w=(2, 3)))
