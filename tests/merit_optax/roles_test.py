"""Roles of parameters, by the names that public models have."""

import csv
import itertools
from pathlib import Path

from flax import nnx, traverse_util
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from merit_optax.matrices.roles import roles

_TABLE = Path(__file__).parents[1] / 'data' / 'parameter_names.tsv'
# Names without a model, each of which stands beside an embedding of tokens.
_SINGLE = 'single'
_EMBEDDING = 'token_embedding'


def _read_models():
  """Returns the rows of each model: name, shape, kind and role."""
  with _TABLE.open() as file:
    rows = list(csv.DictReader(file, delimiter='\t'))
  models = {}
  for i, row in enumerate(rows):
    shape = tuple(map(int, row['shape'].split('x')))
    is_single = row['project'] == _SINGLE
    model = (f'{_SINGLE} {i}' if is_single else row['project']), is_single
    models.setdefault(model, []).append(
      (row['name'], shape, row['kind'], row['role'])
    )
  return models


_MODELS = _read_models()
_each_model = pytest.mark.parametrize(
  ('model', 'rows'), _MODELS.items(), ids=[name for name, _ in _MODELS]
)


def _shape(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _nested(model, rows):
  """Returns the tree of a model, whose names are separated as they may be."""
  tree = {
    tuple(name.replace('.', '/').split('/')): _shape(*shape)
    for name, shape, *_ in rows
  }
  if model[1]:
    tree[_EMBEDDING,] = _shape(50, 8)
  return traverse_util.unflatten_dict(tree)


def _by_name(tree):
  return {
    '/'.join(path): role
    for path, role in traverse_util.flatten_dict(tree).items()
  }


# Public models.


@_each_model
def test_of_public_models(model, rows):
  found = _by_name(roles(_nested(model, rows)))
  if model[1]:
    assert found.pop(_EMBEDDING) == 'other'
  expected = {name.replace('.', '/'): role for name, _, _, role in rows}
  assert found == expected


def test_that_the_table_never_takes_another_array_for_a_hidden_matrix():
  for name, _, kind, role in itertools.chain(*_MODELS.values()):
    assert kind == role or 'unknown' in (kind, role), name


@_each_model
@pytest.mark.parametrize('separator', ['.', '/', None])
def test_of_flat_names(model, rows, separator):
  tree = _nested(model, rows)
  flat = traverse_util.flatten_dict(tree, sep=separator)
  expected = traverse_util.flatten_dict(roles(tree), sep=separator)
  assert roles(flat) == expected


@hypothesis.given(
  st.sampled_from(sorted(_MODELS)), st.integers(0, 6), st.randoms()
)
def test_of_names_that_are_joined_in_part(model, depth, random):
  """A key holds some of the names along a path, as Haiku's modules do."""
  leaves = traverse_util.flatten_dict(_nested(model, _MODELS[model]))
  names = sorted(leaves)
  random.shuffle(names)

  def joined(values):
    return {
      '/'.join(name[:depth]): {} for name in names if len(name) > depth
    } | {'/'.join(name): values[name] for name in names if len(name) <= depth}

  def nested(values):
    tree = joined(values)
    for name in names:
      if len(name) > depth:
        tree['/'.join(name[:depth])]['.'.join(name[depth:])] = values[name]
    return tree

  expected = traverse_util.flatten_dict(roles(_nested(model, _MODELS[model])))
  assert roles(nested(leaves)) == nested(expected)


@_each_model
def test_of_a_branch_alone_takes_no_other_array_for_a_hidden_matrix(
  model, rows
):
  """As optax.partition has it: what another optimizer has is masked out."""
  for kept in ('hidden', 'other'):
    tree = {
      name: _shape(*shape) if kind == kept else optax.MaskedNode()
      for name, shape, kind, _ in rows
    }
    found = roles(tree)
    for name, _, kind, role in rows:
      if kind != kept:
        assert found[name] == optax.MaskedNode()
      elif kept == 'hidden' and not model[1]:
        assert found[name] == role
      elif kept == 'other':
        assert found[name] != 'hidden', name


# Names that say nothing.


@hypothesis.given(
  st.dictionaries(
    st.text('fgjmnrsz_', min_size=4).filter(
      lambda name: len(name.strip('_')) > 3 and 'norm' not in name
    ),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
    min_size=1,
  )
)
def test_of_unknown_names(shapes):
  tree = {
    name: {'kernel': _shape(*shape), 'bias': _shape(shape[1])}
    for name, shape in shapes.items()
  }
  found = roles(tree)
  unknown = {'kernel': 'unknown', 'bias': 'vector'}
  assert found == dict.fromkeys(tree, unknown)


def test_of_an_array_alone():
  assert roles(np.ones((2, 2))) == 'unknown'
  assert roles(np.ones(2)) == 'vector'


def test_of_lists():
  params = [np.ones((2, 2)), {'layers': [{'attn': [np.ones((2, 2))]}]}]
  assert roles(params) == ['unknown', {'layers': [{'attn': ['hidden']}]}]


# Shapes.


def test_the_vocabulary_tells_heads_of_any_name():
  params = {
    'wte': _shape(50, 8),
    'upwards': {'kernel': _shape(8, 50)},
    'sideways': {'kernel': _shape(8, 49)},
  }
  found = roles(params)
  assert found['upwards']['kernel'] == 'other'
  assert found['sideways']['kernel'] == 'unknown'


@pytest.mark.parametrize('vocabulary', [4, 8, 32])
def test_a_vocabulary_as_long_as_a_width(vocabulary):
  params = {
    'wte': _shape(vocabulary, 8),
    'h': {
      'attn': {'c_attn': _shape(8, 24), 'c_proj': _shape(8, 8)},
      'mlp': {'c_fc': _shape(8, 32), 'c_proj': _shape(32, 8)},
    },
    'lm_head': _shape(8, vocabulary),
  }
  found = roles(params)
  assert {*jax.tree.leaves(found['h'])} == {'hidden'}
  assert found['wte'] == found['lm_head'] == 'other'


def test_a_hidden_name_of_an_output():
  params = {
    'embed': _shape(50, 8),
    'attn': {'q': _shape(8, 8), 'k': _shape(8, 8), 'out': _shape(8, 50)},
  }
  found = roles(params)
  assert found['attn'] == {'q': 'hidden', 'k': 'hidden', 'out': 'other'}


# Trees.


@pytest.mark.parametrize('params', [{}, [], None, optax.MaskedNode()])
def test_of_empty_trees(params):
  assert roles(params) == params


def test_of_absent_leaves():
  params = {
    'attn': {'query': np.ones((2, 2)), 'key': None},
    'lm_head': optax.MaskedNode(),
    'bias': np.ones(2),
  }
  assert roles(params) == {
    'attn': {'query': 'unknown', 'key': None},
    'lm_head': optax.MaskedNode(),
    'bias': 'vector',
  }


def test_of_nnx():
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.embed = nnx.Embed(50, 8, rngs=rngs)
      self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)

  params = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
  found = nnx.to_pure_dict(roles(params))
  assert found['embed']['embedding'] == 'other'
  for name in ('query', 'key', 'value', 'out'):
    assert found['attention'][name] == {'kernel': 'hidden', 'bias': 'vector'}
