"""Measures a model on a text: python -m examples.gpt2.evaluate --help.

Axes: B sequences, T tokens, D features.
"""

import math
from pathlib import Path
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import tqdm
import tyro

from examples.gpt2.command import exit_on_error, table
from examples.gpt2.config import ModelConfig, UsageError, check_at_least
from examples.gpt2.data.batches import make_batch, spread
from examples.gpt2.data.corpus import load_corpus
from examples.gpt2.data.token_files import (
  TOKEN_SUFFIXES,
  TokenFiles,
  has_token_files,
)
from examples.gpt2.data.tokenizer import encode
from examples.gpt2.data.tokens import check_length, load_evaluation
from examples.gpt2.loss import token_losses
from examples.gpt2.model import as_module
from examples.gpt2.model_files import Model, load_model
from examples.gpt2.run import trained_on
from examples.gpt2.sharding import make_mesh, num_batch_shards
from examples.gpt2.storage import as_path


class Evaluation(NamedTuple):
  """What was measured."""

  loss: float  # Mean cross-entropy, nats a token.
  num_sequences: int
  num_tokens: int  # Tokens whose prediction counts.
  # The loss in bits, by the mean number of bytes that a token has in the whole
  # text; None where that is not text.
  bits_per_byte: float | None


class Windows(NamedTuple):
  """Sequences of a text, of the same length."""

  starts: np.ndarray  # Their first tokens.
  first: np.ndarray  # The first target that counts in each.


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
  held_out: bool = False,
  text_field: str = 'text',
  context_length: int | None = None,
  stride: int | None = None,
  sequences: int | None = None,
  step: int | None = None,
  micro_batch_size: int = 8,
  mesh: str = '',
) -> Evaluation:
  """Measures the loss of a model on a text.

  Every token counts once, but for the first, which nothing predicts.

  Args:
    folder: Folder of a run, which may go on, or of an imported model.
    data: Text, JSON lines or Parquet, a file or a folder of files, which is
      tokenized as examples.gpt2.prepare does it, with the model's tokenizer; a
      file of tokens; or a folder of token files with a part to validate on.
      'stdlib' is what the trainer holds out of it.
    held_out: Measure the part of a text that the trainer holds out of it. Of a
      folder of token files that is measured anyway.
    text_field: Field that holds the text of a document in JSON, column in
      Parquet.
    context_length: Tokens in a sequence. Default: the model's, or the text's if
      that is shorter.
    stride: Tokens from one sequence to the next. With fewer than the context
      length, tokens have more context, which gives a lower and truer
      perplexity and takes longer. Default: the context length.
    sequences: Measure so many sequences, spread evenly over the text, as the
      trainer does. Default: all.
    step: Step of the run's checkpoint to measure. Default: the weights at the
      end of the run, or its last checkpoint.
    micro_batch_size: Sequences that each shard of a batch (data * fsdp of the
      mesh) processes at once.
    mesh: Axes of the device mesh, such as 'fsdp=4,tensor=2', as the trainer's.
  """
  check_at_least(
    1,
    sequences=sequences,
    micro_batch_size=micro_batch_size,
    context_length=context_length,
    stride=stride,
  )
  devices = make_mesh(mesh)
  model = load_model(folder, devices, step)
  length = context_length or model.config.context_length
  _check_context(model.config, length, stride, sequences)
  tokens, num_bytes = _read(data, held_out, model, text_field, folder)
  if context_length is None:
    length = min(length, len(tokens) - 1)
  check_length('val', tokens, max(length, 1))
  if sequences is None:
    windows = _all_windows(len(tokens), length, stride or length)
  else:
    windows = _spread_windows(len(tokens), length, sequences)
  rows = micro_batch_size * num_batch_shards(devices)
  loss = _mean_loss(model, tokens, windows, length, rows, devices)
  bits = loss / math.log(2) * len(tokens)
  return Evaluation(
    loss,
    len(windows.starts),
    int(np.sum(length - windows.first)),
    bits / num_bytes if num_bytes else None,
  )


def _check_context(
  config: ModelConfig, length: int, stride: int | None, sequences: int | None
) -> None:
  if config.architecture == 'gpt2' and length > config.context_length:
    raise UsageError(
      f'--context-length must be at most {config.context_length}, the '
      f'positions that the model has learned, got {length}.'
    )
  if stride is not None and sequences is not None:
    raise UsageError(
      '--sequences, which are spread over the text, take no --stride: leave '
      'out one of the two.'
    )
  if stride is not None and stride > length:
    raise UsageError(
      f'--stride must be at most the context length {length}, got {stride}.'
    )


def _read(
  data: str, held_out: bool, model: Model, text_field: str, folder: Path
) -> tuple[TokenFiles | np.ndarray, int]:
  """Returns tokens, and the bytes of their text or 0."""
  if held_out and as_path(data).suffix in TOKEN_SUFFIXES:
    raise UsageError(
      f'--data {data}: a file of tokens has no part to hold out; leave out '
      '--held-out, or give a folder of token files.'
    )
  is_split = held_out and not has_token_files(as_path(data))
  if is_split or data == 'stdlib':
    return _held_out(data, model, folder)
  found = load_evaluation(
    data, model.num_tokens, model.tokenizer, model.end_token, text_field
  )
  if found.num_bytes and data in trained_on(folder).get('data', ()):
    print(
      f'{data} is what the model was trained on: --held-out measures the '
      'part that it was not.',
      file=sys.stderr,
    )
  return found.tokens, found.num_bytes


def _held_out(data: str, model: Model, folder: Path) -> tuple[np.ndarray, int]:
  """Returns what the trainer holds out of a text, and the number of bytes."""
  if model.tokenizer is None or model.end_token is None:
    raise UsageError(
      f'--data {data}: there is no tokenizer for text that names the token '
      'after each document; give --data tokens.'
    )
  corpus = load_corpus([data])
  known = trained_on(folder)
  if known and known['sha256'] != corpus.sha256:
    print(
      f'The model was trained on --data {" ".join(known["data"])}, not on '
      f'{data} as it is now, and may have seen what is held out of it here. '
      'For a run on token files, --data with their folder measures the part '
      'that they hold out.',
      file=sys.stderr,
    )
  tokens = encode(model.tokenizer, model.end_token, corpus.texts('val'))
  return np.concatenate([*tokens]), corpus.num_bytes('val')


def _all_windows(num_tokens: int, length: int, stride: int) -> Windows:
  """Returns windows in which each target of a text counts once."""
  last = num_tokens - 1 - length
  starts = np.minimum(np.arange(0, last + stride, stride), last)
  ends = starts + length
  return Windows(starts, np.concatenate([[0], ends[:-1] - starts[1:]]))


def _spread_windows(num_tokens: int, length: int, count: int) -> Windows:
  starts = spread(num_tokens, length, count)
  return Windows(starts, np.zeros_like(starts))


def _mean_loss(
  model: Model,
  tokens: TokenFiles | np.ndarray,
  windows: Windows,
  length: int,
  rows: int,
  mesh: Mesh,
) -> float:
  """Returns the mean loss of the targets that count.

  ``length`` is that of the windows, of which ``rows`` are measured at once.
  """

  @jax.jit
  def measure(params: Any, tokens_BT: jax.Array, first_B: jax.Array) -> Any:
    module = as_module(model.config, params)
    features_BTD, _ = module.features(tokens_BT[:, :-1])
    losses_BT = token_losses(features_BTD, module.head_VD, tokens_BT[:, 1:])
    counts_BT = jnp.arange(length) >= first_B[:, None]
    return jnp.sum(losses_BT, where=counts_BT, axis=1)

  total = 0.0
  with jax.set_mesh(mesh):
    for i in tqdm.trange(
      0, len(windows.starts), rows, desc='evaluating', delay=2
    ):
      starts, first = (x[i : i + rows] for x in windows)
      # What fills the last batch counts for nothing.
      fill = (0, rows - len(first))
      first = np.pad(first, fill, constant_values=length)
      starts = np.resize(starts, rows)
      [tokens_BT] = make_batch(tokens, starts, length, rows, mesh)
      losses_B = measure(model.params, tokens_BT, first)
      total += float(np.asarray(losses_B).sum(dtype=np.float64))
  return total / float(np.sum(length - windows.first))


if __name__ == '__main__':
  main()
