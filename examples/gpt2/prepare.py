"""Makes token files from text: python -m examples.gpt2.prepare --help."""

import dataclasses
import hashlib
import heapq
import os
from pathlib import Path
from typing import NamedTuple

import tokenizers
import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data.documents import (
  DocumentReader,
  in_groups,
  read_with_progress,
)
from examples.gpt2.data.tokenizer import (
  MAX_VOCAB_SIZE,
  TOKEN_DTYPE,
  encode,
  load_tokenizer,
  new_folder,
  train_tokenizer,
)
from examples.gpt2.run.command import exit_on_error, table

_GPT2_VOCAB_SIZE = 50257


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
  """Makes train.bin, val.bin and tokenizer.json, for the trainer's --data.

  Lines of .jsonl files (and .ndjson, .json) are documents. Other files are a
  document each, or more with lines '<|endoftext|>' between them; long ones are
  cut every 131,072 bytes, at the end of a line. Files ending in .gz are
  unpacked. An end-of-text token follows each document. The same text gives the
  same files, on any number of cores.
  """

  data: tuple[Path, ...]
  """Files, and folders of files, to read in this order."""

  out_dir: Path
  """Folder of the results: a new or an empty one."""

  text_field: str = 'text'
  """Field that holds the text of a document in JSON."""

  tokenizer: Path | None = None
  """Vocabulary to use: a tokenizer.json, or a folder with it or with GPT-2's
  vocab.json and merges.txt (or encoder.json and vocab.bpe). Without, a
  byte-level byte-pair vocabulary is trained on the text."""

  vocab_size: int | None = None
  """Size of the vocabulary to train, at the most. Default: 50257."""

  sample_bytes: int = 100_000_000
  """Text to train the vocabulary on, at the most: the training documents with
  the smallest hashes."""

  validation_share: float = 0.005
  """Share of the documents to hold out: those whose SHA-256 hash, as a fraction
  of the largest, is below it. Equal documents fall into the same part."""

  skip_bad: bool = False
  """Leave out, and count, documents that are not UTF-8 or not JSON with the
  field, instead of stopping at the first."""


class Prepared(NamedTuple):
  """What was made.

  Attributes:
    documents: Number of documents to train on, and held out.
    tokens: Number of tokens to train on, and held out.
    num_bytes: Size of the text of all documents in UTF-8.
    num_skipped: Number of documents that could not be read.
    vocab_size: Number of token identifiers.
  """

  documents: tuple[int, int]
  tokens: tuple[int, int]
  num_bytes: int
  num_skipped: int
  vocab_size: int


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or the text or a
      file that cannot be read or written, 130 after control-C.
  """
  config = tyro.cli(
    PrepareConfig, args=args, prog='python -m examples.gpt2.prepare'
  )
  os.environ['TOKENIZERS_PARALLELISM'] = 'true'
  with exit_on_error():
    print(table(_rows(config, prepare(config))))


def prepare(config: PrepareConfig) -> Prepared:
  """Makes the token files of a corpus, all or nothing.

  Args:
    config: Settings as the user gave them.

  Returns:
    What was made.

  Raises:
    UsageError: If settings or text are wrong, or a part would be empty.
    OSError: If a file cannot be read or written.
  """
  _check(config)
  reader = DocumentReader(config.data, config.text_field, config.skip_bad)
  with new_folder(config.out_dir.expanduser().resolve()) as folder:
    tokenizer = _make_tokenizer(reader, config)
    tokenizer.save(str(folder / 'tokenizer.json'))
    prepared = _write_tokens(reader, tokenizer, config, folder)
    if not all(prepared.documents):
      raise UsageError(
        'Of the {} documents to train on and {} to hold out one part is '
        'empty: give more text to --data, or another --validation-share than '
        '{}.'.format(*prepared.documents, config.validation_share)
      )
  return prepared


def _check(config: PrepareConfig) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  size, share = config.vocab_size, config.validation_share
  if size is not None and config.tokenizer:
    raise UsageError(
      f'--vocab-size {size} is for a vocabulary that is trained: leave it out '
      'where --tokenizer gives one.'
    )
  if size is not None and not 257 <= size <= MAX_VOCAB_SIZE:
    raise UsageError(
      f'--vocab-size must be in [257, {MAX_VOCAB_SIZE}], got {size}.'
    )
  if not 0 < share < 1:
    raise UsageError(f'--validation-share must be in (0, 1), got {share}.')
  if config.sample_bytes < 1:
    raise UsageError(
      f'--sample-bytes must be at least 1, got {config.sample_bytes}.'
    )
  out_dir = config.out_dir.expanduser()
  if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
    raise UsageError(
      f'--out-dir {out_dir} is there and not an empty folder: choose another, '
      'or delete it.'
    )


def _make_tokenizer(
  reader: DocumentReader, config: PrepareConfig
) -> tokenizers.Tokenizer:
  """Reads the tokenizer that the settings name, or trains one."""
  if config.tokenizer:
    tokenizer = load_tokenizer(config.tokenizer.expanduser())
  else:
    tokenizer = train_tokenizer(
      _sample(reader, config), config.vocab_size or _GPT2_VOCAB_SIZE
    )
  # A document that spells the end-of-text token out does not end there.
  tokenizer.encode_special_tokens = True
  return tokenizer


def _hash(text: str) -> tuple[float, float]:
  """Returns two numbers in [0, 1], for the split and for the sample."""
  digest = hashlib.sha256(text.encode()).digest()
  split, sample = (int.from_bytes(digest[i : i + 8]) for i in (0, 8))
  return split / 2**64, sample / 2**64


def _sample(reader: DocumentReader, config: PrepareConfig) -> list[str]:
  """Returns the training documents of the smallest hashes, in their order."""
  heap: list[tuple[float, int, str]] = []
  total = 0
  for text in read_with_progress(reader, 'choosing text for the vocabulary'):
    split, order = _hash(text)
    if split < config.validation_share:
      continue
    size = len(text.encode())
    heapq.heappush(heap, (-order, size, text))
    total += size
    while total > config.sample_bytes and len(heap) > 1:
      total -= heapq.heappop(heap)[1]
  return [text for *_, text in sorted(heap, reverse=True)]


def _write_tokens(
  reader: DocumentReader,
  tokenizer: tokenizers.Tokenizer,
  config: PrepareConfig,
  folder: Path,
) -> Prepared:
  """Writes train.bin and val.bin."""
  documents, num_bytes = [0, 0], 0
  with (
    (folder / 'train.bin').open('wb') as train,
    (folder / 'val.bin').open('wb') as validation,
  ):
    for texts in in_groups(read_with_progress(reader, 'tokenizing')):
      parts: tuple[list[str], list[str]] = ([], [])
      for text in texts:
        parts[_hash(text)[0] < config.validation_share].append(text)
        num_bytes += len(text.encode())
      for i, file in enumerate((train, validation)):
        encode(tokenizer, parts[i]).tofile(file)
        documents[i] += len(parts[i])
    sizes = train.tell(), validation.tell()
  return Prepared(
    documents=(documents[0], documents[1]),
    tokens=(sizes[0] // TOKEN_DTYPE.itemsize, sizes[1] // TOKEN_DTYPE.itemsize),
    num_bytes=num_bytes,
    num_skipped=reader.num_skipped,
    vocab_size=tokenizer.get_vocab_size(),
  )


def _rows(config: PrepareConfig, prepared: Prepared) -> dict[str, str]:
  """Returns what a person wants to know of the result."""
  counts = '{:,} to train on, {:,} held out'
  per_token = prepared.num_bytes / sum(prepared.tokens)
  return {
    'documents': counts.format(*prepared.documents)
    + f', {prepared.num_skipped:,} left out as not readable',
    'tokens': counts.format(*prepared.tokens),
    'text': f'{prepared.num_bytes:,} bytes, {per_token:.2f} bytes per token',
    'vocabulary': f'{prepared.vocab_size:,} tokens',
    'results': str(config.out_dir),
  }


if __name__ == '__main__':
  main()
