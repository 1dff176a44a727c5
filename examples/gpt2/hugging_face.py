"""Reads GPT-2 weights under the names that Hugging Face gives them."""

import re

import numpy as np

from examples.gpt2.model import GPT2Config

_NAMES = {
  'wte.weight': 'token_embedding.embedding',
  'wpe.weight': 'position_embedding.embedding',
  'ln_f.weight': 'final_norm.scale',
  'ln_f.bias': 'final_norm.bias',
  'ln_1.weight': 'attention_norm.scale',
  'ln_1.bias': 'attention_norm.bias',
  'attn.c_attn.weight': 'attention.qkv.kernel',
  'attn.c_attn.bias': 'attention.qkv.bias',
  'attn.c_proj.weight': 'attention.out.kernel',
  'attn.c_proj.bias': 'attention.out.bias',
  'ln_2.weight': 'mlp_norm.scale',
  'ln_2.bias': 'mlp_norm.bias',
  'mlp.c_fc.weight': 'mlp.up.kernel',
  'mlp.c_fc.bias': 'mlp.up.bias',
  'mlp.c_proj.weight': 'mlp.down.kernel',
  'mlp.c_proj.bias': 'mlp.down.bias',
}


def from_hugging_face(
  weights: dict[str, np.ndarray], config: GPT2Config
) -> dict[str, np.ndarray]:
  """Renames and reorders weights to those of our model.

  Args:
    weights: Arrays of a ``GPT2LMHeadModel``, by name, without its output head
      (which is the token embedding).
    config: Sizes of the model.

  Returns:
    Arrays by the path of the parameter, such as ``'blocks.0.mlp.up.bias'``.
  """
  params = {}
  for name, array in weights.items():
    _, layer, rest = re.fullmatch(
      r'(transformer\.)?(?:h\.(\d+)\.)?(.+)', name
    ).groups()
    fused = rest.startswith('attn.c_attn')
    path = _NAMES[rest] if layer is None else f'blocks.{layer}.{_NAMES[rest]}'
    params[path] = _order_by_head(array, config.num_heads) if fused else array
  return params


def _order_by_head(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Reorders columns from (query, key, value) x heads to heads x (q, k, v)."""
  columns = array.reshape(*array.shape[:-1], 3, num_heads, -1)
  return columns.swapaxes(-3, -2).reshape(array.shape)
