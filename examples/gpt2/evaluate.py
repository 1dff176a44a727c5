"""Measures a model on held-out text: python -m examples.gpt2.evaluate --help.

Axes: A micro-batches, B sequences, T tokens.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
import tyro

from examples.gpt2.config import Config, UsageError, check_at_least
from examples.gpt2.data.batches import validation_batch
from examples.gpt2.data.corpus import load_corpus
from examples.gpt2.data.shards import TokenFiles, open_parts, read_index
from examples.gpt2.data.tokenizer import END_OF_LINE, Encoder
from examples.gpt2.data.tokens import check_length
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.files import Model, load_model
from examples.gpt2.model.loss import sequence_losses
from examples.gpt2.model.transformer import as_module
from examples.gpt2.run.command import exit_on_error, table
from examples.gpt2.storage import as_path


class Evaluation(NamedTuple):
  """What was measured."""

  loss: float  # Mean cross-entropy, nats a token.
  num_sequences: int
  num_tokens: int  # Tokens that were predicted.
  # The loss in bits, by the mean number of bytes that a token has in the whole
  # held-out part; None where that is not text.
  bits_per_byte: float | None


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  with exit_on_error():
    found = tyro.cli(
      evaluate, args=args, prog='python -m examples.gpt2.evaluate'
    )
  rows = {
    'loss': f'{found.loss:.4f} nats per token',
    'perplexity': f'{math.exp(found.loss):.4g}',
    'measured on': f'{found.num_sequences:,} sequences, '
    f'{found.num_tokens:,} tokens',
  }
  if found.bits_per_byte is not None:
    rows['bits per byte'] = f'{found.bits_per_byte:.4f}'
  print(table(rows))


def evaluate(
  folder: tyro.conf.Positional[Path],
  data: str,
  context_length: int | None = None,
  sequences: int = 1024,
  micro_batch_size: int = 8,
  mesh: str = '',
) -> Evaluation:
  """Measures the loss of a model on the part of a text that is held out.

  The loss is that of the trainer for the same tokens, context length and number
  of sequences.

  Args:
    folder: Folder of a finished run or of an imported model.
    data: As the trainer's: text file, folder of text files or 'stdlib', of
      which the trainer's held-out part is tokenized with the model's own
      tokenizer; or a folder with val.bin.
    context_length: Tokens in a sequence. Default: the model's.
    sequences: Sequences to measure, at the most, spread evenly over the text.
    micro_batch_size: Sequences that each shard of a batch (data * fsdp of the
      mesh) processes at once.
    mesh: Axes of the device mesh, such as 'fsdp=4,tensor=2', as the trainer's.
  """
  check_at_least(
    1,
    sequences=sequences,
    micro_batch_size=micro_batch_size,
    context_length=context_length,
  )
  devices = make_mesh(mesh)
  model = load_model(folder, devices)
  config = Config(
    context_length=context_length or model.config.context_length,
    eval_sequences=sequences,
    batch_size=micro_batch_size,
    micro_batch_size=micro_batch_size,
  )
  tokens, num_bytes = _read(data, model)
  _check_fits(model, tokens, config.context_length, data)
  batch_ABT, count = validation_batch(tokens, config, devices)

  @jax.jit
  def measure(params: Any, tokens_BT: jax.Array) -> jax.Array:
    return sequence_losses(as_module(model.config, params), tokens_BT)

  progress = tqdm.tqdm(batch_ABT, 'evaluating', delay=2)
  with jax.set_mesh(devices):
    losses = [measure(model.params, tokens_BT) for tokens_BT in progress]
  loss = float(np.concatenate(losses)[:count].mean(dtype=np.float64))
  bits = loss / math.log(2) * len(tokens)
  per_byte = bits / num_bytes if num_bytes else None
  return Evaluation(loss, count, count * config.context_length, per_byte)


def _read(data: str, model: Model) -> tuple[TokenFiles | np.ndarray, int]:
  """Returns the held-out tokens, and the bytes of their text or 0."""
  path = as_path(data)
  parts = open_parts(path, model.num_tokens, read_index(path))
  if 'val' in parts:
    return parts['val'], 0
  if model.tokenizer is None:
    raise UsageError(
      f'--data {data} holds no val.bin, and the model has no tokenizer for '
      'text: expected a folder with val.bin.'
    )
  if model.end_token is None:
    raise UsageError(
      "The model's tokenizer does not tell which token comes after each "
      'document: give --data a folder with val.bin.'
    )
  documents = load_corpus(data).validation
  num_bytes = sum(len(text.encode()) for text in documents)
  encode = Encoder(model.tokenizer, model.end_token, END_OF_LINE)
  return encode(documents), num_bytes


def _check_fits(
  model: Model, tokens: TokenFiles | np.ndarray, length: int, data: str
) -> None:
  """Raises ``UsageError`` for what the model cannot be measured on."""
  config = model.config
  if config.architecture == 'gpt2' and length > config.context_length:
    raise UsageError(
      f'--context-length must be at most {config.context_length}, the '
      f'positions that the model has learned, got {length}.'
    )
  check_length('validation', tokens, length)
  chunks = [tokens] if isinstance(tokens, np.ndarray) else tokens.chunks()
  largest = max(int(chunk.max()) for chunk in chunks)
  if largest >= model.num_tokens:
    raise UsageError(
      f'--data {data} holds the token {largest}, but the model has '
      f'{model.num_tokens} tokens: its text was tokenized for another model.'
    )


if __name__ == '__main__':
  main()
