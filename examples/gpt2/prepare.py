"""Makes token files from text: python -m examples.gpt2.prepare --help."""

import dataclasses
import hashlib
import heapq
import os
from pathlib import Path

import tokenizers
import tyro

from examples.gpt2.config import UsageError, check_at_least
from examples.gpt2.data.atomic import new_folder
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.data.shards import PARTS, open_files
from examples.gpt2.data.tokenizer import (
  END_OF_TEXT,
  MAX_VOCAB_SIZE,
  num_identifiers,
  read_tokenizer,
  train_tokenizer,
)
from examples.gpt2.data.tokens import write_tokens
from examples.gpt2.run.command import exit_on_error, table

_GPT2_VOCAB_SIZE = 50257
# All characters of up to two bytes, many of more: each byte that UTF-8 has.
_PROBE = ''.join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 999)]))


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


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  config = tyro.cli(
    PrepareConfig, args=args, prog='python -m examples.gpt2.prepare'
  )
  os.environ['TOKENIZERS_PARALLELISM'] = 'true'
  with exit_on_error():
    print(table(prepare(config)))


def prepare(config: PrepareConfig) -> dict[str, str]:
  """Makes the token files of a corpus, all or nothing.

  Returns what was made, as names and values for people. Raises ``UsageError``
  if settings or text are wrong, or a part would be empty, and ``OSError`` if a
  file cannot be read or written, or ``--out-dir`` is not empty.
  """
  _check(config)
  reader = DocumentReader(config.data, config.text_field, config.skip_bad)
  with new_folder(config.out_dir.expanduser().resolve()) as folder:
    tokenizer = _make_tokenizer(reader, config)
    parted = (
      (PARTS[_hash(text)[0] < config.validation_share], text)
      for text in reader.read('tokenizing')
    )
    documents = write_tokens(folder, tokenizer, parted)
    if not all(documents):
      raise UsageError(
        'Of the {} documents to train on and {} to hold out one part is '
        'empty: give more text to --data, or another --validation-share than '
        '{}.'.format(*documents, config.validation_share)
      )
    size = num_identifiers(tokenizer)
    tokens = [len(open_files([folder / f'{x}.bin'], size)) for x in PARTS]
  counts = '{:,} to train on, {:,} held out'
  return {
    'documents': counts.format(*documents)
    + f', {reader.num_skipped:,} left out as not readable',
    'tokens': counts.format(*tokens),
    'text': f'{reader.num_bytes:,} bytes, '
    f'{reader.num_bytes / sum(tokens):.2f} bytes per token',
    'vocabulary': f'{tokenizer.get_vocab_size():,} tokens',
    'results': str(config.out_dir),
  }


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
  check_at_least(1, sample_bytes=config.sample_bytes)


def _make_tokenizer(
  reader: DocumentReader, config: PrepareConfig
) -> tokenizers.Tokenizer:
  """Reads the tokenizer that the settings name, or trains one."""
  if config.tokenizer is None:
    vocab_size = config.vocab_size or _GPT2_VOCAB_SIZE
    tokenizer = train_tokenizer(_sample(reader, config), vocab_size)
  else:
    tokenizer = read_tokenizer(config.tokenizer.expanduser(), MAX_VOCAB_SIZE)
    _check_tokenizer(tokenizer, config.tokenizer)
    tokenizer.add_special_tokens([END_OF_TEXT])
  # A document that spells the end-of-text token out does not end there.
  tokenizer.encode_special_tokens = True
  return tokenizer


def _check_tokenizer(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
  """Raises ``UsageError`` for a tokenizer that loses text or ends."""
  if tokenizer.token_to_id(END_OF_TEXT) is None:
    raise UsageError(f'--tokenizer {path} has no token {END_OF_TEXT}.')
  ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
  if tokenizer.decode(ids) != _PROBE:
    raise UsageError(
      f'--tokenizer {path} does not give back each text that it takes: '
      "expected a byte-level one, as GPT-2's."
    )


def _sample(reader: DocumentReader, config: PrepareConfig) -> list[str]:
  """Returns the training documents of the smallest hashes, in their order."""
  heap: list[tuple[float, int, str]] = []
  total = 0
  for text in reader.read('choosing text for the vocabulary'):
    split, order = _hash(text)
    if split < config.validation_share:
      continue
    size = len(text.encode())
    heapq.heappush(heap, (-order, size, text))
    total += size
    while total > config.sample_bytes and len(heap) > 1:
      total -= heapq.heappop(heap)[1]
  return [text for *_, text in sorted(heap, reverse=True)]


def _hash(text: str) -> tuple[float, float]:
  """Returns two numbers in [0, 1], for the split and for the sample."""
  digest = hashlib.sha256(text.encode()).digest()
  split, sample = (int.from_bytes(digest[i : i + 8]) for i in (0, 8))
  return split / 2**64, sample / 2**64


if __name__ == '__main__':
  main()
