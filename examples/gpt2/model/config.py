"""What a model is, checked."""

from collections.abc import Callable
import dataclasses
import math
import typing
from typing import Any, Literal, NamedTuple

from examples.gpt2.config import ROPE_SCALING, Remat, UsageError

NORM_EPSILON = {'gpt2': 1e-5, 'llama': 1e-6}
ROPE_THETA = 10_000.0
INIT_STD = 0.02
"""Standard deviation of the initial weights of GPT-2 small."""
_GPT2_WIDTH = 768

# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64


def proportional_init_std(width: int, scale: float = 1.0) -> float:
  """Returns a multiple of GPT-2 small's proportion to the width."""
  deviation = scale * INIT_STD * math.sqrt(_GPT2_WIDTH / width)
  return float(f'{deviation:.3g}')


class RopeScaling(NamedTuple):
  """How Llama 3.1 slows rotary positions, for a context longer than before.

  Features that turn less than ``low_freq_factor`` times in the original context
  turn slower by the factor, those that turn more than ``high_freq_factor``
  times as before, and those in between by something in between.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context_length: float  # Tokens.


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
  norm_epsilon: float = None  # type: ignore[assignment]
  # The next four are llama's. Heads of keys and values, each for a group of
  # adjacent heads; None for one for each head.
  num_kv_heads: int = None  # type: ignore[assignment]
  # Features of a head; None for width / heads.
  head_width: int = None  # type: ignore[assignment]
  rope_theta: float = ROPE_THETA  # Base of the frequencies of positions.
  rope_scaling: RopeScaling | None = None
  init_std: float = INIT_STD  # Of weights and embeddings.
  qk_norm: bool = False  # Whether queries and keys go through an RMSNorm.
  untied_head: bool = False  # Whether the head has a matrix of its own.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of activations.
  # What the backward pass recomputes: nothing, all but matrix products with
  # weights, or all within a block.
  remat: Remat = 'none'
  unroll: int = 1  # Layers that are compiled one by one in a turn of the loop.

  def __post_init__(self) -> None:
    if self.rope_scaling is not None:  # A list in JSON.
      scaling = RopeScaling(*map(float, self.rope_scaling))
      object.__setattr__(self, 'rope_scaling', scaling)
    for name, value in vars(self).items():
      check_entry(name, value, name)
    defaults = {'norm_epsilon': NORM_EPSILON[self.architecture]}
    for name, value in (defaults | attention_defaults(self)).items():
      if getattr(self, name) is None:
        object.__setattr__(self, name, value)
    check_attention(self)

  @property
  def attention_width(self) -> int:
    """Features of all heads together."""
    return self.num_heads * self.head_width


def check_entry(name: str, value: Any, field: str) -> None:
  """Raises ``UsageError`` for a value that a field does not accept."""
  hint = typing.get_type_hints(ModelConfig)[field]
  if typing.get_origin(hint) is Literal:
    choices = typing.get_args(hint)
    accepted, fits = 'out of ' + ', '.join(choices), value in choices
  elif hint is bool:
    accepted, fits = 'true or false', type(value) is bool
  elif hint == RopeScaling | None:
    accepted = f'None or {ROPE_SCALING.text}'
    fits = value is None or ROPE_SCALING.holds(value)
  else:
    # It is filled in after the check.
    is_optional = getattr(ModelConfig, field, 0) is None
    kind = int if hint is int else float
    accepted = f'{"an integer" if kind is int else "a float"} above 0'
    is_number = type(value) is kind and 0 < value < math.inf
    fits = is_number or (is_optional and value is None)
  if not fits:
    raise UsageError(f'{name} must be {accepted}, got {value!r}.')


def attention_defaults(config: Any) -> dict[str, Any]:
  """Returns the attention of a model whose settings say nothing of it.

  That is what every GPT-2 has.
  """
  return {
    'num_kv_heads': config.num_heads,
    'head_width': config.width // config.num_heads,
    'rope_theta': ROPE_THETA,
    'rope_scaling': None,
  }


def check_attention(config: Any, named: Callable[[str], str] = str) -> None:
  """Raises ``UsageError`` for attention that no model has.

  ``named`` gives what the settings are called in the message.
  """
  num_heads = f'{named("num_heads")} {config.num_heads}'
  if config.width % config.num_heads:
    raise UsageError(
      f'{num_heads} must divide {named("width")} {config.width}.'
    )
  if config.num_heads % config.num_kv_heads:
    raise UsageError(
      f'{named("num_kv_heads")} {config.num_kv_heads} must divide {num_heads}.'
    )
  if config.architecture == 'llama' and config.head_width % 2:
    raise UsageError(
      f'{named("head_width")} must be even for llama, got {config.head_width} '
      f'({named("width")} {config.width}, {num_heads}).'
    )
  for name, usual in attention_defaults(config).items():
    value = getattr(config, name)
    if config.architecture != 'llama' and value != usual:
      raise UsageError(
        f'{named(name)} is for {named("architecture")} llama, got {value}.'
      )


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return math.ceil(num_tokens / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
