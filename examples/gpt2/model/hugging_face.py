"""Models of Hugging Face: GPT2LMHeadModel and LlamaForCausalLM.

Axes: L layers, D features, G groups of heads that share a key, K features of a
head, X queries, key and value of a group.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
from pathlib import Path
import re
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import (
  GENERATION,
  SETTINGS,
  json_object,
  with_end_token,
)
from examples.gpt2.devices.sharding import by_path, path_name
from examples.gpt2.model import files
from examples.gpt2.model.config import (
  ModelConfig,
  RopeScaling,
  check_entry,
  padded_vocab_size,
)
from examples.gpt2.model.transformer import shapes

WEIGHTS = 'model.safetensors'
MAX_SHARD_SIZE = '5GB'


class _Architecture(NamedTuple):
  """What Hugging Face calls the settings and arrays of an architecture."""

  model_class: str
  prefix: str  # Of all arrays but the head's; models without a head lack it.
  entries: dict[str, str]  # Of config.json.
  modules: dict[str, str]  # {} is the number of the layer, * is q, k and v.
  # What our models always have, and what an entry that is not there means.
  fixed: dict[str, Any]
  written: dict[str, Any]  # More entries to write.


_ARCHITECTURES = {
  'gpt2': _Architecture(
    model_class='GPT2LMHeadModel',
    prefix='transformer.',
    entries=dict(
      vocab_size='vocab_size',
      context_length='n_positions',
      width='n_embd',
      num_layers='n_layer',
      num_heads='n_head',
      mlp_width='n_inner',
      norm_epsilon='layer_norm_epsilon',
    ),  # fmt: skip
    modules={
      'token_embedding': 'wte',
      'position_embedding': 'wpe',
      'blocks.attention_norm': 'h.{}.ln_1',
      'blocks.attention.qkv': 'h.{}.attn.c_attn',
      'blocks.attention.out': 'h.{}.attn.c_proj',
      'blocks.mlp_norm': 'h.{}.ln_2',
      'blocks.mlp.up': 'h.{}.mlp.c_fc',
      'blocks.mlp.down': 'h.{}.mlp.c_proj',
      'final_norm': 'ln_f',
    },
    fixed={
      'activation_function': 'gelu_new',
      'scale_attn_weights': True,
      'scale_attn_by_inverse_layer_idx': False,
      'add_cross_attention': False,
    },
    written={'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0},
  ),
  'llama': _Architecture(
    model_class='LlamaForCausalLM',
    prefix='model.',
    entries=dict(
      vocab_size='vocab_size',
      context_length='max_position_embeddings',
      width='hidden_size',
      num_layers='num_hidden_layers',
      num_heads='num_attention_heads',
      num_kv_heads='num_key_value_heads',
      head_width='head_dim',
      mlp_width='intermediate_size',
      norm_epsilon='rms_norm_eps',
    ),  # fmt: skip
    modules={
      'token_embedding': 'embed_tokens',
      'blocks.attention_norm': 'layers.{}.input_layernorm',
      'blocks.attention.qkv': 'layers.{}.self_attn.*_proj',
      'blocks.attention.out': 'layers.{}.self_attn.o_proj',
      'blocks.mlp_norm': 'layers.{}.post_attention_layernorm',
      'blocks.mlp.gate': 'layers.{}.mlp.gate_proj',
      'blocks.mlp.up': 'layers.{}.mlp.up_proj',
      'blocks.mlp.down': 'layers.{}.mlp.down_proj',
      'final_norm': 'norm',
    },
    fixed={'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False},
    written={},
  ),
}
_HEAD = 'lm_head.weight'
_VOCABULARIES = ('token_embedding.embedding', 'head.kernel')
# Another name of the same function.
_SAME = {'gelu_pytorch_tanh': 'gelu_new'}
# Constants that old versions saved beside the weights.
_CONSTANTS = re.compile(
  r'.*h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq'
)
_OPTIONAL = ('norm_epsilon', 'num_kv_heads', 'head_width')
_ROPE_SCALING = (
  'factor', 'low_freq_factor', 'high_freq_factor',
  'original_max_position_embeddings',
)  # fmt: skip
_OF_TRANSFORMERS_5 = ('backend', 'is_local', 'local_files_only')
_SPECIAL_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


def write_hugging_face(
  folder: Path,
  model: files.Model,
  dtype: str = 'float32',
  max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
  """Writes a model for Hugging Face into a folder on a disk.

  Its weights get a data type, in files of at most a size such as '5GB'. Raises
  ``UsageError`` if Hugging Face has no such model, or if there is no such size.
  """
  if model.config.qk_norm:
    raise UsageError(
      'Neither GPT2LMHeadModel nor LlamaForCausalLM has qk_norm: only a model '
      'without it can be exported.'
    )
  arrays = to_arrays(model.config, model.num_tokens, model.params)
  found = {'config.json': to_settings(model, dtype)}
  found |= _write_weights(folder, arrays, dtype, max_shard_size)
  found[GENERATION] = generation_settings(model)
  for name, content in model.companions.items():
    (folder / name).write_bytes(content)
  if model.tokenizer is not None:
    model.tokenizer.save(str(folder / files.TOKENIZER))
    found[SETTINGS] = _tokenizer_settings(model)
  for name, values in found.items():
    if values:
      (folder / name).write_text(json.dumps(values, indent=2) + '\n')


def _write_weights(
  folder: Path, arrays: dict[str, Any], dtype: str, max_shard_size: str
) -> dict[str, dict[str, Any]]:
  """Writes model.safetensors or its parts, and returns the index of those."""
  size = jnp.dtype(dtype).itemsize
  try:
    split = huggingface_hub.split_state_dict_into_shards_factory(
      arrays,
      get_storage_size=lambda x: x.size * size,
      filename_pattern='model{suffix}.safetensors',
      max_shard_size=max_shard_size,
    )
  except ValueError as error:
    raise UsageError(f'--max-shard-size {max_shard_size}: {error}') from error
  parts = split.filename_to_tensors.items()
  for part, names in tqdm.tqdm(parts, 'writing', delay=2):
    shard = {name: arrays[name].astype(dtype, copy=False) for name in names}
    # Some versions of transformers insist on the entry.
    files.write_arrays(folder / part, shard, {'format': 'pt'})
  if not split.is_sharded:
    return {}
  index = {'metadata': split.metadata, 'weight_map': split.tensor_to_filename}
  return {f'{WEIGHTS}.index.json': index}


def to_settings(model: files.Model, dtype: str) -> dict[str, Any]:
  """Returns the entries of config.json for a model, with weights of a dtype."""
  config = model.config
  theirs, ids = _ARCHITECTURES[config.architecture], generation_settings(model)
  return {
    'model_type': config.architecture,
    'architectures': [theirs.model_class],
    **{entry: getattr(config, x) for x, entry in theirs.entries.items()},
    **theirs.fixed,
    **theirs.written,
    **_rope_settings(config),
    'vocab_size': model.num_tokens,
    'tie_word_embeddings': not config.untied_head,
    **{name: ids.get(name) for name in _SPECIAL_IDS},
    'torch_dtype': dtype,
  }


def _rope_settings(config: ModelConfig) -> dict[str, Any]:
  """Returns entries of rotary positions, as transformers 4 and 5 read them."""
  if config.architecture != 'llama':
    return {}
  theta, scaling = {'rope_theta': config.rope_theta}, None
  if config.rope_scaling is not None:
    *factors, length = config.rope_scaling
    values = zip(_ROPE_SCALING, (*factors, round(length)), strict=True)
    scaling = {'rope_type': 'llama3', **dict(values)}
  parameters = theta | (scaling or {'rope_type': 'default'})
  return theta | {'rope_scaling': scaling, 'rope_parameters': parameters}


def generation_settings(model: files.Model) -> dict[str, Any]:
  """Returns the entries of generation_config.json.

  They are those that the model came with, else its end-of-text token is the one
  that texts begin and end with. At that token, generation always ends.
  """
  found = json_object(model.companions.get(GENERATION))
  if model.end_token is None:
    return found
  end = model.tokenizer.token_to_id(model.end_token)
  if not found:
    return {'bos_token_id': end, 'eos_token_id': end}
  ends = found.get('eos_token_id')
  others = ends if isinstance(ends, list) else [ends]
  if end in others:
    return found
  ends = end if others == [None] else [end, *others]
  return found | {'eos_token_id': ends}


def special_ids(
  settings: dict[str, Any], companions: Mapping[str, bytes]
) -> dict[str, Any]:
  """Returns generation_config.json, with what only config.json names."""
  found = {name: settings.get(name) for name in _SPECIAL_IDS}
  found = {name: x for name, x in found.items() if x is not None}
  return found | json_object(companions.get(GENERATION))


def _tokenizer_settings(model: files.Model) -> dict[str, Any]:
  """Returns what AutoTokenizer needs beside tokenizer.json.

  They are the entries that the tokenizer came with, if it did, with a class
  that transformers 4 has too.
  """
  companions = with_end_token(model.companions, model.end_token)
  found = json_object(companions.get(SETTINGS))
  if found.get('tokenizer_class') == 'TokenizersBackend':
    # Transformers 4 knows neither the class nor, as a list, the tokens.
    found['tokenizer_class'] = 'PreTrainedTokenizerFast'
    if isinstance(found.get('extra_special_tokens'), list):
      found['additional_special_tokens'] = found.pop('extra_special_tokens')
    return {k: x for k, x in found.items() if k not in _OF_TRANSFORMERS_5}
  if found.keys() - {'eos_token'}:
    return found
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': model.config.context_length,
    'clean_up_tokenization_spaces': False,
    **dict.fromkeys(('bos_token', *found, 'unk_token'), model.end_token),
  }


def from_settings(settings: dict[str, Any]) -> tuple[ModelConfig, int]:
  """Reads config.json, and refuses models that are not ours.

  Returns what the model is, with a vocabulary rounded up as the trainer does,
  and the number of rows that the embedding has in Hugging Face.
  """
  kind = settings.get('model_type')
  if kind not in _ARCHITECTURES:
    raise UsageError(f'model_type must be gpt2 or llama, got {kind!r}.')
  theirs = _ARCHITECTURES[kind]
  for name, value in theirs.fixed.items():
    got = settings.get(name)
    if got is not None and got != value and _SAME.get(str(got)) != value:
      raise UsageError(
        f'{name} must be {value!r}, which our models have, got {got!r}.'
      )
  values: dict[str, Any] = {}
  for name, entry in theirs.entries.items():
    value = settings.get(entry)
    if value is None and entry == 'n_inner':
      value = 4 * values['width']
    if value is None and name in _OPTIONAL:
      continue
    check_entry(entry, value, name)
    values[name] = value
  num_rows = values['vocab_size']
  values['vocab_size'] = padded_vocab_size(num_rows)
  if kind == 'llama':
    values |= _rope_values(settings)
  is_tied = settings.get('tie_word_embeddings', kind == 'gpt2')
  config = ModelConfig(**values, architecture=kind, untied_head=not is_tied)
  return config, num_rows


def _rope_values(settings: dict[str, Any]) -> dict[str, Any]:
  """Returns what rotary positions are, from all places that may say it."""
  found: dict[str, Any] = {}
  for place in (
    {'rope_theta': settings.get('rope_theta')},
    dict(settings.get('rope_scaling') or {}),  # Of transformers 4.
    dict(settings.get('rope_parameters') or {}),  # Of transformers 5.
  ):
    for entry, value in place.items():
      name = 'rope_type' if entry == 'type' else entry
      if value is not None and found.setdefault(name, value) != value:
        raise UsageError(
          f'{name} is {found[name]!r} in one place and {value!r} in another: '
          'make rope_theta, rope_scaling and rope_parameters agree.'
        )
  kind = found.get('rope_type', 'default')
  if kind not in ('default', 'llama3'):
    raise UsageError(f'rope_type must be default or llama3, got {kind!r}.')
  values: dict[str, Any] = {}
  if 'rope_theta' in found:
    values['rope_theta'] = _number('rope_theta', found['rope_theta'])
  if kind == 'llama3':
    values['rope_scaling'] = RopeScaling(
      *(_number(name, found.get(name)) for name in _ROPE_SCALING)
    )
  return values


def _number(name: str, value: Any) -> float:
  if type(value) not in (int, float):
    raise UsageError(f'{name} must be a number above 0, got {value!r}.')
  return float(value)


def to_arrays(
  config: ModelConfig, num_tokens: int, params: Any
) -> dict[str, Any]:
  """Returns parameters as arrays of Hugging Face.

  Rows of the vocabulary beyond the number of tokens are left out.
  """
  arrays: dict[str, Any] = {}
  for path, x in by_path(params).items():
    parts = _arrange(config, num_tokens, path, x)
    for names, part in zip(_names(config, path), parts, strict=True):
      arrays |= zip(names, part, strict=True)
  return arrays


def from_arrays(
  config: ModelConfig, num_rows: int, arrays: Mapping[str, Any]
) -> Any:
  """Makes parameters, as NumPy arrays, of open arrays of Hugging Face.

  Of a vocabulary with more rows than the model, the first are taken. Rows that
  it lacks are the mean of its own, so that their tokens are at most as likely
  as the others on average, by Jensen's inequality. Raises ``UsageError`` for an
  array that the model does not have or has otherwise.
  """
  num_ours = config.vocab_size
  config = dataclasses.replace(config, vocab_size=num_rows)
  arrays, ours = _relevant(arrays, config), shapes(config)
  theirs = jax.eval_shape(lambda x: to_arrays(config, num_rows, x), ours)
  files.check_arrays(arrays, theirs, ('F32', 'F16', 'BF16'))

  def join(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> np.ndarray:
    name = path_name(path)
    parts = [
      np.stack([arrays[x][:] for x in names], dtype=np.float32)
      for names in _names(config, name)
    ]
    arrange = functools.partial(_arrange, config, num_rows, name)
    # It only moves elements, so its transpose is its inverse.
    (x,) = jax.linear_transpose(arrange, like)(parts)
    x = np.array(x)
    if name == 'head.kernel':
      return _with_rows(x.T, num_ours).T
    return _with_rows(x, num_ours) if name in _VOCABULARIES else x

  return jax.tree.map_with_path(join, ours)


def _with_rows(x: np.ndarray, count: int) -> np.ndarray:
  """Returns the first rows; those that are not there are the mean of all."""
  mean = x.mean(axis=0, keepdims=True)
  return np.concatenate([x[:count], mean.repeat(max(0, count - len(x)), 0)])


def _arrange(
  config: ModelConfig, num_rows: int, path: str, x: Any
) -> list[Any]:
  """Moves the elements of a parameter to its arrays, stacked over layers."""
  is_llama = config.architecture == 'llama'
  x = x if path.startswith('blocks.') else x[None]
  parts = _projections(x, is_llama) if '.qkv.' in path else [x]
  if path == 'head.kernel' or (is_llama and path.endswith('.kernel')):
    parts = [part.swapaxes(-2, -1) for part in parts]
  if path in _VOCABULARIES:
    parts = [part[:, :num_rows] for part in parts]
  return parts


def _projections(x_GXK: Any, is_llama: bool) -> list[Any]:
  """Returns queries, keys and values, which GPT-2 has side by side."""
  others = x_GXK.shape[:-3]
  if not is_llama:
    return [x_GXK.swapaxes(-3, -2).reshape(*others, -1)]
  parts = x_GXK[..., :-2, :], x_GXK[..., -2, :], x_GXK[..., -1, :]
  return [part.reshape(*others, -1) for part in parts]


def _relevant(arrays: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
  """Returns the arrays that count, by the names of a model with a head."""
  prefix = _ARCHITECTURES[config.architecture].prefix
  arrays = {
    name if name.startswith((_HEAD, prefix)) else prefix + name: x
    for name, x in arrays.items()
    if not _CONSTANTS.fullmatch(name)
  }
  ((embedding,),) = _names(config, 'token_embedding.embedding')
  if not config.untied_head and {_HEAD, embedding} <= arrays.keys():
    head = arrays.pop(_HEAD)
    if not np.array_equal(head[:], arrays[embedding][:]):
      raise UsageError(
        f'{_HEAD} is not {embedding}, but config.json has tie_word_embeddings.'
      )
  return arrays


def _names(config: ModelConfig, path: str) -> list[list[str]]:
  """Returns the names of a parameter's arrays, of each layer after layer."""
  if path == 'head.kernel':
    return [[_HEAD]]
  module, _, kind = path.rpartition('.')
  theirs = _ARCHITECTURES[config.architecture]
  name = theirs.prefix + theirs.modules[module]
  name += '.bias' if kind == 'bias' else '.weight'
  parts = [name.replace('*', x) for x in 'qkv'] if '*' in name else [name]
  layers = range(config.num_layers if path.startswith('blocks.') else 1)
  return [[part.format(layer) for layer in layers] for part in parts]
