"""Models as folders of Hugging Face: GPT2LMHeadModel and LlamaForCausalLM.

Axes: H heads, K features of a head, X query, key and value.
"""

from collections.abc import Mapping
import json
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from examples.gpt2.config import UsageError
from examples.gpt2.data import tokenizer as tokenization
from examples.gpt2.devices.sharding import by_path, path_name
from examples.gpt2.model import config as model_config, files
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.files import Model
from examples.gpt2.model.transformer import shapes

_CONFIG = 'config.json'
_WEIGHTS = 'model.safetensors'
_HEAD = 'lm_head.weight'

# What the tables below have in their columns.
_ARCHITECTURES = ('gpt2', 'llama')
_CLASSES = ('GPT2LMHeadModel', 'LlamaForCausalLM')
# Of the names of all arrays but the head's; files without a head lack it.
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
# Ours have no dropout, which GPT-2 has unless told.
_DROPOUT = dict.fromkeys(('attn_pdrop', 'embd_pdrop', 'resid_pdrop'), 0.0)
# Constants that old versions saved beside the weights.
_CONSTANTS = re.compile(
  r'h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq'
)
# Axis of the vocabulary, where a parameter has one.
_VOCABULARY_AXES = {'token_embedding.embedding': 0, 'head.kernel': 1}


def write_model(folder: Path, model: Model) -> None:
  """Writes a model for Hugging Face.

  Args:
    folder: Folder that exists.
    model: Model without ``qk_norm``.

  Raises:
    OSError: If a file cannot be written.
  """
  prefix = _PREFIXES[_column(model.config)]
  arrays = _to_theirs(model.config, model.num_tokens, by_path(model.params))
  arrays = {k if k == _HEAD else prefix + k: x for k, x in arrays.items()}
  safetensors.numpy.save_file(
    files.contiguous(arrays),
    folder / _WEIGHTS,
    metadata={'format': 'pt'},  # Some versions insist on it.
  )
  settings = {_CONFIG: _to_settings(model)}
  if model.tokenizer is not None:
    model.tokenizer.save(str(folder / files.TOKENIZER))
    settings['tokenizer_config.json'] = _tokenizer_settings(model)
  for name, values in settings.items():
    (folder / name).write_text(json.dumps(values, indent=2) + '\n')


def _to_settings(model: Model) -> dict[str, Any]:
  """Returns the entries of config.json for a model."""
  config, column = model.config, _column(model.config)
  end = model.tokenizer and _end_of_text(model)
  return {
    'model_type': config.architecture,
    'architectures': [_CLASSES[column]],
    **{names[column]: getattr(config, k) for k, names in _ENTRIES.items()},
    **_FIXED[column],
    **(_DROPOUT if config.architecture == 'gpt2' else {}),
    'vocab_size': model.num_tokens,
    'tie_word_embeddings': not config.untied_head,
    'bos_token_id': end,
    'eos_token_id': end,
    'torch_dtype': 'float32',
  }


def _tokenizer_settings(model: Model) -> dict[str, Any]:
  """Returns what AutoTokenizer needs beside tokenizer.json."""
  names = ('bos_token', 'eos_token', 'unk_token')
  has_end = _end_of_text(model) is not None
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': model.config.context_length,
    'clean_up_tokenization_spaces': False,
    **dict.fromkeys(names if has_end else (), tokenization.END_OF_TEXT),
  }


def _end_of_text(model: Model) -> int | None:
  return model.tokenizer.token_to_id(tokenization.END_OF_TEXT)


def read_model(folder: Path) -> Model:
  """Reads a model of Hugging Face.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts and their
      index) and perhaps tokenizer.json.

  Returns:
    The model, in NumPy arrays. Its vocabulary is rounded up as the trainer's
    is; rows that this adds are the mean of the others, so that their tokens are
    at most as likely as the others on average, by Jensen's inequality.

  Raises:
    UsageError: If a file is missing or damaged, or the model is not one of
      ours.
    OSError: If a file cannot be read.
  """
  with files.naming(folder / _CONFIG):
    config, num_rows = _read_settings(files.read_json(folder / _CONFIG))
  arrays: dict[str, Any] = {}
  for path in _weights(folder):
    with files.naming(path):
      arrays |= files.open_arrays(path)
  expected = shapes(config)
  theirs = jax.eval_shape(
    lambda params: _to_theirs(config, num_rows, params), by_path(expected)
  )
  with files.naming(folder / _WEIGHTS):
    arrays = _relevant(arrays, config)
    files.check_arrays(arrays, theirs, ('F32', 'F16', 'BF16'))
  params = jax.tree.map_with_path(
    lambda path, _: _from_theirs(config, path_name(path), arrays), expected
  )
  if not (folder / files.TOKENIZER).is_file():
    return Model(config, num_rows, params)
  tokenizer = tokenization.read_tokenizer(folder / files.TOKENIZER, num_rows)
  # Rows that no token has are padding too.
  num_tokens = tokenization.num_identifiers(tokenizer)
  return Model(config, num_tokens, params, tokenizer)


def _read_settings(settings: dict[str, Any]) -> tuple[ModelConfig, int]:
  """Returns what a model is, and the rows that its embedding has there."""
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
      value = model_config.NORM_EPSILON[kind]
    model_config.check_entry(entry, value, name)
    values[name] = value
  num_rows = values['vocab_size']
  values['vocab_size'] = model_config.padded_vocab_size(num_rows)
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


def _weights(folder: Path) -> list[Path]:
  """Returns the files of the weights: one, or its parts."""
  if (folder / _WEIGHTS).is_file():
    return [folder / _WEIGHTS]
  parts = sorted(folder.glob('model-*.safetensors'))
  if not parts:
    pickles = ', '.join(path.name for path in folder.glob('*.bin'))
    hint = f' ({pickles} may be pickles, which can run any code)' * bool(
      pickles
    )
    raise UsageError(
      f'{folder} holds no {_WEIGHTS} and no parts of it: expected a folder of '
      f'Hugging Face with weights as safetensors{hint}.'
    )
  return parts


def _relevant(arrays: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Returns the arrays that count, by their names without the prefix."""
  prefix = _PREFIXES[_column(config)]
  arrays = {name.removeprefix(prefix): x for name, x in arrays.items()}
  arrays = {k: x for k, x in arrays.items() if not _CONSTANTS.fullmatch(k)}
  (embedding,) = _names(config, 'token_embedding.embedding')
  if config.untied_head or not {_HEAD, embedding} <= arrays.keys():
    return arrays
  if not np.array_equal(arrays.pop(_HEAD)[:], arrays[embedding][:]):
    raise UsageError(
      f'{_HEAD} is not {embedding}, but {_CONFIG} has tie_word_embeddings.'
    )
  return arrays


def _to_theirs(
  config: ModelConfig, num_tokens: int, params: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns parameters, given by path, as arrays of Hugging Face."""
  arrays = {}
  for path, param in params.items():
    names = _names(config, path)
    x = param if path.startswith('blocks.') else param[None]
    if path in _VOCABULARY_AXES:
      before = (slice(None),) * (1 + _VOCABULARY_AXES[path])
      x = x[*before, :num_tokens]
    if '.qkv.' in path:
      x_XHK = x.swapaxes(-3, -2)
      x = x_XHK.reshape(*x.shape[:-3], -1)
    if _is_transposed(config, path):
      x = x.swapaxes(-2, -1)
    parts = x.reshape(len(names), -1, *x.shape[2:])
    arrays |= zip(names, parts, strict=True)
  return arrays


def _from_theirs(
  config: ModelConfig, path: str, arrays: Mapping[str, Any]
) -> np.ndarray:
  """Returns a parameter, made of arrays of Hugging Face."""
  parts = [arrays[name][:] for name in _names(config, path)]
  layers = config.num_layers if path.startswith('blocks.') else 1
  x = np.stack(parts, dtype=np.float32)
  x = x.reshape(layers, -1, *x.shape[2:])
  if _is_transposed(config, path):
    x = x.swapaxes(-2, -1)
  if '.qkv.' in path:
    columns_XHK = 3, config.num_heads, config.head_width
    x = x.reshape(*x.shape[:-1], *columns_XHK).swapaxes(-3, -2)
  if path in _VOCABULARY_AXES:
    axis, widths = 1 + _VOCABULARY_AXES[path], [(0, 0)] * 3
    widths[axis] = 0, config.vocab_size - x.shape[axis]
    x = np.pad(x, widths, mode='mean')
  return x if path.startswith('blocks.') else x[0]


def _names(config: ModelConfig, path: str) -> list[str]:
  """Returns the names of a parameter's arrays, layer after layer."""
  module, _, kind = path.rpartition('.')
  name = _MODULES[module][_column(config)]
  name += '.bias' if kind == 'bias' else '.weight'
  parts = [name.replace('*', x) for x in 'qkv'] if '*' in name else [name]
  layers = range(config.num_layers if path.startswith('blocks.') else 1)
  return [part.format(layer) for layer in layers for part in parts]


def _is_transposed(config: ModelConfig, path: str) -> bool:
  """Returns whether a matrix multiplies from the other side there."""
  is_llama = config.architecture == 'llama'
  return path == 'head.kernel' or (is_llama and path.endswith('.kernel'))


def _column(config: ModelConfig) -> int:
  return _ARCHITECTURES.index(config.architecture)
