"""The table of `describe`, to the letter."""

import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers


def _shapes(**shapes):
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }


def _text(table):
  return textwrap.dedent(table).strip()


def _assert_table(params, table, **settings):
  assert merit_optax.describe(params, **settings) == _text(table)


def test_matrices_stacks_vectors_scalars_and_what_is_empty():
  # By their shapes, as of a model that is not made yet.
  params = _shapes(
    a=(1,),
    attention=(12, 64, 4, 16),
    bias=(12, 64),
    empty=(0, 3),
    experts=(12, 8, 64, 32),
    s=(),
    weight_wise=(2, 3),
  )
  specs = dict.fromkeys(('a', 's', 'weight_wise', 'none'))
  specs |= {'attention': _Spec(1, (2, 3)), 'bias': _Spec((), (1,))}
  specs |= {'empty': _Spec(), 'experts': _Spec((-1,), (-2,))}
  _assert_table(
    params | {'none': None},
    """
    parameter    shape            matrices      ratios               decayed
    a            (1,)             1 x 1         weight               yes
    attention    (12, 64, 4, 16)  12 x 64 x 64  weight, row, column  yes
    bias         (12, 64)         12 x 64       weight               yes
    empty        (0, 3)           1 x 0 x 3     weight, row, column  yes
    experts      (12, 8, 64, 32)  96 x 32 x 64  weight, row, column  yes
    s            ()               1 x 1         weight               yes
    weight_wise  (2, 3)           1 x 6         weight               yes
    Of one element, which cannot change sign unless min_norm is above zero: a, s
    """,
    weight_dimension_numbers=specs,
  )
  _assert_table({}, 'parameter  shape  matrices  ratios  decayed')


def test_a_guess_masks_and_an_order_of_ratios():
  _assert_table(
    {'blocks': [_shapes(b=(2,), w=(3, 2))], **_shapes(w=(2, 3, 4, 5))},
    """
    parameter   shape         matrices   ratios          decayed
    blocks/0/b  (2,)          -          none            no
    blocks/0/w  (3, 2)        -          none            yes
    w           (2, 3, 4, 5)  6 x 4 x 5  weight, column  yes
    """,
    ratios=['column', 'weight'],
    trust_ratio_mask={'blocks': False, 'w': True},
    mask=lambda params: jax.tree.map(lambda x: len(x.shape) > 1, params),
  )


@pytest.mark.parametrize(
  'weight_decay, decayed',
  [(0.0, 'no'), (0, 'no'), (0.1, 'yes'), (None, 'yes'), (lambda _: 0, 'yes')],
)
def test_nothing_is_decayed_by_zero(weight_decay, decayed):
  table = merit_optax.describe(_shapes(w=(3, 2)), weight_decay=weight_decay)
  assert table.endswith(f'  {decayed}')


@pytest.mark.parametrize(
  'argument, value, message',
  [
    ('weight_dimension_numbers', _Spec(0, 2), r"of the parameter 'w' of shape"),
    ('ratios', ('rows',), 'must hold'),
    ('weight_decay', -1, 'must be'),
  ],
)
def test_bad_arguments_are_named(argument, value, message):
  with pytest.raises(ValueError, match=f'^{argument} {message}'):
    merit_optax.describe(_shapes(w=(2, 3)), **{argument: value})


# Partitions.

_PARTS = {
  'matrix': {
    'weight_dimension_numbers': {'blocks': _Spec(1, 2)},
    'mask': {'blocks': False, 'w': True, 'b': True},
    'weight_decay': 0.1,
  },
  'rest': {'ratios': ('weight',)},
  'other': None,
}


@pytest.mark.parametrize('as_function', [False, True])
def test_which_parameter_goes_to_which_part(as_function):
  params = {'blocks': [_shapes(w=(2, 3, 4))], **_shapes(w=(5, 4), b=(4,))}
  labels = {'blocks': 'matrix', 'w': 'rest', 'b': 'other'}
  parts = _PARTS | {3: None, 'none': {}}
  table = merit_optax.describe_partition(
    params, (lambda _: labels) if as_function else labels, parts
  )
  assert table == _text("""
    parameter   part    shape      matrices   ratios               decayed
    b           other   (4,)       -          -                    -
    blocks/0/w  matrix  (2, 3, 4)  2 x 3 x 4  weight, row, column  no
    w           rest    (5, 4)     1 x 5 x 4  weight               yes
    Parts without a parameter: 3, none
    """)


@pytest.mark.parametrize(
  'labels, message',
  [
    ({'w': 'rest', 'b': 'matrices'}, r"name parts.*\{'b': 'matrices'\}"),
    ({'w': 'rest', 'b': None}, r"name parts.*\{'b': None\}"),
    ({'w': 'rest'}, 'be a tree like params'),
  ],
)
def test_a_parameter_that_goes_nowhere_is_named(labels, message):
  with pytest.raises(ValueError, match=f'^param_labels must {message}'):
    merit_optax.describe_partition(_shapes(w=(5, 4), b=(4,)), labels, _PARTS)


@pytest.mark.parametrize(
  'parts', [['rest'], {'rest': optax.sgd(0.1)}, {'rest': {'learning_rate': 1}}]
)
def test_parts_that_are_no_settings_are_refused(parts):
  with pytest.raises(ValueError, match=r'^parts must map .* ratios, '):
    merit_optax.describe_partition(_shapes(w=(5, 4)), {'w': 'rest'}, parts)
