"""Measures a model on texts: python -m examples.gpt2.evaluate --help."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm
import tyro

from examples.gpt2.command import (
  UsageError,
  about,
  check_at_least,
  exit_on_error,
  table,
)
from examples.gpt2.config import ModelConfig
from examples.gpt2.data import TokenSequences, fixed_batches, spread
from examples.gpt2.evaluations import losses_program
from examples.gpt2.model_files import Model, load_model
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.sharding import make_mesh, num_batch_shards
from examples.gpt2.storage import as_path
from examples.gpt2.token_files import is_text, open_held_out


class Evaluation(NamedTuple):
  """What was measured."""

  loss: float  # Mean cross-entropy, nats a token.
  num_sequences: int
  num_tokens: int  # Tokens whose prediction counts.
  # The loss in bits, by the mean number of bytes that a token has in the whole
  # text; None where that is not text.
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
  data: str | None = None,
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
      Default: what was held out of the data of the run.
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
  files, num_bytes = _open(data or _held_out(folder), text_field, model)
  num_tokens = sum(map(len, files))
  if context_length is None:
    length = max(1, min(length, num_tokens - 1))
  stride = stride or length
  if sequences is None and num_tokens > length:
    # What fills the last sequence does not count.
    fill = np.zeros((length + 1 - num_tokens) % stride, files[0].dtype)
    files = [np.concatenate([*(x[:] for x in files), fill])]
  with about('--data'):
    source = TokenSequences(files, length, model.num_tokens, stride)
  places = spread(len(source), sequences or len(source))
  rows = micro_batch_size * num_batch_shards(devices)
  program = losses_program(model.config, devices)
  batches = fixed_batches(source, places, rows, devices)
  total, count, in_sequence = 0.0, 0, np.arange(length)
  with jax.set_mesh(devices):
    for i in tqdm.trange(0, len(places), rows, desc='evaluating', delay=2):
      losses_BT = np.asarray(program(model.params, next(batches)))
      places_B1 = places[i : i + rows, None]
      # Of two sequences with a target, the first has it with less context.
      is_new_BT = (places_B1 == 0) | (in_sequence >= length - stride)
      is_new_BT &= places_B1 * stride + in_sequence < num_tokens - 1
      total += losses_BT[: len(places_B1)].sum(where=is_new_BT, dtype=float)
      count += int(is_new_BT.sum())
  bits = total / count / math.log(2) * num_tokens
  return Evaluation(
    total / count, len(places), count, bits / num_bytes if num_bytes else None
  )


def _open(data: str, text_field: str, model: Model) -> tuple[list[Any], int]:
  """Returns the tokens of each file, and the bytes of their text or 0."""
  if not is_text(data):
    return open_held_out(as_path(data), model.num_tokens), 0
  if model.tokenizer is None or model.end_token is None:
    raise UsageError(
      f'--data {data} is text, and the model has no tokenizer that names the '
      'token after each document: expected a token file, or a folder with '
      'val.bin.'
    )
  # Slow to import, and needed here alone.
  from examples.gpt2.prepare import read_text  # noqa: PLC0415

  found = read_text(data, text_field, model.tokenizer, model.end_token)
  return [found[0]], found[1]


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


def _held_out(folder: Path) -> str:
  """Returns the folder of token files that a run has its validation part of."""
  try:
    found, *others = RunFolder(folder).read_settings()['data']['folders']
  except (OSError, KeyError) as error:
    raise UsageError(
      f'{folder} does not tell what a model was trained on: give --data.'
    ) from error
  if others:
    raise UsageError(
      f'{folder} mixed several sources: give one of them by --data, out of '
      f'{", ".join([found, *others])}.'
    )
  return str(found)


if __name__ == '__main__':
  main()
