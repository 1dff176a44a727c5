"""What Hugging Face calls the settings and parameters of GPT-2 and Llama.

Axes: H heads, K features of a head, X query, key and value.
"""

from collections.abc import Mapping
import functools
import re
from typing import Any

import jax
import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import by_path, path_name
from examples.gpt2.model.config import (
  ModelConfig,
  check_entry,
  padded_vocab_size,
)
from examples.gpt2.model.files import Model, check_arrays
from examples.gpt2.model.transformer import shapes

_HEAD = 'lm_head.weight'

# What the tables below have in their columns.
_ARCHITECTURES = ('gpt2', 'llama')
_CLASSES = ('GPT2LMHeadModel', 'LlamaForCausalLM')
# Of the names of all arrays but the head's; models without a head lack it.
_PREFIXES = ('transformer.', 'model.')
_ENTRIES = {
  'vocab_size': ('vocab_size', 'vocab_size'),
  'context_length': ('n_positions', 'max_position_embeddings'),
  'num_layers': ('n_layer', 'num_hidden_layers'),
  'num_heads': ('n_head', 'num_attention_heads'),
  'width': ('n_embd', 'hidden_size'),
  'mlp_width': ('n_inner', 'intermediate_size'),
  'norm_epsilon': ('layer_norm_epsilon', 'rms_norm_eps'),
}
# Braces stand for the number of the layer, the star for q, k and v.
_MODULES = {
  'token_embedding': ('wte', 'embed_tokens'),
  'position_embedding': ('wpe', ''),
  'blocks.attention_norm': ('h.{}.ln_1', 'layers.{}.input_layernorm'),
  'blocks.attention.qkv': ('h.{}.attn.c_attn', 'layers.{}.self_attn.*_proj'),
  'blocks.attention.out': ('h.{}.attn.c_proj', 'layers.{}.self_attn.o_proj'),
  'blocks.mlp_norm': ('h.{}.ln_2', 'layers.{}.post_attention_layernorm'),
  'blocks.mlp.gate': ('', 'layers.{}.mlp.gate_proj'),
  'blocks.mlp.up': ('h.{}.mlp.c_fc', 'layers.{}.mlp.up_proj'),
  'blocks.mlp.down': ('h.{}.mlp.c_proj', 'layers.{}.mlp.down_proj'),
  'final_norm': ('ln_f', 'norm'),
  'head': ('lm_head', 'lm_head'),
}
# What our models always have; it is also what an entry that is not there means.
_FIXED: tuple[dict[str, Any], ...] = (
  {
    'activation_function': 'gelu_new',
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'add_cross_attention': False,
  },
  {
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    # transformers 5 reads the last of these, 4 the others.
    'rope_theta': 10000.0,
    'rope_scaling': None,
    'rope_parameters': {'rope_theta': 10000.0, 'rope_type': 'default'},
  },
)
# Further entries, for dropout, which GPT-2 has unless told.
_WRITTEN = ({'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}, {})
# Constants that old versions saved beside the weights.
_CONSTANTS = re.compile(
  r'.*h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq'
)
_VOCABULARIES = ('token_embedding.embedding', 'head.kernel')


def to_settings(model: Model) -> dict[str, Any]:
  """Returns the entries of config.json for a model."""
  config, column = model.config, _column(model.config)
  end = model.end_token and model.tokenizer.token_to_id(model.end_token)
  return {
    'model_type': config.architecture,
    'architectures': [_CLASSES[column]],
    **{names[column]: getattr(config, k) for k, names in _ENTRIES.items()},
    **_FIXED[column],
    **_WRITTEN[column],
    'vocab_size': model.num_tokens,
    'tie_word_embeddings': not config.untied_head,
    'bos_token_id': end,
    'eos_token_id': end,
    'torch_dtype': 'float32',
  }


def tokenizer_settings(model: Model) -> dict[str, Any]:
  """Returns what AutoTokenizer needs beside tokenizer.json."""
  has_end = model.end_token is not None
  names = ('bos_token', 'eos_token', 'unk_token') if has_end else ()
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': model.config.context_length,
    'clean_up_tokenization_spaces': False,
    **dict.fromkeys(names, model.end_token),
  }


def from_settings(settings: dict[str, Any]) -> tuple[ModelConfig, int]:
  """Reads config.json, and refuses models that are not ours.

  Returns what the model is, with a vocabulary rounded up as the trainer does,
  and the number of rows that the embedding has in Hugging Face.
  """
  kind = settings.get('model_type')
  if kind not in _ARCHITECTURES:
    raise UsageError(f'model_type must be gpt2 or llama, got {kind!r}.')
  values: dict[str, Any] = {}
  for name, columns in _ENTRIES.items():
    entry = columns[_ARCHITECTURES.index(kind)]
    value = settings.get(entry)
    if value is None and entry == 'n_inner':
      value = 4 * values['width']
    if value is None and name == 'norm_epsilon':
      continue
    check_entry(entry, value, name)
    values[name] = value
  num_rows = values['vocab_size']
  values['vocab_size'] = padded_vocab_size(num_rows)
  is_tied = settings.get('tie_word_embeddings', kind == 'gpt2')
  config = ModelConfig(**values, architecture=kind, untied_head=not is_tied)
  _check_fixed(settings, config)
  return config, num_rows


def _check_fixed(settings: dict[str, Any], config: ModelConfig) -> None:
  """Raises ``UsageError`` for an option that our models do not have."""
  expected = dict(_FIXED[_column(config)])
  if config.architecture == 'llama':
    expected['num_key_value_heads'] = config.num_heads
    expected['head_dim'] = config.head_width
  for name, value in expected.items():
    got = settings.get(name)
    if got is not None and got != value:
      raise UsageError(
        f'{name} must be {value!r}, which our models have, got {got!r}.'
      )


def to_arrays(
  config: ModelConfig, num_tokens: int, params: Any
) -> dict[str, Any]:
  """Returns parameters as arrays of Hugging Face.

  Rows of the vocabulary beyond the number of tokens are left out.
  """
  arrays: dict[str, Any] = {}
  for path, x in by_path(params).items():
    parts = _arrange(config, num_tokens, path, x)
    arrays |= zip(_names(config, path), parts, strict=True)
  return arrays


def from_arrays(
  config: ModelConfig, num_rows: int, arrays: Mapping[str, Any]
) -> Any:
  """Makes parameters, as NumPy arrays, of open arrays of Hugging Face.

  Rows that pad the vocabulary are the mean of the others, so that their tokens
  are at most as likely as the others on average, by Jensen's inequality. Raises
  ``UsageError`` for an array that the model does not have or has otherwise.
  """
  arrays, ours = _relevant(arrays, config), shapes(config)
  theirs = jax.eval_shape(lambda x: to_arrays(config, num_rows, x), ours)
  check_arrays(arrays, theirs, ('F32', 'F16', 'BF16'))

  def join(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> np.ndarray:
    name = path_name(path)
    parts = [arrays[x][:] for x in _names(config, name)]
    arrange = functools.partial(_arrange, config, num_rows, name)
    # It only moves elements, so its transpose is its inverse.
    back = jax.linear_transpose(arrange, like)
    x = np.array(*back(np.stack(parts, dtype=np.float32)))
    if name in _VOCABULARIES:
      rows = x.T if name == 'head.kernel' else x
      rows[num_rows:] = rows[:num_rows].mean(axis=0)
    return x

  return jax.tree.map_with_path(join, ours)


def _arrange(config: ModelConfig, num_rows: int, path: str, x: Any) -> Any:
  """Moves the elements of a parameter to where its stacked arrays have them."""
  is_kernel = config.architecture == 'llama' and path.endswith('.kernel')
  x = x if path.startswith('blocks.') else x[None]
  if '.qkv.' in path:
    x_XHK = x.swapaxes(-3, -2)
    x = x_XHK.reshape(*x.shape[:-3], -1)
  if is_kernel or path == 'head.kernel':
    x = x.swapaxes(-2, -1)
  if path in _VOCABULARIES:
    x = x[:, :num_rows]
  return x.reshape(len(_names(config, path)), -1, *x.shape[2:])


def _relevant(arrays: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Returns the arrays that count, by the names of a model with a head."""
  prefixes = _HEAD, _PREFIXES[_column(config)]
  arrays = {
    name if name.startswith(prefixes) else prefixes[1] + name: x
    for name, x in arrays.items()
    if not _CONSTANTS.fullmatch(name)
  }
  (embedding,) = _names(config, 'token_embedding.embedding')
  is_double = {_HEAD, embedding} <= arrays.keys() and not config.untied_head
  if is_double and not np.array_equal(
    arrays.pop(_HEAD)[:], arrays[embedding][:]
  ):
    raise UsageError(
      f'{_HEAD} is not {embedding}, but config.json has tie_word_embeddings.'
    )
  return arrays


def _names(config: ModelConfig, path: str) -> list[str]:
  """Returns the names of a parameter's arrays, layer after layer."""
  module, _, kind = path.rpartition('.')
  column = _column(config)
  name = '' if module == 'head' else _PREFIXES[column]
  name += _MODULES[module][column]
  name += '.bias' if kind == 'bias' else '.weight'
  parts = [name.replace('*', x) for x in 'qkv'] if '*' in name else [name]
  layers = range(config.num_layers if path.startswith('blocks.') else 1)
  return [part.format(layer) for layer in layers for part in parts]


def _column(config: ModelConfig) -> int:
  return _ARCHITECTURES.index(config.architecture)
