"""Roles of parameters, from their names and shapes."""

import collections
from collections.abc import Iterator, Sequence
import functools
import re
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from merit_optax._internal.trees import path_keyer

Role: TypeAlias = Literal['hidden', 'other', 'vector', 'unknown']
Names: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[int, ...]


def _set(words: str) -> frozenset[str]:
  return frozenset(words.split())


# All words are in lower case and without numbers: those of 'Dense_0' are
# {'dense'}, those of 'W_Q' are {'w', 'q'}.

# Names of an array itself, or of a box around it.
_ARRAYS = _set('array kernel kernels param pytree w weight weights')
# First or last word of a bias or scale.
_VECTORS = _set(
  'alpha b beta bi bias biases bk bo bq bv gain gains gamma lambda ls offset '
  'scale scales sink sinks temperature'
)
_NORMS = _set(
  'norm norms ln layernorm rmsnorm batchnorm groupnorm instancenorm qknorm'
)
# In the name of a layer that computes the scale of a norm.
_ADAPTIVE = _set('ada adaptive dense linear modulation proj')
_EMBEDDINGS = _set(
  'emb embs embed embeds embedded embedder embedders embedding embeddings wte '
  'vocab vocabulary'
)
# Of what an embedding may be, other than of tokens.
_PLACES = _set(
  'patch patches patchify pe pos position positions positional rel relative '
  'rpe segment time timestep type wpe'
)
_TIMES = _set('time timestep')
_CONVOLUTIONS = _set('conv convs convolution')
_ROUTERS = _set('router routers routing')
# Inputs, and what has no inputs: tables, routers, windows, states.
_TABLES = (
  (_EMBEDDINGS | _PLACES - _TIMES - {'type', 'segment'})
  | (_CONVOLUTIONS | _ROUTERS)
  | _set('codebook codebooks decay register registers stem table tables')
  | _set('unembed unembedding')
)
# Last word of a parameter that stands in for a token.
_TOKENS = _set('token tokens latent latents prompt prompts')
# A_log and D of state-space models; an array that Equinox's Shared ties.
_WHOLE_NAMES = [_set('a log'), _set('d'), _set('shared')]
_HEADS = _set(
  'classification classifier cls critic head logit logits prediction '
  'predictions predictor qa readout score'
)
_OF_HEADS = _set('head proj')  # Projects the heads of an attention.
# A square one of these in a head changes features before they become logits.
_TRANSFORMS = _set('dense transform')
# Square matrices between layers and what comes after them.
_SQUARE = [
  _set('pooler'),
  _set('pre logits'),
  _set('project in'),
  _set('project out'),
  _set('vocab transform'),
]

_QKV = _set(
  'q k v query queries key keys value values kv qkv wq wk wv wkv wqkv'
)
_QUERIES = _set('q query queries')
_KEYS = _set('k key keys kv qkv wk wkv wqkv')
_EXPERTS = _set('expert experts')
# Parts of a block that mix tokens: attention, and recurrent layers.
_MIXERS = _set(
  'att attend attention attentions attn crossattention gqa lru mamba mha '
  'mixer mla mqa multihead qkv recurrent rglru selfattention ssm wqkv xattn'
)
_MLPS = _set(
  'expert experts feed feedforward ff ffn ffw ffwd glu intermediate mixing mlp '
  'mlps moe relu swiglu'
)
# What only a layer of an MLP is called, as fc1, wi_0, gate_proj.
_MLP_LAYERS = _set('down fc ffw gate gating lin up wi wo')
_OUTPUTS = _set('o out output wo')
_BLOCKS = _set('block blocks encoderblock decoderblock h layer layers stacked')
# Other words of matrices in a block. A name with any more words is not sure.
_PLAIN = (
  _ARRAYS | _QKV | _MIXERS | _MLPS | _MLP_LAYERS | _OUTPUTS | _TRANSFORMS
) | _set(
  'a activation b c cross dt einsum final fused h i in input linear local mm '
  'net proj projection receptance self shared sparse to vec with x y'
)
# Layers that undo the change of width by another one, but no first layers.
_PAIRED = (_PLAIN | _BLOCKS) - _set('in input x y')


class _Tree(NamedTuple):
  """Shapes by names; the names, and shapes of layers, below each parent.

  And the parents below which a name tells experts.
  """

  shapes: dict[Names, Shape]
  children: dict[Names, set[str]]
  shapes_below: dict[Names, set[Shape]]
  have_experts: set[Names]


def roles(params: Any) -> Any:
  """Returns the role of each parameter in a language or vision model.

  - ``'hidden'``: a matrix of an attention, a recurrent layer, an MLP or an
    expert, surely so by its names;
  - ``'other'``: an embedding, a head, a router, a table of positions, a token
    that is learned, or a parameter of a convolution or a state;
  - ``'vector'``: a bias or scale, maybe of stacked layers, and all with fewer
    than two axes;
  - ``'unknown'``: every other array with two or more axes.

  A matrix that has an axis as long as the vocabulary is ``'other'``, whatever
  its name. The vocabulary is known if the tree has an embedding of tokens.

  Args:
    params: Tree of arrays, or of their shapes. Slashes and dots in names, and
      tuples as keys of dictionaries, separate names like branches do.

  Returns:
    Tree of strings with the structure of ``params``.

  Examples:
    >>> import jax.numpy as jnp
    >>> roles({
    ...     'wte': jnp.zeros((50, 8)),
    ...     'h.0.attn.c_attn.weight': jnp.zeros((8, 24)),
    ...     'adapter': jnp.zeros((8, 8)),
    ... })
    {'adapter': 'unknown', 'h.0.attn.c_attn.weight': 'hidden', 'wte': 'other'}
  """
  keys = path_keyer(params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  names = [_split(path, keys(path)) for path, _ in leaves]
  shapes = [tuple(np.shape(leaf)) for _, leaf in leaves]
  # What is masked out still tells what stands beside it.
  absent = [
    _split(path, keys(path))
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      params, is_leaf=lambda x: not jax.tree.leaves(x)
    )
    if not jax.tree.leaves(leaf)
  ]
  tree = _make_tree(names, shapes, absent)
  found = [
    _role(name, shape, tree) for name, shape in zip(names, shapes, strict=True)
  ]
  vocabulary = _vocabulary(names, shapes, found)
  for i, shape in enumerate(shapes):
    is_matrix = len(shape) == 2 and found[i] in ('hidden', 'unknown')
    if is_matrix and not vocabulary.isdisjoint(shape):
      found[i] = 'other'
  return jax.tree.unflatten(jax.tree.structure(params), found)


def is_stack_of_vectors(role: Role, shape: Shape) -> bool:
  """Returns whether names tell a bias or scale, which has axes of layers."""
  return role == 'vector' and sum(size > 1 for size in shape) > 1


def _split(path: Sequence[Any], keys: Names) -> Names:
  """Returns the names along a path, also those that one key joins."""

  def parts() -> Iterator[str]:
    for entry, name in zip(path, keys, strict=False):
      key = getattr(entry, 'key', None)
      for part in key if isinstance(key, tuple) else (name,):
        yield from re.split('[/.]', str(part))

  return tuple(part for part in parts() if part)


@functools.lru_cache(maxsize=2**14)
def _words(name: str) -> list[str]:
  """Returns the words of snake_case and CamelCase, without numbers."""
  return [
    word.lower() for word in re.findall('[A-Z]+(?![a-z])|[A-Z]?[a-z]+', name)
  ]


def _owner(names: Names) -> list[str]:
  """Returns the words of the innermost name that says more than 'kernel'."""
  words = map(_words, reversed(names))
  return next((x for x in words if not _ARRAYS.issuperset(x)), [])


def _make_tree(
  names: list[Names], shapes: list[Shape], absent: list[Names]
) -> _Tree:
  tree = _Tree(
    dict(zip(names, shapes, strict=True)),
    collections.defaultdict(set),
    collections.defaultdict(set),
    set(),
  )
  for name in [*names, *absent]:
    last_expert = max(
      (i for i, x in enumerate(name) if not _EXPERTS.isdisjoint(_words(x))),
      default=-1,
    )
    for i, part in enumerate(name):
      tree.children[name[:i]].add(part)
      if i <= last_expert:
        tree.have_experts.add(name[:i])
      if name in tree.shapes and {*_owner(name[i:])} <= _PAIRED:
        tree.shapes_below[name[:i]].add(tree.shapes[name])
  return tree


def _vocabulary(
  names: list[Names], shapes: list[Shape], found: list[Role]
) -> set[int]:
  """Returns the longest sides of embeddings that are not widths of layers."""
  uses = collections.Counter(
    size
    for shape, role in zip(shapes, found, strict=True)
    if role == 'hidden'
    for size in {*shape}
  )
  longest, shortest = set[int](), set[int]()
  for name, shape, role in zip(names, shapes, found, strict=True):
    words = {word for part in name for word in _words(part)}
    is_of_tokens = words & _EMBEDDINGS and words.isdisjoint(_PLACES)
    is_table = role == 'other' and len(shape) == 2
    # An MLP has its width twice, an output has the vocabulary once.
    if is_of_tokens and is_table and uses[max(shape)] < 2:
      longest.add(max(shape))
      shortest.add(min(shape))
  # The longest side of an embedding of one class is the width of the others.
  return longest - shortest


def _role(names: Names, shape: Shape, tree: _Tree) -> Role:
  """Returns the role, whatever the vocabulary."""
  if len(shape) < 2:
    return 'vector'
  words = [_words(name) for name in names]
  last: list[str] = next((x for x in reversed(words) if {*x} - {'array'}), [])
  is_bias = not {*last[:1], *last[-1:]}.isdisjoint(_VECTORS)
  if (
    is_bias and _PLACES.isdisjoint(last) and not _is_factor(names, last, tree)
  ) or _is_norm(_owner(names)):
    return 'vector'
  if _is_mlp_beside_attention(names, shape, tree):
    return 'hidden'
  role = _role_by_path(names, shape, tree)
  if role == 'unknown':
    role = _role_by_siblings(names, shape, tree)
  # Such as (1, 1, features), but a layer can have a single output.
  is_flat = sum(size > 1 for size in shape) < 2 and {*last} - _ARRAYS
  return 'vector' if is_flat and role != 'other' else role


def _is_factor(names: Names, last: list[str], tree: _Tree) -> bool:
  """Returns whether b is the second of two factors, such as in lora_b."""
  if last[-1:] != ['b'] or len(last) < 2:
    return False
  beside = map(_words, tree.children[names[:-1]])
  return 'lora' in last or [*last[:-1], 'a'] in beside


def _role_by_path(names: Names, shape: Shape, tree: _Tree) -> Role:
  """Returns what the innermost name says that tells a part of a model."""
  is_square = shape[-1] == shape[-2]
  is_sure = not _is_learned_query(names, tree)
  is_mlp = is_mlp_layer = False
  inside = names
  below: set[str] = set()
  for i in reversed(range(len(names))):
    words = {*_words(names[i])}
    if words <= _ARRAYS or words == _OF_HEADS:
      continue
    part = _part(names[i], below)
    is_table = part == 'table' and not _is_mlp(words | below, shape)
    if is_table or _is_gate_of_experts(names, i, tree):
      return 'other'
    if not is_mlp and part in ('mlp', 'table'):
      is_mlp, inside = True, names[: i + 1]
    # An MLP of positions, say, may lead from inputs to a table.
    if part == 'table':
      break
    is_mlp_layer = is_mlp_layer or not words.isdisjoint(_MLP_LAYERS)
    is_sure = is_sure and (is_mlp or part != 'foreign')
    # An MLP, or a first layer, in a head may be its last one too.
    is_inside = is_mlp or (below and below <= _TRANSFORMS)
    if part == 'head' and not is_inside:
      return 'other'
    if part in ('square', 'head'):
      return 'hidden' if is_sure and is_square else 'unknown'
    # An MLP that is the whole model has inputs and outputs, one in a block not.
    if part == 'mixer' or (is_mlp and words & _BLOCKS):
      return 'hidden' if is_sure else 'unknown'
    below |= words
  # Outside of a block, layers that do not come back to their width lead from
  # inputs to outputs.
  others = {x[-2:] for x in tree.shapes_below[inside]} - {shape[-2:]}
  comes_back = not others or (shape[-1], shape[-2]) in others
  is_hidden = (
    is_sure and is_mlp and ((is_mlp_layer and comes_back) or is_square)
  )
  return 'hidden' if is_hidden else 'unknown'


def _part(name: str, below: set[str]) -> str:
  """Returns which part of a model a name tells, of the first rule that fits.

  Args:
    name: The name, with at least one word.
    below: Words of the names between it and the array.
  """
  ordered = _words(name)
  words = {*ordered}
  is_table = words & _TABLES or ordered[-1] in _TOKENS
  # Layers of the embedding of a time are an MLP.
  is_time = is_table and words & _TIMES and (below or words & _ADAPTIVE)
  rules = {
    'square': words in _SQUARE,
    'table': (is_table and not is_time)
    or (words in _WHOLE_NAMES and not below),
    'mixer': _is_mixer(words) and (below or words <= _PLAIN),
    'head': words & _HEADS,
    'mlp': is_time or words & _MLPS or words == {'dense', 'block'},
    'known': words <= _PLAIN or words & _BLOCKS,
  }
  return next((part for part, fits in rules.items() if fits), 'foreign')


def _is_mixer(words: set[str]) -> bool:
  # An attention has heads too, but no logits or classes.
  return bool(words & _MIXERS) and words.isdisjoint(_HEADS - {'head'})


def _is_norm(words: list[str]) -> bool:
  return not _NORMS.isdisjoint(words) and _ADAPTIVE.isdisjoint(words)


def _is_gate_of_experts(names: Names, i: int, tree: _Tree) -> bool:
  """Returns whether a gate chooses experts, which then are in the same layer.

  In an MLP, a gate is like ``up``.
  """
  words = {*_words(names[i])}
  if 'gate' not in words or not words <= {'gate'} | _EXPERTS | {'shared'}:
    return False
  parent, shape = names[:i], tree.shapes[names]
  if any(
    'up' in _words(name)
    and tree.shapes.get((*parent, name, *names[i + 1 :])) == shape
    for name in tree.children[parent]
  ):
    return False
  is_in_layer_of_experts = parent and 'moe' in _words(parent[-1])
  # Stacked experts of any name: an axis of their number, and matrices.
  is_beside_stack = shape[-1] != shape[-2] and any(
    len(x) > 2 and x[-3] in shape[-2:] and {*shape[-2:]} - {x[-3]} <= {*x[-2:]}
    for x in tree.shapes_below[parent]
  )
  return bool(
    is_in_layer_of_experts or parent in tree.have_experts or is_beside_stack
  )


def _is_learned_query(names: Names, tree: _Tree) -> bool:
  """Returns whether an array is a query itself: it has no key beside it."""
  if _QUERIES.isdisjoint(_words(names[-1] if names else '')):
    return False
  return not any(
    (*names[:-1], name) in tree.shapes and not _QKV.isdisjoint(_words(name))
    for name in tree.children[names[:-1]] - {names[-1]}
  )


def _role_by_siblings(names: Names, shape: Shape, tree: _Tree) -> Role:
  """Returns what stands beside it: a layer beside an attention is in a block.

  The layer then has queries, keys or values beside it and is one of them, or
  undoes the change of width by another one.
  """
  own: set[str] = set()
  start = len(names)
  for name in reversed(names):
    words = {*_words(name)}
    if not words or not words <= _PLAIN:
      break
    own |= words
    start -= 1
  if own <= _ARRAYS or _is_learned_query(names, tree):
    return 'unknown'
  beside = _beside(names, start, tree)
  # An attention has keys; a value alone may be an estimate of returns.
  has_keys = any(words <= _PLAIN and words & _KEYS for words in [own, *beside])
  has_queries = has_keys and any(
    words <= _PLAIN and words & _QKV for words in beside
  )
  has_attention = has_queries or any(map(_is_mixer, beside))
  is_layer = bool(own & (_OUTPUTS | _MLP_LAYERS))
  if shape[-1] != shape[-2]:
    parent = names[:start]
    is_layer = own <= _PAIRED and _is_paired(shape, parent, parent, tree)
  is_hidden = (own & _QKV and has_queries) or (has_attention and is_layer)
  return 'hidden' if is_hidden else 'unknown'


def _is_mlp(words: set[str], shape: Shape) -> bool:
  """Returns whether a name tells an MLP, whatever else it says."""
  is_window = len(shape) > 2 and words & _CONVOLUTIONS
  return bool(words & _MLPS) and not (is_window or words & _ROUTERS)


def _is_mlp_beside_attention(names: Names, shape: Shape, tree: _Tree) -> bool:
  """Returns whether it is a layer of an MLP, whatever that is called."""
  own: set[str] = set()
  for i in reversed(range(len(names))):
    words = {*_words(names[i])}
    if any(map(_is_mixer, _beside(names, i, tree))):
      may_be_mlp = _is_mlp(words, shape) or words.isdisjoint(_TABLES | _HEADS)
      is_layer = may_be_mlp and own <= _PAIRED
      return is_layer and _is_paired(shape, names[: i + 1], names[:i], tree)
    own |= words
  return False


def _beside(names: Names, i: int, tree: _Tree) -> list[set[str]]:
  """Returns the words of each name beside one of the names along a path."""
  return [{*_words(x)} for x in tree.children[names[:i]] - {names[i]}]


def _is_paired(shape: Shape, inside: Names, block: Names, tree: _Tree) -> bool:
  """Returns whether a layer and its pair leave and reach the block's width."""
  pair = (*shape[:-2], shape[-1], shape[-2])
  # Other layers have the width, but not the sizes of inputs and outputs.
  others = tree.shapes_below[block] - {shape, pair}
  return pair in tree.shapes_below[inside] - {shape} and any(
    min(shape[-2:]) in x for x in others
  )
