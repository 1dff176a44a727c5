"""What a model is, as Hugging Face's config.json says it."""

from pathlib import Path
from typing import Any

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import END_OF_TEXT
from examples.gpt2.model.files import Model
from examples.gpt2.model.layers import ModelConfig, padded_vocab_size
from examples.gpt2.model.model_files import read_json

_SIZES = {
  'gpt2': {
    'n_positions': 'context_length',
    'n_layer': 'num_layers',
    'n_head': 'num_heads',
    'n_embd': 'width',
    'n_inner': 'mlp_width',
  },
  'llama': {
    'max_position_embeddings': 'context_length',
    'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads',
    'hidden_size': 'width',
    'intermediate_size': 'mlp_width',
  },
}
# What our models always have; it is also what an entry that is not there means.
_FIXED: dict[str, dict[str, Any]] = {
  'gpt2': {
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'add_cross_attention': False,
  },
  'llama': {
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'attention_bias': False,
    'mlp_bias': False,
    'rope_theta': 10000.0,
    'rope_scaling': None,
  },
}
_CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM'}


def to_settings(model: Model) -> dict[str, Any]:
  """Returns the entries of config.json for a model."""
  config, architecture = model.config, model.config.architecture
  end = model.tokenizer and model.tokenizer.token_to_id(END_OF_TEXT)
  sizes = {k: getattr(config, v) for k, v in _SIZES[architecture].items()}
  # Ours has no dropout, which GPT-2's has unless told.
  dropout = dict.fromkeys(('attn_pdrop', 'embd_pdrop', 'resid_pdrop'), 0.0)
  return {
    'model_type': architecture,
    'architectures': [_CLASSES[architecture]],
    'vocab_size': model.num_tokens,
    **sizes,
    **_FIXED[architecture],
    **(dropout if architecture == 'gpt2' else {}),
    'tie_word_embeddings': not config.untied_head,
    'bos_token_id': end,
    'eos_token_id': end,
    'torch_dtype': 'float32',
  }


def read_settings(path: Path) -> tuple[ModelConfig, int]:
  """Reads what a model is.

  Args:
    path: config.json of Hugging Face.

  Returns:
    What the model is, with a vocabulary rounded up as the trainer does, and the
    number of rows that the embedding has in Hugging Face.

  Raises:
    UsageError: If the file is missing or damaged, or describes another model
      than ours.
  """
  settings = read_json(path)
  architecture = settings.get('model_type')
  if architecture not in _SIZES:
    raise UsageError(
      f'{path}: model_type must be gpt2 or llama, got {architecture!r}.'
    )
  settings = _with_rope(settings)
  sizes = _read_sizes(path, settings, architecture)
  _check_fixed(path, settings, sizes, architecture)
  is_tied = settings.get('tie_word_embeddings', architecture == 'gpt2')
  num_rows = sizes.pop('vocab_size')
  config = ModelConfig(
    vocab_size=padded_vocab_size(num_rows),
    architecture=architecture,
    untied_head=not is_tied,
    **sizes,
  )
  return config, num_rows


def _with_rope(settings: dict[str, Any]) -> dict[str, Any]:
  """Renames what transformers 5 says of rotary positions as 4 does."""
  rope = settings.get('rope_parameters')
  if not isinstance(rope, dict):
    return settings
  scaling = {k: v for k, v in rope.items() if k != 'rope_theta'}
  is_plain = scaling in ({}, {'rope_type': 'default'})
  return settings | {
    'rope_theta': rope.get('rope_theta', settings.get('rope_theta', 10000.0)),
    'rope_scaling': None if is_plain else scaling,
  }


def _read_sizes(
  path: Path, settings: dict[str, Any], architecture: str
) -> dict[str, int]:
  """Returns sizes, checked, by the names that ModelConfig has."""
  names = _SIZES[architecture] | {'vocab_size': 'vocab_size'}
  values = {name: settings.get(name) for name in names}
  if architecture == 'gpt2' and values['n_inner'] is None:
    values['n_inner'] = 4 * (values['n_embd'] or 0)
  for name, value in values.items():
    if type(value) is not int or value < 1:
      raise UsageError(
        f'{path}: {name} must be an integer above 0, got {value!r}.'
      )
  return {names[name]: value for name, value in values.items()}


def _check_fixed(
  path: Path, settings: dict[str, Any], sizes: dict[str, int], architecture: str
) -> None:
  """Raises ``UsageError`` for an option that our models do not have."""
  heads, width = sizes['num_heads'], sizes['width']
  expected = dict(_FIXED[architecture])
  if width % heads or (architecture == 'llama' and width // heads % 2):
    raise UsageError(
      f'{path}: a head must have a whole number of features (llama: an even '
      f'one), got {width} for {heads} heads.'
    )
  if architecture == 'llama':
    expected |= {'num_key_value_heads': heads, 'head_dim': width // heads}
  for name, value in expected.items():
    got = settings.get(name)
    if got is not None and got != value:
      raise UsageError(
        f'{path}: {name} must be {value!r}, which our models have, got {got!r}.'
      )
