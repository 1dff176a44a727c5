"""Measures a model on a text: python -m examples.gpt2.evaluate --help.

Axes: B sequences, T tokens, D features.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import tqdm
import tyro

from examples.gpt2.command import exit_on_error, table
from examples.gpt2.config import ModelConfig, UsageError, check_at_least
from examples.gpt2.data import (
  check_vocabulary,
  make_batch,
  open_evaluation,
  spread,
)
from examples.gpt2.loss import token_losses
from examples.gpt2.model import as_module
from examples.gpt2.model_files import Model, load_model
from examples.gpt2.run import RunFolder
from examples.gpt2.sharding import make_mesh, num_batch_shards


class Evaluation(NamedTuple):
  """What was measured."""

  loss: float  # Mean cross-entropy, nats a token.
  num_sequences: int
  num_tokens: int  # Tokens whose prediction counts.
  # The loss in bits, by the mean number of bytes that a token has in the whole
  # text; None where that is not text.
  bits_per_byte: float | None


@dataclasses.dataclass(frozen=True)
class Windows:
  """Sequences of a text, of the same length: a source of batches."""

  tokens: Any  # Of the text.
  vocab_size: int
  length: int  # Of a sequence, without its last target.
  starts: np.ndarray  # Their first tokens.
  first: np.ndarray  # The first target that counts in each.

  def __len__(self) -> int:
    return len(self.starts)

  def __getitem__(self, index: Any) -> np.ndarray:
    start = self.starts[index]
    tokens = self.tokens[start : start + self.length + 1]
    check_vocabulary(tokens, self.vocab_size)
    return tokens.astype(np.int32)


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
  files, num_bytes = open_evaluation(
    data or _held_out(folder),
    model.num_tokens,
    model.tokenizer,
    model.end_token,
    text_field,
  )
  tokens = (
    files[0] if len(files) == 1 else np.concatenate([x[:] for x in files])
  )
  if context_length is None:
    length = min(length, len(tokens) - 1)
  if len(tokens) <= max(length, 1):
    raise UsageError(
      f'--data has {len(tokens)} tokens, too few for a sequence of '
      f'{max(length, 1)} tokens and its last target.'
    )
  if sequences is None:
    places = _all_places(len(tokens), length, stride or length)
  else:
    places = _spread_places(len(tokens), length, sequences)
  windows = Windows(tokens, model.num_tokens, length, *places)
  rows = micro_batch_size * num_batch_shards(devices)
  loss = _mean_loss(model, windows, rows, devices)
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


def _all_places(
  num_tokens: int, length: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns starts of windows in which each target of a text counts once.

  And the first target that counts in each.
  """
  last = num_tokens - 1 - length
  starts = np.minimum(np.arange(0, last + stride, stride), last)
  ends = starts + length
  return starts, np.concatenate([[0], ends[:-1] - starts[1:]])


def _spread_places(
  num_tokens: int, length: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
  starts = spread((num_tokens - 1) // length, count) * length
  return starts, np.zeros_like(starts)


def _mean_loss(model: Model, windows: Windows, rows: int, mesh: Mesh) -> float:
  """Returns the mean loss of the targets that count, ``rows`` at once."""
  length, count = windows.length, len(windows)

  @jax.jit
  def measure(params: Any, tokens_BT: jax.Array, first_B: jax.Array) -> Any:
    module = as_module(model.config, params)
    features_BTD, _ = module.features(tokens_BT[:, :-1])
    losses_BT = token_losses(features_BTD, module.head_VD, tokens_BT[:, 1:])
    counts_BT = jnp.arange(length) >= first_B[:, None]
    return jnp.sum(losses_BT, where=counts_BT, axis=1)

  total = 0.0
  with jax.set_mesh(mesh):
    for i in tqdm.trange(0, count, rows, desc='evaluating', delay=2):
      places = np.arange(i, min(i + rows, count))
      # What fills the last batch counts for nothing.
      fill = (0, rows - len(places))
      first = np.pad(windows.first[places], fill, constant_values=length)
      [tokens_BT] = make_batch(windows, places, rows, length, mesh)
      losses_B = measure(model.params, tokens_BT, first)
      total += float(np.asarray(losses_B).sum(dtype=np.float64))
  return total / float(np.sum(length - windows.first))


if __name__ == '__main__':
  main()
