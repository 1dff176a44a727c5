"""The data of a run: sources of sequences, and batches of them on the mesh.

A source is a class with ``__len__`` and ``__getitem__``, which gives the tokens
of a sequence. Grain shuffles, repeats, mixes and reads ahead. A batch is a pure
function of the seed and of the number of its first sequence, the same for any
mesh and any number of processes, of which each reads only its own rows.
"""

import bisect
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import math
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import grain
import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.command import UsageError, about
from examples.gpt2.config import Config, batch_sizes, digest
from examples.gpt2.processes import check_same
from examples.gpt2.sharding import batch_sharding, num_batch_shards
from examples.gpt2.storage import as_path, resolved
from examples.gpt2.token_files import (
  PARTS,
  has_token_files,
  open_held_out,
  open_part,
  parse_sources,
  read_index,
)

_THREADS = 16
_FINGERPRINTED = 256  # Sequences that the fingerprint of a source depends on.


class Sequences(Protocol):
  """Sequences of a source, each of which always has the same tokens.

  Indexing gives a sequence of --context-length tokens and its last target:
  int32, shape (T + 1,).
  """

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Source:
  """What a name in --data stands for."""

  train: Sequences
  validation: Sequences
  vocab_size: int  # Number that all tokens are below.


def open_source(name: str, config: Config) -> Source:
  """Opens a source of --data, a folder of token files.

  To train on something that is no file, return a ``Source`` of your own here
  for a name of your choice. It can be mixed with folders of token files that
  have as large a vocabulary. The command ``evaluate`` reads folders only.

  Raises ``UsageError`` if files are missing, damaged or too short.
  """
  folder = as_path(name)
  if not has_token_files(folder):
    is_there = name == 'stdlib' or folder.exists()
    raise UsageError(
      f'{name} is text, which is neither mixed nor weighted: make tokens of it '
      f'by python -m examples.gpt2.prepare --data {name} --out-dir OTHER, with '
      'the --tokenizer of the other sources.'
      if is_there
      else f'{name} does not exist.'
    )
  index = read_index(folder)
  vocab_size = index['vocab_size'] if index else config.model.vocab_size
  parts = {}
  for part in PARTS:
    with about(part):
      files = open_part(folder, part, vocab_size)
      parts[part] = TokenSequences(
        files, config.model.context_length, vocab_size
      )
  return Source(parts['train'], parts['val'], vocab_size)


class TokenSequences:
  """Sequences that begin every so many tokens of each of several token files.

  By default, each begins with the last target of the one before. Indexing
  raises ``UsageError`` for a token that is not below ``vocab_size``, and
  ``OSError`` where a file cannot be read.

  Args:
    files: Tokens of each file, as an array.
    length: Tokens of a sequence, without its last target.
    vocab_size: Number that all tokens have to be below.
    stride: Tokens from one sequence to the next. Default: the length.

  Raises:
    UsageError: If no file is long enough for a sequence.
  """

  def __init__(
    self,
    files: Sequence[Any],
    length: int,
    vocab_size: int,
    stride: int | None = None,
  ):
    self._files, self._length, self._vocab_size = files, length, vocab_size
    self._stride = stride or length
    counts = [
      max(0, 1 + (len(tokens) - 1 - length) // self._stride) for tokens in files
    ]
    self._ends = [0, *itertools.accumulate(counts)]
    if not len(self):
      raise UsageError(
        f'it has {max(map(len, files))} tokens, too few for a sequence of '
        f'--context-length {length} and its last target: give more text, a '
        'shorter context, or hold out more (--validation-share of prepare).'
      )

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> np.ndarray:
    file = bisect.bisect_right(self._ends, index) - 1
    start = (index - self._ends[file]) * self._stride
    tokens = self._files[file][start : start + self._length + 1]
    largest = tokens.max()
    if largest >= self._vocab_size:
      raise UsageError(
        f'the data holds the token {largest}, but the vocabulary has '
        f'{self._vocab_size} tokens: give a larger --vocab-size, which above '
        '65536 also has token files without a header read as uint32.'
      )
    return tokens.astype(np.int32)


class EvaluationSet(NamedTuple):
  """Sequences to evaluate on."""

  name: str
  sequences: Sequences
  weight: float  # Of its loss in the validation loss; may be 0.


@dataclasses.dataclass(frozen=True)
class Data:
  """What a run is trained and evaluated on."""

  folders: Sequence[str]  # Of the token files.
  # To train on, without end: an epoch of a source has each of its sequences
  # once, and each epoch another order.
  sequences: grain.MapDataset
  train_tokens: int  # Of an epoch.
  validation_tokens: int
  sha256: str  # Of the sequences and the weights, hexadecimal.
  evaluations: Sequence[EvaluationSet]
  vocab_size: int


def load_data(config: Config) -> Data:
  """Opens the token files that the settings name.

  Raises:
    UsageError: If the data is missing, too short for a sequence in one of its
      parts, not of the vocabulary, or not the same in all processes.
  """
  given = parse_sources(config.data)
  names, opened = _short_names(given), []
  for name, _ in given:
    with about(f'--data {name}'):
      opened.append(open_source(name, config))
  vocab_size = _vocab_size(opened)
  sizes = [x or len(y.train) for (_, x), y in zip(given, opened, strict=True)]
  weights = [size / math.fsum(sizes) for size in sizes]
  evaluations = [
    EvaluationSet(name, x.validation, weight)
    for name, x, weight in zip(names, opened, weights, strict=True)
  ]
  for text in config.eval_data:
    known = [x.name for x in evaluations]
    with about(f'--eval-data {text}'):
      evaluations.append(_named_set(text, known, vocab_size, config))
  train = [x.train for x in opened]
  validation = [x.validation for x in opened]
  data = Data(
    folders=[name for name, _ in given],
    sequences=mix(train, weights, config.seed),
    train_tokens=sum(map(len, train)) * config.model.context_length,
    validation_tokens=sum(map(len, validation)) * config.model.context_length,
    sha256=digest([fingerprint(x) for x in (*train, *validation)], weights),
    evaluations=evaluations,
    vocab_size=vocab_size,
  )
  prints = {
    f'--eval-data {x.name}': fingerprint(x.sequences)
    for x in evaluations[len(opened) :]
  }
  check_same({'the hash of --data': data.sha256, **prints})
  return data


def _short_names(named: Sequence[tuple[str, float | None]]) -> list[str]:
  """Returns the last parts of paths, or all of them to tell them apart."""
  names = [name for name, _ in named]
  if len({*map(resolved, names)}) < len(names):
    raise UsageError(
      f'--data names a source twice: {" ".join(names)}. Give each once, with '
      'the sum of its weights.'
    )
  short = [PurePath(name).name for name in names]
  return short if len({*short}) == len(short) else names


def _vocab_size(sources: Sequence[Source]) -> int:
  """Returns the size of the vocabulary, which all sources must share."""
  sizes = [x.vocab_size for x in sources]
  if len({*sizes}) > 1:
    raise UsageError(
      'Several sources of --data must have the same tokenizer, got '
      f'vocabularies of {sizes} tokens: make token files of the others by '
      'python -m examples.gpt2.prepare --tokenizer with the folder of the '
      'first, or give --vocab-size where a source has no index.json.'
    )
  return sizes[0]


def _named_set(
  text: str, known: Sequence[str], vocab_size: int, config: Config
) -> EvaluationSet:
  """Opens a set of --eval-data."""
  name, separator, path = text.partition('=')
  if not separator:
    name, path = PurePath(text).name or text, text
  if not name or not path or name in known:
    raise UsageError(
      'it must be a path, or name=path with a name that no other set has '
      f'({", ".join(known)}).'
    )
  files = open_held_out(as_path(path), vocab_size)
  sequences = TokenSequences(files, config.model.context_length, vocab_size)
  return EvaluationSet(name, sequences, 0.0)


def fingerprint(sequences: Sequences) -> str:
  """Returns a hash of some hundred sequences and of their number."""
  sha256 = hashlib.sha256(f'{len(sequences)} sequences'.encode())
  places = spread(len(sequences), _FINGERPRINTED).tolist()
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
    for tokens in threads.map(sequences.__getitem__, places):
      sha256.update(tokens.tobytes())
  return sha256.hexdigest()


def mix(
  sources: Sequence[Sequences], weights: Sequence[float], seed: int
) -> grain.MapDataset:
  """Returns sequences without end, shuffled in each epoch of a source."""
  shuffled = [
    grain.MapDataset.source(x).seed(seed).shuffle().repeat() for x in sources
  ]
  return grain.MapDataset.mix(shuffled, list(weights))


def batch_shape(
  config: Config, mesh: Mesh, batch_size: int | None = None
) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of the tokens of a step.

  The axes are micro-batches, sequences of a micro-batch of all shards, and
  tokens: inputs and, one further, targets.

  Args:
    config: Settings of the run.
    mesh: Device mesh.
    batch_size: Sequences of the step. Default: the setting.
  """
  rows = config.micro_batch_size * num_batch_shards(mesh)
  count = (batch_size or config.batch_size) // rows
  return micro_batch_shape(rows, config.model.context_length, mesh, count)


def micro_batch_shape(
  rows: int, length: int, mesh: Mesh, count: int = 1
) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of some micro-batches."""
  return jax.ShapeDtypeStruct(
    (count, rows, length + 1), np.int32, sharding=batch_sharding(mesh)
  )


def step_batches(
  config: Config, sequences: grain.MapDataset, mesh: Mesh, done: int = 0
) -> Iterator[jax.Array]:
  """Yields the batch of each step after those that are done.

  Batches that grow take the same sequences, in the same order.
  """
  counts = batch_sizes(config)
  rest = range(done, config.steps)
  for count, steps in itertools.groupby(rest, counts.__getitem__):
    shape = batch_shape(config, mesh, int(count))
    found = batches(sequences, shape, int(counts[:done].sum()))
    end = [*steps][-1] + 1
    yield from itertools.islice(found, end - done)
    done = end


def batches(
  sequences: grain.MapDataset, shape: jax.ShapeDtypeStruct, start: int = 0
) -> Iterator[jax.Array]:
  """Yields batches on the mesh, of which the next is read ahead.

  Args:
    sequences: Sequences in the order in which they are taken.
    shape: Shape (A, B, T + 1) and sharding of a batch, see ``batch_shape``.
    start: Number of the first sequence of the first batch. A run that goes on,
      or whose batches change their size, continues from any.

  Yields:
    The next batch, int32, as long as there are enough sequences.
  """
  micro_batches, rows, _ = shape.shape
  indices = shape.sharding.addressable_devices_indices_map(shape.shape)
  # T is not sharded; a process may have any rows of the mesh.
  mine = sorted({i for _, x, _ in indices.values() for i in range(rows)[x]})
  steps = (len(sequences) - start) // (micro_batches * rows)

  def micro_batch(number: int) -> np.ndarray:
    first = start + number * rows
    return np.stack([sequences[first + row] for row in mine])

  ahead = grain.ReadOptions(_THREADS, max(micro_batches, _THREADS))
  numbers = grain.MapDataset.range(steps * micro_batches)
  reader = iter(numbers.map(micro_batch).to_iter_dataset(ahead))
  with contextlib.closing(reader):
    for _ in range(steps):
      tokens_ANT = np.stack(list(itertools.islice(reader, micro_batches)))

      def block(index: Any, tokens_ANT: np.ndarray = tokens_ANT) -> np.ndarray:
        first = mine.index(range(rows)[index[1]].start)
        last = mine.index(range(rows)[index[1]][-1]) + 1
        return tokens_ANT[index[0], first:last, index[2]]

      yield jax.make_array_from_callback(shape.shape, shape.sharding, block)


def fixed_batches(
  sequences: Sequences, places: np.ndarray, rows: int, mesh: Mesh
) -> Iterator[jax.Array]:
  """Yields micro-batches of some sequences; repeated ones fill the last.

  Args:
    sequences: A source.
    places: Numbers of its sequences.
    rows: Sequences of a micro-batch of all shards.
    mesh: Device mesh.
  """
  count, length = math.ceil(len(places) / rows), len(sequences[0]) - 1
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(places, count * rows).tolist()
  chosen = grain.MapDataset.source(filled).map(sequences.__getitem__)
  return batches(chosen, micro_batch_shape(rows, length, mesh))


def spread(available: int, most: int) -> np.ndarray:
  """Returns places that are spread evenly, as many as there are or ``most``."""
  count = min(available, most)
  return np.arange(count) * available // max(count, 1)
