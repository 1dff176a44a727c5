"""What a model is, checked."""

import dataclasses
import math
import typing
from typing import Any, Literal

from examples.gpt2.config import Remat, UsageError

NORM_EPSILON = {'gpt2': 1e-5, 'llama': 1e-6}
INIT_STD = 0.02
"""Standard deviation of the initial weights of GPT-2 small."""
_GPT2_WIDTH = 768

# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64


def proportional_init_std(width: int, scale: float = 1.0) -> float:
  """Returns a multiple of GPT-2 small's proportion to the width."""
  deviation = scale * INIT_STD * math.sqrt(_GPT2_WIDTH / width)
  return float(f'{deviation:.3g}')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What a model is; a value that is not accepted raises ``UsageError``."""

  vocab_size: int  # Rows of the embedding.
  context_length: int  # Largest number of tokens in a sequence.
  num_layers: int
  num_heads: int  # A divisor of the width.
  width: int  # Features of the residual stream.
  mlp_width: int  # Hidden features of the MLP.
  # GPT-2 has LayerNorm, learned positions, GELU and biases, Llama RMSNorm,
  # rotary positions, SwiGLU and none.
  architecture: Literal['gpt2', 'llama'] = 'gpt2'
  # What norms of the residual stream add to the variance; None for 1e-5, of
  # llama 1e-6.
  norm_epsilon: float | None = None
  init_std: float = INIT_STD  # Of weights and embeddings.
  qk_norm: bool = False  # Whether queries and keys go through an RMSNorm.
  untied_head: bool = False  # Whether the head has a matrix of its own.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of activations.
  # In which gradients are summed over tokens and devices.
  reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'
  # What the backward pass recomputes: nothing, all but matrix products with
  # weights, or all within a block.
  remat: Remat = 'none'
  unroll: int = 1  # Layers that are compiled one by one in a turn of the loop.

  def __post_init__(self) -> None:
    if self.norm_epsilon is None:
      epsilon = NORM_EPSILON.get(self.architecture)
      object.__setattr__(self, 'norm_epsilon', epsilon)
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
  if typing.get_origin(hint) is Literal:
    choices = typing.get_args(hint)
    accepted, fits = 'out of ' + ', '.join(choices), value in choices
  elif hint is bool:
    accepted, fits = 'true or false', type(value) is bool
  else:
    kind = int if hint is int else float
    accepted = f'{"an integer" if kind is int else "a float"} above 0'
    fits = type(value) is kind and 0 < value < math.inf
  if not fits:
    raise UsageError(f'{name} must be {accepted}, got {value!r}.')


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
