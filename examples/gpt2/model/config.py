"""What a model is, checked."""

import dataclasses
import math
import typing
from typing import Any, Literal

from examples.gpt2.config import UsageError

NORM_EPSILON = {'gpt2': 1e-5, 'llama': 1e-6}
"""What norms add to the variance, unless told."""

# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64
_ACCEPTED = {
  int: 'an integer above 0',
  float: 'a finite number above 0, with a point',
  bool: 'true or false',
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model is; a value that is not accepted raises ``UsageError``.

  Attributes:
    vocab_size: Rows of the embedding.
    context_length: Largest number of tokens in a sequence.
    num_layers: Transformer blocks.
    num_heads: Attention heads in a block, a divisor of ``width``.
    width: Features of the residual stream.
    mlp_width: Hidden features of the MLP.
    architecture: ``'gpt2'`` (LayerNorm, learned positions, GELU, biases) or
      ``'llama'`` (RMSNorm, rotary positions, SwiGLU, no biases).
    norm_epsilon: What the norms of the residual stream add to the variance.
    qk_norm: Whether queries and keys of each head go through an RMSNorm.
    untied_head: Whether the output head has a matrix of its own.
    dtype: Data type of activations; parameters are float32.
    remat: What the backward pass recomputes in each block: ``'none'``,
      ``'dots'`` (all but matrix products with weights) or ``'full'``.
    unroll: Layers that are compiled one by one in a turn of the loop.
  """

  vocab_size: int
  context_length: int
  num_layers: int
  num_heads: int
  width: int
  mlp_width: int
  architecture: Literal['gpt2', 'llama'] = 'gpt2'
  norm_epsilon: float = NORM_EPSILON['gpt2']
  qk_norm: bool = False
  untied_head: bool = False
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  remat: Literal['none', 'dots', 'full'] = 'none'
  unroll: int = 1

  def __post_init__(self) -> None:
    for name, value in vars(self).items():
      check_entry(name, value, name)
    if self.width % self.num_heads:
      raise UsageError(
        f'num_heads {self.num_heads} must divide width {self.width}.'
      )
    if self.architecture == 'llama' and self.head_width % 2:
      raise UsageError(
        f'width / num_heads must be even for llama, got {self.head_width}.'
      )

  @property
  def head_width(self) -> int:
    """Features of a head."""
    return self.width // self.num_heads


def check_entry(name: str, value: Any, field: str) -> None:
  """Raises ``UsageError`` for a value that a field does not accept."""
  hint = typing.get_type_hints(ModelConfig)[field]
  choices = typing.get_args(hint)
  if choices:
    fits = value in choices
  else:
    fits = type(value) is hint and (hint is bool or 0 < value < math.inf)
  if not fits:
    accepted = 'out of ' + ', '.join(choices) if choices else _ACCEPTED[hint]
    raise UsageError(f'{name} must be {accepted}, got {value!r}.')


def from_json(values: Any) -> ModelConfig:
  """Makes a :class:`ModelConfig` of what ``dataclasses.asdict`` made of one.

  Args:
    values: Entries. Those with a default may be missing, as they are in files
      of older versions.

  Raises:
    UsageError: If an entry is missing, unknown or not accepted.
  """
  if not isinstance(values, dict):
    raise UsageError(f'config must be a JSON object, got {values!r}.')
  fields = {x.name: x.default for x in dataclasses.fields(ModelConfig)}
  for name in sorted(fields.keys() ^ values.keys()):
    if fields.get(name, dataclasses.MISSING) is dataclasses.MISSING:
      state = 'an unknown' if name in values else 'no'
      raise UsageError(
        f'config has {state} entry {name}: expected {", ".join(fields)}.'
      )
  epsilon = NORM_EPSILON.get(str(values.get('architecture')), 1e-5)
  return ModelConfig(**{'norm_epsilon': epsilon} | values)


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
