"""How the parameters of GPT-2 and Llama lie in files of Hugging Face.

Letters at the end of a name give the axes of an array: D features, V
vocabulary, H heads, K features of a head, X query, key and value.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.gpt2.model.files import by_path, shapes
from examples.gpt2.model.layers import ModelConfig

# Axis of the vocabulary, where a parameter has one.
_VOCABULARY_AXES = {'token_embedding.embedding': 0, 'head.kernel': 1}


class _Layout(NamedTuple):
  """How a parameter is cut to arrays of Hugging Face, and put together."""

  split: Callable[[Any], list[Any]]
  join: Callable[[list[Any], ModelConfig], Any]


def _split_fused(x: Any) -> list[Any]:
  """Reorders columns, from (H, X, K) to a flat (X, H, K)."""
  x_XHK = x.swapaxes(-3, -2)
  return [x_XHK.reshape(*x.shape[:-3], -1)]


def _join_fused(parts: list[Any], config: ModelConfig) -> Any:
  columns = 3, config.num_heads, config.head_width
  x_XHK = parts[0].reshape(*parts[0].shape[:-1], *columns)
  return x_XHK.swapaxes(-3, -2)


def _split_separate(x_DHXK: Any) -> list[Any]:
  """Returns a matrix each for query, key and value, shape (H * K, D)."""
  width = len(x_DHXK)
  return [x_DHXK[:, :, i].reshape(width, -1).T for i in range(3)]


def _join_separate(parts: list[Any], config: ModelConfig) -> Any:
  shape = config.width, config.num_heads, config.head_width
  return np.stack([part.T.reshape(shape) for part in parts], axis=2)


_SAME = _Layout(lambda x: [x], lambda parts, _: parts[0])
_TRANSPOSED = _Layout(lambda x: [x.T], lambda parts, _: parts[0].T)
_FUSED = _Layout(_split_fused, _join_fused)
_SEPARATE = _Layout(_split_separate, _join_separate)

# GPT-2 multiplies with a matrix from the right, as we do; Llama from the left.
# Braces stand for the number of the layer.
_GPT2 = {
  'token_embedding.embedding': (_SAME, 'transformer.wte.weight'),
  'position_embedding.embedding': (_SAME, 'transformer.wpe.weight'),
  'final_norm.scale': (_SAME, 'transformer.ln_f.weight'),
  'final_norm.bias': (_SAME, 'transformer.ln_f.bias'),
  'head.kernel': (_TRANSPOSED, 'lm_head.weight'),
  'blocks.attention_norm.scale': (_SAME, 'transformer.h.{}.ln_1.weight'),
  'blocks.attention_norm.bias': (_SAME, 'transformer.h.{}.ln_1.bias'),
  'blocks.attention.qkv.kernel': (
    _FUSED,
    'transformer.h.{}.attn.c_attn.weight',
  ),
  'blocks.attention.qkv.bias': (_FUSED, 'transformer.h.{}.attn.c_attn.bias'),
  'blocks.attention.out.kernel': (_SAME, 'transformer.h.{}.attn.c_proj.weight'),
  'blocks.attention.out.bias': (_SAME, 'transformer.h.{}.attn.c_proj.bias'),
  'blocks.mlp_norm.scale': (_SAME, 'transformer.h.{}.ln_2.weight'),
  'blocks.mlp_norm.bias': (_SAME, 'transformer.h.{}.ln_2.bias'),
  'blocks.mlp.up.kernel': (_SAME, 'transformer.h.{}.mlp.c_fc.weight'),
  'blocks.mlp.up.bias': (_SAME, 'transformer.h.{}.mlp.c_fc.bias'),
  'blocks.mlp.down.kernel': (_SAME, 'transformer.h.{}.mlp.c_proj.weight'),
  'blocks.mlp.down.bias': (_SAME, 'transformer.h.{}.mlp.c_proj.bias'),
}
_LLAMA = {
  'token_embedding.embedding': (_SAME, 'model.embed_tokens.weight'),
  'final_norm.scale': (_SAME, 'model.norm.weight'),
  'head.kernel': (_TRANSPOSED, 'lm_head.weight'),
  'blocks.attention_norm.scale': (
    _SAME,
    'model.layers.{}.input_layernorm.weight',
  ),
  'blocks.attention.qkv.kernel': (
    _SEPARATE,
    'model.layers.{}.self_attn.q_proj.weight',
    'model.layers.{}.self_attn.k_proj.weight',
    'model.layers.{}.self_attn.v_proj.weight',
  ),
  'blocks.attention.out.kernel': (
    _TRANSPOSED,
    'model.layers.{}.self_attn.o_proj.weight',
  ),
  'blocks.mlp_norm.scale': (
    _SAME,
    'model.layers.{}.post_attention_layernorm.weight',
  ),
  'blocks.mlp.gate.kernel': (
    _TRANSPOSED,
    'model.layers.{}.mlp.gate_proj.weight',
  ),
  'blocks.mlp.up.kernel': (_TRANSPOSED, 'model.layers.{}.mlp.up_proj.weight'),
  'blocks.mlp.down.kernel': (
    _TRANSPOSED,
    'model.layers.{}.mlp.down_proj.weight',
  ),
}
_TABLES = {'gpt2': _GPT2, 'llama': _LLAMA}


def to_hugging_face(
  config: ModelConfig, num_tokens: int, params: Mapping[str, Any]
) -> dict[str, Any]:
  """Renames and reorders parameters.

  Args:
    config: What the model is, without ``qk_norm``.
    num_tokens: Number of token identifiers; rows beyond are left out.
    params: Parameters by path.

  Returns:
    Arrays by the name that Hugging Face gives them.
  """
  arrays = {}
  for path, whole in params.items():
    layout, *names = _TABLES[config.architecture][path]
    param = _cut(path, whole, num_tokens)
    layers = param if path.startswith('blocks.') else [param]
    for number, layer in enumerate(layers):
      for name, part in zip(names, layout.split(layer), strict=True):
        arrays[name.format(number)] = part
  return arrays


def _cut(path: str, param: Any, num_tokens: int) -> Any:
  """Leaves out what pads the vocabulary."""
  if path not in _VOCABULARY_AXES:
    return param
  before = (slice(None),) * _VOCABULARY_AXES[path]
  return param[*before, :num_tokens]


def hugging_face_shapes(config: ModelConfig, num_tokens: int) -> dict[str, Any]:
  """Returns shape and type of each array of Hugging Face, by name."""
  return jax.eval_shape(
    lambda params: to_hugging_face(config, num_tokens, params),
    by_path(shapes(config)),
  )


def from_hugging_face(
  config: ModelConfig, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Renames and reorders arrays of Hugging Face, and pads the vocabulary.

  Args:
    config: What the model is; its vocabulary may be larger than that of the
      arrays.
    arrays: Arrays by name, of the shapes in :func:`hugging_face_shapes`.

  Returns:
    Parameters by path. Tokens beyond those of the arrays get the mean row.
    Their probability is then at most the mean one of the others, by Jensen's
    inequality: a loss over all tokens grows by at most the logarithm of the
    ratio of the sizes.
  """
  params = {}
  for path in by_path(shapes(config)):
    layout, *names = _TABLES[config.architecture][path]
    is_block = path.startswith('blocks.')
    layers = [
      layout.join([arrays[name.format(i)] for name in names], config)
      for i in range(config.num_layers if is_block else 1)
    ]
    params[path] = np.stack(layers) if is_block else layers[0]
    if path in _VOCABULARY_AXES:
      axis = _VOCABULARY_AXES[path]
      params[path] = _pad(params[path], axis, config.vocab_size)
  return params


def _pad(x: np.ndarray, axis: int, size: int) -> np.ndarray:
  """Pads an axis to a size with the mean of what is there."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, size - x.shape[axis]
  return np.pad(x, widths, mode='mean')
