"""The table of `describe`."""

import functools
import re
import textwrap

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal

_Spec = optax.contrib.MuonDimensionNumbers


def _shapes(**shapes):
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }


def _assert_table(params, table, **settings):
  expected = textwrap.dedent(table).strip()
  assert merit_optax.describe(params, **settings) == expected


def _parts(params, **settings):
  """Returns the part of each parameter."""
  header, *lines = merit_optax.describe(params, **settings).splitlines()
  place = header.index('part')
  return {line.split()[0]: line[place:].split()[0] for line in lines}


def test_matrices_stacks_vectors_scalars_and_empty_arrays():
  # By their shapes, as of a model that is not made yet.
  params = _shapes(
    a=(1,),
    attention=(12, 64, 4, 16),
    bias=(12, 64),
    empty=(0, 3),
    experts=(12, 8, 64, 32),
    head=(2, 3),
    s=(),
  )
  specs = dict.fromkeys(('a', 's', 'head', 'none'))
  specs |= {'attention': _Spec(1, (2, 3)), 'bias': _Spec((), (1,))}
  specs |= {'empty': _Spec(), 'experts': _Spec((-1,), (-2,))}
  _assert_table(
    params | {'none': None},
    """
    parameter  shape            part     matrices      ratios               decayed  products
    a          (1,)             vectors  1 x 1         weight               yes      -
    attention  (12, 64, 4, 16)  hidden   12 x 64 x 64  weight, row, column  yes      on one device
    bias       (12, 64)         vectors  12 x 64       weight               yes      -
    empty      (0, 3)           hidden   1 x 0 x 3     weight, row, column  yes      on one device
    experts    (12, 8, 64, 32)  hidden   96 x 32 x 64  weight, row, column  yes      on one device
    head       (2, 3)           others   1 x 6         weight               yes      -
    s          ()               vectors  1 x 1         weight               yes      -
    Of one element, which cannot change sign unless min_norm is above zero: a, s
    """,  # noqa: E501
    weight_dimension_numbers=specs,
    hidden='attention|empty|experts',
  )


def test_masks_and_an_order_of_ratios():
  _assert_table(
    {'blocks': [_shapes(b=(2,), w=(3, 2))], **_shapes(w=(2, 3, 4, 5))},
    """
    parameter   shape         part     matrices   ratios          decayed  products
    blocks/0/b  (2,)          vectors  -          none            no       -
    blocks/0/w  (3, 2)        hidden   -          none            yes      -
    w           (2, 3, 4, 5)  hidden   6 x 4 x 5  weight, column  yes      on one device
    """,  # noqa: E501
    hidden='w',
    weight_dimension_numbers=_Spec(-2, -1),
    ratios=['column', 'weight'],
    trust_ratio_mask={'blocks': False, 'w': True},
    mask=lambda params: jax.tree.map(lambda x: len(x.shape) > 1, params),
  )


@pytest.mark.parametrize(
  'hidden, up, w',
  [
    (None, 'hidden', 'not'),  # sure
    (['^w$'], 'others', 'hidden'),
    ({'mlp': False, 'embedding': False, 'w': True}, 'others', 'hidden'),
  ],
)
def test_parts(hidden, up, w):
  params = {'mlp': {'up': _shapes(kernel=(2, 3), bias=(3,))}}
  params |= _shapes(embedding=(5, 2), w=(2, 3))
  assert _parts(params, hidden=hidden) == {
    'embedding': 'others',
    'mlp/up/bias': 'vectors',
    'mlp/up/kernel': up,
    'w': w,
  }


# What an optimizer reads.


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
  if not layers:
    of_muon = _columns(merit_optax.describe(params))
    assert all(of_muon[x] == table[x] for x in table if table[x][1] != '-')


def test_the_table_of_a_partition_and_of_a_chain():
  params = _shapes(w=(2, 3, 4), embedding=(5, 2))
  spec = _Spec(0, (1, 2))
  chain = optax.chain(
    merit_optax.scale_by_muon(weight_dimension_numbers=spec, mesh_axes=None),
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
  with pytest.warns(UserWarning, match='more than two axes'):
    table = merit_optax.describe(params, merit_optax.merit(0.1))
  assert _columns(table)['embedding'] == ('others', '1 x 5 x 2')


def test_guesses_are_named_below_the_table():
  params = _shapes(**{'attn/query/kernel': (8, 2, 4), 'conv': (3, 2, 4)})
  *_, note = merit_optax.describe(params).splitlines()
  assert note.endswith('over their last two axes: attn/query/kernel, conv')
  params |= _shapes(**{'attn/qkv/kernel': (3, 8, 2, 4)})
  *_, note = merit_optax.describe(params).splitlines()
  assert 'muon raises: params holds parameters that are not rec' in note


def test_products_on_a_mesh():
  params = _shapes(
    blocks=(6, 64, 64),
    embedding=(6, 64),
    large=(2**15, 2**14),
    weight_wise=(4,),
  )
  describe = functools.partial(
    merit_optax.describe,
    params,
    hidden='blocks|large',
    weight_dimension_numbers=_Spec(-2, -1),
  )
  with jax.set_mesh(make_mesh(data=2, fsdp=4)):
    _, blocks, embedding, large, _ = describe().splitlines()
    assert blocks.endswith('  whole, over fsdp')
    assert embedding.endswith('  -')
    assert large.endswith('  left to the compiler')
    named = describe(mesh_axes=('data', 'fsdp'))
    assert 'whole, over data, fsdp' in named
    assert 'whole' not in describe(mesh_axes=None)


@pytest.mark.parametrize(
  'argument, value, message',
  [
    ('weight_dimension_numbers', _Spec(0, 2), r"of the parameter 'w' of shape"),
    ('ratios', ('rows',), 'must hold'),
    ('mask', {'v': True}, 'must be a tree'),
    ('hidden', 'nothing', 'must match parameters'),
    ('mesh_axes', 3, 'must be'),
  ],
)
def test_bad_arguments_are_named(argument, value, message):
  with pytest.raises(ValueError, match=f'^{argument} {message}'):
    merit_optax.describe(_shapes(w=(2, 3)), **{argument: value})
