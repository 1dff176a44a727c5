"""Roles of parameters, by the names that public models have."""

import csv
import itertools
from pathlib import Path

from flax import traverse_util
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from merit_optax.optimizers.roles import roles

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
  tree = _nested(model, rows)
  # Keys may be tuples of names.
  flat = traverse_util.flatten_dict(tree)
  assert roles(flat) == traverse_util.flatten_dict(roles(tree))
  found = _by_name(roles(tree))
  if model[1]:
    assert found.pop(_EMBEDDING) == 'other'
  expected = {name.replace('.', '/'): role for name, _, _, role in rows}
  assert found == expected


def test_the_table_takes_no_other_array_for_a_hidden_matrix():
  for name, _, kind, role in itertools.chain(*_MODELS.values()):
    assert kind == role or 'unknown' in (kind, role), name


@hypothesis.given(
  st.sampled_from(sorted(_MODELS)), st.integers(0, 6), st.randoms()
)
def test_of_names_that_are_joined_in_part(model, depth, random):
  """A key holds some of the names along a path, as in Haiku, or all of them."""
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
def test_of_a_part_of_a_partition(model, rows):
  """No other array is taken for a hidden matrix."""
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


# Parts of a block.

_ATTENTIONS = [
  {'attn': {x: {'kernel': (8, 8)} for x in ('query', 'key', 'value', 'out')}},
  {'SelfAttention_0': {x: (8, 2, 4) for x in ('q', 'k', 'v')}},
  {'self_attention': {'qkv': {'w': (8, 24)}, 'proj': {'w': (8, 8)}}},
]
_LAYERS = [
  ('Dense_0', 'Dense_1'),
  ('w1', 'w2'),
  ('fc_in', 'fc_out'),
  ('layers/0', 'layers/2'),
  ('up_proj/kernel', 'down_proj/kernel'),
]
_MLP_WORDS = ['FFN', 'Mlp', 'feed_forward', 'FeedForward', 'ff', 'experts']
_TABLES = [
  *('conv', 'patch_embed', 'router', 'lm_head', 'codebook', 'mlp_head'),
  'moe_router',
]
# Of what tells a table, a window or an input, if it stands alone.
_OTHER_WORDS = [
  *('position', 'Positional', 'patch', 'time', 'conv', 'embed', 'relative'),
  *('token', 'head', 'wise', 'foo'),
]


@st.composite
def _mlp_names(draw):
  words = draw(st.lists(st.sampled_from(_OTHER_WORDS), max_size=3))
  name = '_'.join(draw(st.permutations([*words, draw(_MLP_WORDS_DRAWN)])))
  return name + draw(st.sampled_from(['', '_0', '_12']))


_MLP_WORDS_DRAWN = st.sampled_from(_MLP_WORDS)


def _stacked(tree, lead):
  return {
    name: _stacked(x, lead) if isinstance(x, dict) else _shape(*lead, *x)
    for name, x in tree.items()
  }


@hypothesis.given(
  _mlp_names(),
  st.sampled_from(_ATTENTIONS),
  st.sampled_from(_LAYERS),
  st.sampled_from([(), (3,)]),
  st.sampled_from(['block_0', 'foo', 'decoder/layers/1']),
)
def test_an_mlp_beside_an_attention_is_hidden_by_any_name(
  name, attention, layers, lead, parent
):
  # With a third axis, a convolution could be meant.
  hypothesis.assume(not (lead and 'conv' in name))
  up, down = layers
  block = _stacked({**attention, name: {up: (8, 32), down: (32, 8)}}, lead)
  params = {parent: block, 'wte': _shape(50, 8), 'lm_head': _shape(8, 50)}
  found = roles(params)
  assert found[parent][name] == {up: 'hidden', down: 'hidden'}
  assert found['wte'] == found['lm_head'] == 'other'


@hypothesis.given(
  st.sampled_from(_TABLES),
  st.sampled_from(_MLP_WORDS),
  st.sampled_from(_ATTENTIONS),
)
def test_a_table_in_an_mlp_or_beside_one_is_not_hidden(word, mlp, attention):
  tables = {'Dense_0': (3, 8, 32), 'Dense_1': (3, 32, 8)}
  if word.endswith(('router', 'head')):
    tables = {'fc1': (8, 8), 'fc2': (8, 4)}
  block = {**attention, mlp: {word: tables, 'up': (8, 32), 'down': (32, 8)}}
  found = roles({'block_0': _stacked({**block, word: tables}, ())})['block_0']
  assert 'hidden' not in {*found[word].values(), *found[mlp][word].values()}
  assert found[mlp]['up'] == found[mlp]['down'] == 'hidden'


@hypothesis.given(
  st.sampled_from(['gating', 'output', 'query', 'attn_out', 'MlpUp', 'lora']),
  st.lists(st.integers(2, 9), min_size=2, max_size=4),
  st.booleans(),
)
def test_a_b_is_a_bias_unless_an_a_stands_beside(stem, shape, is_factor):
  params = {f'{stem}_b': _shape(*shape), f'{stem}_w': _shape(16, 16)}
  if is_factor:
    params[f'{stem}_a'] = _shape(16, shape[0])
  found = roles({'layers': {'attention': params}})['layers']['attention']
  is_bias = found[f'{stem}_b'] == 'vector'
  assert is_bias == (stem != 'lora' and not is_factor)


_EXPERTS = {
  'named': {'experts': {'0': {'w1': (8, 32), 'w2': (32, 8)}}},
  'deep': {'ffn': {'0': {'expert_1': {'up': (8, 32), 'down': (32, 8)}}}},
  'stacked': {'wi_0': (4, 8, 32), 'wo': (4, 32, 8)},
}


@hypothesis.given(
  st.sampled_from(['gate', 'Gate_0', 'gate/kernel', 'gate.weight']),
  st.sampled_from([*_EXPERTS]),
  st.sampled_from(['mlp', 'block_sparse_moe', 'ffn']),
  st.booleans(),
)
def test_a_gate_of_experts_is_other(name, experts, where, is_torch):
  shape = (4, 8) if is_torch else (8, 4)
  layer = _EXPERTS[experts] | {name: shape}
  params = {'layers': {'0': {**_ATTENTIONS[0], where: layer}}}
  found = roles(_stacked(params, ()))['layers']['0']
  assert found[where][name] == 'other'
  assert {*jax.tree.leaves(found['attn'])} == {'hidden'}


@hypothesis.given(
  st.sampled_from(['gate', 'gate_proj', 'gate/kernel', 'w_gate', 'out_gate']),
  st.sampled_from([1, 2, 3]),
  st.booleans(),
  st.booleans(),
)
def test_a_gate_without_experts_is_not_left_to_adam_silently(
  name, heads, is_stacked, has_moe
):
  """Gates of attentions, of recurrent layers, and of blocks around them."""
  lead = (3,) if is_stacked else ()
  attention = {x: (8, 8 * heads) for x in ('q_proj', 'k_proj', 'v_proj')}
  gated = {
    'attn': {**attention, name: (8, 8 * heads), 'o_proj': (8 * heads, 8)},
    'gru': {'gate': (8, 8), 'candidate': (8, 8)},
  }
  if has_moe:
    gated['mlp'] = {'gate': (8, 4), **_EXPERTS['named']}
  triangle = {'gate': (8, 8), 'projection': (8, 16)}
  found = roles(
    _stacked({'block': gated, 'triangle_multiplication': triangle}, lead)
  )
  assert found['block']['attn'][name] == 'hidden'
  assert found['block']['gru']['gate'] in ('hidden', 'unknown')
  assert found['triangle_multiplication']['gate'] in ('hidden', 'unknown')
  if has_moe:
    assert found['block']['mlp']['gate'] == 'other'


# Shapes.


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


# Trees.


def test_of_absent_leaves():
  params = {
    'attn': {'query': np.ones((2, 2)), 'key': None},
    'lm_head': optax.MaskedNode(),
    'bias': np.ones(2),
  }
  assert roles({}) == {}
  assert roles(params) == {
    'attn': {'query': 'unknown', 'key': None},
    'lm_head': optax.MaskedNode(),
    'bias': 'vector',
  }
