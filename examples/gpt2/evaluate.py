"""Measures a model on held-out text: python -m examples.gpt2.evaluate --help.

Letters at the end of a name give the axes of an array: B sequences, T tokens.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
import tqdm
import tyro

from examples.gpt2.config import UsageError, flag
from examples.gpt2.data.batches import validation_starts, windows
from examples.gpt2.data.documents import load_corpus
from examples.gpt2.data.tokenizer import END_OF_TEXT, MAX_VOCAB_SIZE, encode
from examples.gpt2.data.tokens import map_tokens
from examples.gpt2.model.files import Model, as_module, load_model
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.loss import token_losses
from examples.gpt2.run.command import exit_on_error, table


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """Measures the loss of a model on the part of a text that is held out."""

  folder: tyro.conf.Positional[Path]
  """Folder of a finished run or of an imported model."""

  data: str
  """As the trainer's: text file, folder of text files or 'stdlib', of which the
  trainer's held-out part is tokenized with the model's own tokenizer; or a
  folder with val.bin."""

  context_length: int | None = None
  """Tokens in a sequence. Default: the model's."""

  sequences: int = 1024
  """Sequences to measure, at the most, spread evenly over the text."""

  micro_batch_size: int = 8
  """Sequences that are processed at once."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What was measured.

  Attributes:
    loss: Mean cross-entropy, nats a token.
    bits_per_byte: The same in bits, by the mean number of bytes that a token
      has in the whole held-out part; None where that is not text.
    num_sequences: Number of sequences.
    num_tokens: Number of tokens that were predicted.
  """

  loss: float
  bits_per_byte: float | None
  num_sequences: int
  num_tokens: int

  @property
  def perplexity(self) -> float:
    """Exponential of the loss."""
    return float(np.exp(self.loss))


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Tokens to measure a model on.

  Attributes:
    tokens: uint16, shape (tokens,).
    num_bytes: Size of the text in UTF-8, None if not known.
  """

  tokens: np.ndarray
  num_bytes: int | None


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read, and 130 after control-C.
  """
  config = tyro.cli(
    EvaluateConfig, args=args, prog='python -m examples.gpt2.evaluate'
  )
  with exit_on_error():
    print(table(_rows(evaluate(config))))


def evaluate(config: EvaluateConfig) -> Evaluation:
  """Measures the model of a folder.

  Args:
    config: Settings as the user gave them.

  Returns:
    What was measured; the loss is that of the trainer for the same tokens,
    context length and number of sequences.

  Raises:
    UsageError: If settings, folder or data are wrong.
    OSError: If a file cannot be read.
  """
  _check(config)
  model = load_model(config.folder)
  length = _context_length(config, model.config)
  held_out = _read(config.data, model)
  if len(held_out.tokens) <= length:
    raise UsageError(
      f'--data {config.data} holds out {len(held_out.tokens)} tokens, too few '
      f'for a sequence of --context-length {length} and its last target.'
    )
  starts = validation_starts(len(held_out.tokens), length, config.sequences)
  sequences_BT = windows(held_out.tokens, starts, length + 1)
  _check_tokens(config.data, sequences_BT, model.num_tokens)
  losses_B = sequence_losses(model, sequences_BT, config.micro_batch_size)
  loss = float(losses_B.mean(dtype=np.float64))
  return Evaluation(
    loss=loss,
    bits_per_byte=_bits_per_byte(loss, held_out),
    num_sequences=len(starts),
    num_tokens=len(starts) * length,
  )


def _check(config: EvaluateConfig) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  for name in ('context_length', 'sequences', 'micro_batch_size'):
    value = getattr(config, name)
    if value is not None and value < 1:
      raise UsageError(f'{flag(name)} must be at least 1, got {value}.')


def _context_length(config: EvaluateConfig, model: ModelConfig) -> int:
  """Returns the number of tokens in a sequence."""
  length = config.context_length or model.context_length
  if model.architecture == 'gpt2' and length > model.context_length:
    raise UsageError(
      f'--context-length must be at most {model.context_length}, the positions '
      f'that the model has learned, got {length}.'
    )
  return length


def _read(data: str, model: Model) -> HeldOut:
  """Reads val.bin, or tokenizes the held-out part of a text."""
  path = Path(data).expanduser() / 'val.bin'
  if path.is_file():
    return HeldOut(map_tokens(path), None)
  if model.tokenizer is None:
    raise UsageError(
      f'--data {data} holds no val.bin, and the model has no tokenizer for '
      'text: expected a folder with val.bin.'
    )
  return _tokenize(load_corpus(data).validation, model.tokenizer)


def _tokenize(
  documents: Sequence[str], tokenizer: tokenizers.Tokenizer
) -> HeldOut:
  """Tokenizes documents as the trainer does."""
  if tokenizer.token_to_id(END_OF_TEXT) is None:
    raise UsageError(
      f"The model's tokenizer has no token {END_OF_TEXT} to put after each "
      'document: give --data a folder with val.bin.'
    )
  if tokenizer.get_vocab_size() > MAX_VOCAB_SIZE:
    raise UsageError(
      f"The model's tokenizer has {tokenizer.get_vocab_size()} tokens: "
      f'expected at most {MAX_VOCAB_SIZE}.'
    )
  return HeldOut(
    encode(tokenizer, documents), sum(len(text.encode()) for text in documents)
  )


def _check_tokens(data: str, tokens: np.ndarray, num_tokens: int) -> None:
  """Raises ``UsageError`` for tokens that the model does not have."""
  if tokens.max() >= num_tokens:
    raise UsageError(
      f'--data {data} holds the token {tokens.max()}, but the model has '
      f'{num_tokens} tokens: its text was tokenized for another model.'
    )


def _bits_per_byte(loss: float, held_out: HeldOut) -> float | None:
  if not held_out.num_bytes:
    return None
  return loss / math.log(2) * len(held_out.tokens) / held_out.num_bytes


def sequence_losses(
  model: Model, sequences_BT: np.ndarray, micro_batch_size: int
) -> np.ndarray:
  """Returns the mean loss of each sequence, nats a token, float32, shape (B,).

  Args:
    model: Model.
    sequences_BT: Inputs and, one further, targets: int32, shape (B, T + 1).
    micro_batch_size: Sequences that are processed at once.
  """
  count = len(sequences_BT)
  size = min(micro_batch_size, count)
  params = jax.device_put(model.params)
  # Repeated sequences fill the last micro-batch, so that one shape is compiled.
  filled_BT = np.resize(
    sequences_BT, (-(-count // size) * size, *sequences_BT.shape[1:])
  )
  losses = [
    _losses(model.config, params, filled_BT[start : start + size])
    for start in tqdm.trange(0, count, size, desc='evaluating', delay=2)
  ]
  return np.concatenate(losses)[:count]


@functools.partial(jax.jit, static_argnums=0)
def _losses(
  config: ModelConfig, params: Any, tokens_BT: jax.Array
) -> jax.Array:
  model = as_module(config, params)
  features_BTD, _ = model.features(tokens_BT[:, :-1])
  losses_BT = token_losses(features_BTD, model.head_VD, tokens_BT[:, 1:])
  return losses_BT.mean(axis=-1)


def _rows(evaluation: Evaluation) -> dict[str, str]:
  """Returns what was measured as names and values."""
  rows = {
    'loss': f'{evaluation.loss:.4f} nats per token',
    'perplexity': f'{evaluation.perplexity:.4g}',
    'measured on': f'{evaluation.num_sequences:,} sequences, '
    f'{evaluation.num_tokens:,} tokens',
  }
  if evaluation.bits_per_byte is not None:
    rows['bits per byte'] = f'{evaluation.bits_per_byte:.4f}'
  return rows


if __name__ == '__main__':
  main()
