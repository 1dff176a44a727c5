"""Models from and for Hugging Face: python -m examples.gpt2.convert -h.

transformers reads and writes the configuration and writes the tokenizer;
weights are moved here.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
from pathlib import Path
import re
import sys
from typing import Any, Literal, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import tqdm
import tyro

from examples.gpt2 import model_files
from examples.gpt2.command import UsageError, exit_on_error
from examples.gpt2.config import (
  ModelConfig,
  RopeScaling,
  complete,
  padded_vocab_size,
)
from examples.gpt2.model import shapes
from examples.gpt2.model_card import CARD, model_card
from examples.gpt2.model_files import Model, load_model, read_json
from examples.gpt2.sharding import by_path, path_name
from examples.gpt2.storage import as_path, new_folder
from examples.gpt2.tokenizer import (
  TOKENIZER,
  find_begin,
  num_identifiers,
  read_vocabulary,
)


class _Architecture(NamedTuple):
  """What Hugging Face calls the settings and arrays of an architecture."""

  model_class: str
  prefix: str  # Of all arrays but the head's; models without a head lack it.
  entries: dict[str, str]  # Of the configuration.
  modules: dict[str, str]  # {} is the number of the layer, * is q, k and v.
  # What is accepted of further entries; the first is what is written.
  fixed: dict[str, tuple[Any, ...]]


_SIZES = dict(
  context_length='max_position_embeddings',
  width='hidden_size',
  num_layers='num_hidden_layers',
  num_heads='num_attention_heads',
)
_ARCHITECTURES = {
  'gpt2': _Architecture(
    model_class='GPT2LMHeadModel',
    prefix='transformer.',
    entries=dict(
      **_SIZES,
      mlp_width='n_inner',
      norm_epsilon='layer_norm_epsilon',
    ),
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
      # Two names of the same function.
      'activation_function': ('gelu_new', 'gelu_pytorch_tanh'),
      'scale_attn_weights': (True,),
      'scale_attn_by_inverse_layer_idx': (False,),
      'add_cross_attention': (False,),
    },
  ),
  'llama': _Architecture(
    model_class='LlamaForCausalLM',
    prefix='model.',
    entries=dict(
      **_SIZES,
      num_kv_heads='num_key_value_heads',
      head_width='head_dim',
      mlp_width='intermediate_size',
      norm_epsilon='rms_norm_eps',
    ),
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
    fixed={
      'hidden_act': ('silu',),
      'attention_bias': (False,),
      'mlp_bias': (False,),
    },
  ),
}
_WEIGHTS = 'model.safetensors'
_HEAD = 'lm_head.weight'
_VOCABULARIES = ('token_embedding.embedding', 'head.kernel')
# Constants that GPT-2 and Llama 2 have beside their weights.
_CONSTANTS = re.compile(
  r'.*h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq'
)
_ROPE_SCALING = (
  'factor', 'low_freq_factor', 'high_freq_factor',
  'original_max_position_embeddings',
)  # fmt: skip


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  with exit_on_error():
    tyro.extras.subcommand_cli_from_dict(
      {'export': export_model, 'import': import_model},
      args=args,
      prog='python -m examples.gpt2.convert',
      description='Turns models into and out of folders of Hugging Face.',
    )


def export_model(
  folder: tyro.conf.Positional[Path],
  out: tyro.conf.Positional[Path],
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  max_shard_size: str = '5GB',
  step: int | None = None,
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a run, which may go on, or of an imported model.
    out: Folder of the result: a new or an empty one.
    step: Step of the run's checkpoint to export. Default: the weights at the
      end of the run, or its last checkpoint.
    dtype: Data type of the weights.
    max_shard_size: Largest size of a file of weights, in KB, MB, GB or TB; a
      larger model is written as several files with an index.
  """
  if model_files.read_description(folder).config.qk_norm:
    raise UsageError(
      'Neither GPT2LMHeadModel nor LlamaForCausalLM has qk_norm: only a model '
      'without it can be exported.'
    )
  with new_folder(as_path(out)) as scratch:
    model = load_model(folder, step=step)
    special_ids = _write_tokenizer(scratch, model)
    to_theirs(model, dtype, **special_ids).save_pretrained(scratch)
    _write_weights(scratch, model, dtype, max_shard_size)
    (scratch / CARD).write_text(model_card(folder, model, step))
  print(f'wrote {out}')


def import_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Reads a GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts) and
      perhaps tokenizer.json.
    out: Folder of the result, a new or an empty one: a model folder, for
      examples.gpt2.generate, evaluate, and train with --init-from.
  """
  folder = as_path(folder)
  with new_folder(as_path(out)) as scratch:
    with model_files.naming(folder / 'config.json'):
      config, num_rows = from_theirs(read_json(folder / 'config.json'))
    known = read_vocabulary(folder, num_rows)
    num_tokens = num_rows
    if 'tokenizer' in known:
      num_tokens = num_identifiers(known['tokenizer'])
    else:
      print(
        f'{folder} has no {TOKENIZER}, so the result has no tokenizer.',
        file=sys.stderr,
      )
    vocab_size = padded_vocab_size(num_tokens)
    config = dataclasses.replace(config, vocab_size=vocab_size)
    params = _read_weights(folder, config, num_rows)
    model_files.save_model(scratch, Model(config, num_tokens, params, **known))
  print(f'wrote {out}')


def _transformers() -> Any:
  """Returns the package, which only this command needs."""
  os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
  try:
    import transformers  # noqa: PLC0415  Optional, and slow to import.
  except ModuleNotFoundError as error:
    raise UsageError(
      "transformers is missing: pip install -e '.[convert]' in the clone."
    ) from error
  return transformers


def to_theirs(model: Model, dtype: str, **special_ids: int | None) -> Any:
  """Returns a model's configuration in transformers, with weights of a dtype.

  ``special_ids`` are ``bos_token_id`` and so on.
  """
  config = model.config
  theirs = _ARCHITECTURES[config.architecture]
  entries = {name: getattr(config, x) for x, name in theirs.entries.items()}
  entries |= {name: accepted[0] for name, accepted in theirs.fixed.items()}
  if config.architecture == 'llama':
    rope = {'rope_type': 'default', 'rope_theta': config.rope_theta}
    if config.rope_scaling is not None:
      *factors, length = config.rope_scaling
      values = zip(_ROPE_SCALING, (*factors, round(length)), strict=True)
      rope |= {'rope_type': 'llama3', **dict(values)}
    entries['rope_parameters'] = rope
  return _transformers().AutoConfig.for_model(
    config.architecture,
    **entries,
    **{'bos_token_id': None, 'eos_token_id': None} | special_ids,
    vocab_size=model.num_tokens,
    tie_word_embeddings=not config.untied_head,
    architectures=[theirs.model_class],
    dtype=dtype,
  )


def from_theirs(settings: dict[str, Any]) -> tuple[ModelConfig, int]:
  """Returns what the model of a config.json is, and its number of tokens.

  Raises ``UsageError`` for one that is not ours.
  """
  kind = settings.get('model_type')
  if kind not in _ARCHITECTURES:
    raise UsageError(f'model_type must be gpt2 or llama, got {kind!r}.')
  try:
    theirs = _transformers().AutoConfig.for_model(**settings)
  except Exception as error:  # The library raises nothing narrower.
    raise UsageError(str(error)) from error
  for name, accepted in _ARCHITECTURES[kind].fixed.items():
    if (got := getattr(theirs, name)) not in accepted:
      raise UsageError(
        f'{name} must be {accepted[0]!r}, which our models have, got {got!r}.'
      )
  entries = _ARCHITECTURES[kind].entries
  values = {ours: getattr(theirs, name) for ours, name in entries.items()}
  if values['mlp_width'] is None:
    values['mlp_width'] = 4 * values['width']
  if kind == 'llama':
    rope = theirs.rope_parameters
    if rope['rope_type'] not in ('default', 'llama3'):
      raise UsageError(
        f'rope_type must be default or llama3, got {rope["rope_type"]!r}.'
      )
    values['rope_theta'] = float(rope['rope_theta'])
    if rope['rope_type'] == 'llama3':
      values['rope_scaling'] = RopeScaling(
        *(float(rope[name]) for name in _ROPE_SCALING)
      )
  model = ModelConfig(
    **values,
    vocab_size=padded_vocab_size(theirs.vocab_size),
    architecture=kind,
    untied_head=not theirs.tie_word_embeddings,
  )
  return complete(model), theirs.vocab_size


def _write_tokenizer(folder: Path, model: Model) -> dict[str, int | None]:
  """Writes the tokenizer and what came with it; returns its special tokens."""
  for name, content in model.companions.items():
    (folder / name).write_bytes(content)
  if model.tokenizer is None:
    return {}
  model.tokenizer.save(str(folder / TOKENIZER))
  tokenizer = _transformers().PreTrainedTokenizerFast.from_pretrained(folder)
  if tokenizer.bos_token is None:  # Else a text begins after another's end.
    begin = map(model.tokenizer.id_to_token, find_begin(model.tokenizer))
    tokenizer.bos_token = next(begin, tokenizer.eos_token)
  tokenizer.model_max_length = model.config.context_length
  tokenizer.save_pretrained(folder)
  names = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  return {name: getattr(tokenizer, name) for name in names}


def _write_weights(
  folder: Path, model: Model, dtype: str, max_shard_size: str
) -> None:
  """Writes model.safetensors, or its parts and their index."""
  arrays = to_arrays(model.config, model.num_tokens, model.params)
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
    model_files.write_arrays(folder / part, shard, {'format': 'pt'})
  if split.is_sharded:
    index = {'metadata': split.metadata, 'weight_map': split.tensor_to_filename}
    (folder / f'{_WEIGHTS}.index.json').write_text(json.dumps(index, indent=2))


def _read_weights(folder: Path, config: ModelConfig, num_rows: int) -> Any:
  """Reads the weights, from one file or its parts."""
  parts = [folder / _WEIGHTS]
  if not parts[0].is_file():
    parts = sorted(folder.glob('model-*.safetensors'))
  if not parts:
    raise UsageError(
      f'{folder} holds no {_WEIGHTS} and no parts of it: pickles (*.bin) are '
      'not read, since they can run any code.'
    )
  arrays: dict[str, Any] = {}
  for path in parts:
    with model_files.naming(path):
      arrays |= model_files.open_arrays(path)
  with model_files.naming(folder / _WEIGHTS):
    return from_arrays(config, num_rows, arrays)


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
  pad a smaller one are the mean of its own, so that they are at most as likely
  as the others on average, by Jensen's inequality. Raises ``UsageError`` for an
  array that the model does not have or has otherwise.
  """
  num_ours = config.vocab_size
  config = dataclasses.replace(config, vocab_size=num_rows)
  arrays, ours = _relevant(arrays, config), shapes(config)
  theirs = jax.eval_shape(lambda x: to_arrays(config, num_rows, x), ours)
  model_files.check_arrays(arrays, theirs, ('F32', 'F16', 'BF16'))

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
  if not config.untied_head:
    arrays.pop(_HEAD, None)  # transformers does not read it either.
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


if __name__ == '__main__':
  main()
