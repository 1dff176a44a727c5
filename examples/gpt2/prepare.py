"""Makes token files from text: python -m examples.gpt2.prepare --help."""

import collections
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import hashlib
import heapq
import os
from pathlib import Path
from typing import Any
import unicodedata

import numpy as np
import tokenizers
import tyro

from examples.gpt2.command import exit_on_error, table
from examples.gpt2.config import UsageError, check_at_least, digest
from examples.gpt2.data import files
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.data.shards import PARTS, PROGRESS
from examples.gpt2.data.tokenizer import (
  COMPANIONS,
  END_OF_TEXT,
  Encoder,
  find_end_token,
  grouped,
  read_companions,
  read_tokenizer,
  train_tokenizer,
  with_end_token,
)
from examples.gpt2.data.writer import ShardWriter
from examples.gpt2.run.claim import LOCK, claim, is_claim
from examples.gpt2.storage import (
  as_path,
  is_remote,
  make_folder,
  write_whole,
)

_GPT2_VOCAB_SIZE = 50257
# All characters of up to two bytes, many of more: each byte that UTF-8 has.
_PROBE = ''.join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 999)]))
# What SentencePiece has for a space.
_BLOCK = '\u2581'
_TOKENIZER = 'tokenizer.json'
# Groups of documents that are tokenized while others are read and written.
_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
  """Makes token files and tokenizer.json, for the trainer's --data.

  Lines of .jsonl files (and .ndjson, .jsonlines, .json), or the items of one
  array, and rows of .parquet files are documents. Other files are a document
  each, or more with lines '<|endoftext|>' between them; long ones are cut every
  131,072 bytes, at the end of a line. Files ending in .gz, .zst, .bz2 and .xz
  are unpacked. An end-of-text token follows each document. The same text gives
  the same files, on any number of cores. What was killed goes on where it was,
  with the same command.
  """

  data: tuple[Path, ...]
  """Files, and folders of files, to read in this order."""

  out_dir: Path
  """Folder of the results: a new or an empty one, or that of the same command,
  which was killed."""

  text_field: str = 'text'
  """Field that holds the text of a document in JSON, column in Parquet."""

  tokenizer: Path | None = None
  """Vocabulary to use: a tokenizer.json, or a folder with it or with GPT-2's
  vocab.json and merges.txt (or encoder.json and vocab.bpe). Without, a
  byte-level byte-pair vocabulary is trained on the text."""

  end_token: str | None = None
  """Token of --tokenizer that follows each document. Default: what the files
  beside it name (tokenizer_config.json, special_tokens_map.json,
  generation_config.json, config.json), or its only special token."""

  vocab_size: int | None = None
  """Size of the vocabulary to train, at the most. Default: 50257."""

  sample_bytes: int = 100_000_000
  """Text to train the vocabulary on, at the most: the training documents with
  the smallest hashes."""

  validation_share: float = 0.005
  """Share of the documents to hold out: those whose SHA-256 hash, as a fraction
  of the largest, is below it. Equal documents fall into the same part."""

  shard_tokens: int = 100_000_000
  """Tokens of a file, at the least; it ends with a document. A kill loses what
  was made since the last file."""

  skip_bad: bool = False
  """Leave out, and count, documents that are not UTF-8 or not JSON with the
  field, and files of other formats, instead of stopping at the first. A few
  bytes of a text that are no UTF-8 are replaced by U+FFFD."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  config = tyro.cli(
    PrepareConfig, args=args, prog='python -m examples.gpt2.prepare'
  )
  os.environ['TOKENIZERS_PARALLELISM'] = 'true'
  with exit_on_error():
    print(table(prepare(config)))


def prepare(config: PrepareConfig) -> dict[str, str]:
  """Makes the token files of a corpus, or goes on with them after a kill.

  Returns what was made, as names and values for people. Raises ``UsageError``
  if settings or text are wrong, or a part would be empty, and ``OSError`` if a
  file cannot be read or written, or ``--out-dir`` is not empty.
  """
  _check(config)
  reader = DocumentReader(config.data, config.text_field, config.skip_bad)
  folder = as_path(config.out_dir)
  folder = folder if is_remote(folder) else folder.resolve()
  settings = _settings(config, reader)
  _check_is_free(folder)  # Nothing is written to a folder of others.
  make_folder(folder)
  with contextlib.closing(claim(folder)) as owner:
    _check_is_free(folder)  # Whoever had it may have finished.
    with ShardWriter(
      folder, settings, config.shard_tokens, (_TOKENIZER, *COMPANIONS, LOCK)
    ) as writer:
      encode = _make_encoder(reader, config, folder)
      for parts, place in _tokenize(reader, encode, config, writer.place):
        writer.add(parts, place)
      counts = [writer.num_documents(part) for part in PARTS]
      if not all(counts):
        writer.discard()
        raise UsageError(
          'Of the {} documents to train on and {} to hold out one part is '
          'empty: give more text to --data, or another --validation-share than '
          '{}.{}'.format(
            *counts, config.validation_share, reader.describe_left_out()
          )
        )
    made = _describe(writer, reader, encode, config)
    # Whoever has lost the folder leaves what is there.
    owner.check()
    writer.finish(
      {
        'vocab_size': encode.num_tokens,
        'end_token': encode.end_token,
        'text_bytes': reader.num_bytes,
      }
    )
  return made


def _check(config: PrepareConfig) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  size, share = config.vocab_size, config.validation_share
  if size is not None and config.tokenizer:
    raise UsageError(
      f'--vocab-size {size} is for a vocabulary that is trained: leave it out '
      'where --tokenizer gives one.'
    )
  if config.end_token is not None and not config.tokenizer:
    raise UsageError(
      f'--end-token {config.end_token} is for a --tokenizer: one that is '
      f'trained has {END_OF_TEXT}.'
    )
  if not 0 < share < 1:
    raise UsageError(f'--validation-share must be in (0, 1), got {share}.')
  check_at_least(257, vocab_size=size)
  check_at_least(
    1, sample_bytes=config.sample_bytes, shard_tokens=config.shard_tokens
  )


def _check_is_free(folder: Path) -> None:
  """Raises ``OSError`` where a folder holds what no writer left unfinished."""
  if (folder / PROGRESS).is_file() or not folder.exists():
    return
  if not all(map(is_claim, folder.iterdir())):
    raise FileExistsError(
      f'{folder} is there and not empty: choose another folder, or delete it.'
    )


def _settings(config: PrepareConfig, reader: DocumentReader) -> dict[str, Any]:
  """Returns what must be the same where a run goes on."""
  chosen = {
    name: str(value) if isinstance(value, os.PathLike) else value
    for name, value in vars(config).items()
    if name not in ('data', 'out_dir', 'skip_bad')
  }
  found = [(str(x), files.file_size(x)) for x in reader.find_files()]
  return chosen | {
    'files': digest(found)[:16],
    'tokenizers': tokenizers.__version__,
  }


def _tokenize(
  reader: DocumentReader,
  encode: Encoder,
  config: PrepareConfig,
  place: dict[str, Any] | None,
) -> Iterator[tuple[dict[str, tuple[np.ndarray, np.ndarray]], Any]]:
  """Yields tokens by part with their lengths, and the place after them.

  Reading, tokenizing and writing go on at the same time; the tokenizer uses
  all cores by itself, and other threads while it does.
  """

  def work(texts: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for text in texts:
      is_held_out = _hash(text)[0] < config.validation_share
      parts['val' if is_held_out else 'train'].append(text)
    return {part: encode.documents(x) for part, x in parts.items() if x}

  waiting: collections.deque[Any] = collections.deque()
  with ThreadPoolExecutor(2) as pool:
    for texts in grouped(reader.read('tokenizing', place)):
      waiting.append((pool.submit(work, texts), reader.place()))
      if len(waiting) == _AHEAD:
        made, after = waiting.popleft()
        yield made.result(), after
    for made, after in waiting:
      yield made.result(), after


def _describe(
  writer: ShardWriter,
  reader: DocumentReader,
  encode: Encoder,
  config: PrepareConfig,
) -> dict[str, str]:
  documents, tokens = (
    [count(part) for part in PARTS]
    for count in (writer.num_documents, writer.num_tokens)
  )
  counts = '{:,} to train on, {:,} held out'
  return {
    'documents': counts.format(*documents)
    + f', {reader.num_skipped:,} left out as not readable'
    + reader.describe_left_out(),
    'tokens': counts.format(*tokens),
    'text': f'{reader.num_bytes:,} bytes, '
    f'{reader.num_bytes / sum(tokens):.2f} bytes per token',
    'vocabulary': f'{encode.num_tokens:,} tokens, {encode.end_token} after '
    'each document',
    'results': str(config.out_dir),
  }


def _make_encoder(
  reader: DocumentReader, config: PrepareConfig, folder: Path
) -> Encoder:
  """Reads the tokenizer that the settings name, or trains and writes one."""
  path = folder / _TOKENIZER
  if not path.exists():
    tokenizer, companions = _make_tokenizer(reader, config)
    for name, content in companions.items():
      write_whole(folder / name, content)
    write_whole(path, tokenizer.to_str(pretty=True).encode())
  tokenizer = read_tokenizer(path)
  # A document that spells the end-of-text token out does not end there.
  tokenizer.encode_special_tokens = True
  return Encoder(tokenizer, find_end_token(folder, tokenizer))


def _make_tokenizer(
  reader: DocumentReader, config: PrepareConfig
) -> tuple[tokenizers.Tokenizer, dict[str, bytes]]:
  """Returns a tokenizer, and the files beside it, which name its end token."""
  if config.tokenizer is None:
    vocab_size = config.vocab_size or _GPT2_VOCAB_SIZE
    sample = _sample(reader, config)
    return train_tokenizer(sample, vocab_size), with_end_token({}, END_OF_TEXT)
  path = as_path(config.tokenizer)
  tokenizer = read_tokenizer(path)
  end_token = find_end_token(path, tokenizer, config.end_token)
  tokenizer.add_special_tokens([end_token])
  tokenizer.encode_special_tokens = True
  _check_tokenizer(tokenizer, config.tokenizer)
  return tokenizer, with_end_token(read_companions(path), end_token)


def _check_tokenizer(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
  """Raises ``UsageError`` for a tokenizer that loses text."""
  ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
  if _canonical(tokenizer.decode(ids)) != _canonical(_PROBE):
    raise UsageError(
      f'--tokenizer {path} does not give back each text that it takes: '
      "expected a byte-level one, as GPT-2's, or one with bytes to fall back "
      "on, as Llama 2's."
    )


def _canonical(text: str) -> str:
  """Returns what tokenizers may make equal: composed characters, and spaces."""
  return unicodedata.normalize('NFC', text).replace(_BLOCK, ' ')


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
