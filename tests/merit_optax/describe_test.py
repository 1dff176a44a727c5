"""The table of `describe`."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh

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


def test_products_on_a_mesh():
  params = _shapes(
    blocks=(6, 64, 64),
    embedding=(6, 64),
    large=(2**15, 2**14),
    weight_wise=(4,),
  )
  describe = functools.partial(
    merit_optax.describe, params, hidden='blocks|large'
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
