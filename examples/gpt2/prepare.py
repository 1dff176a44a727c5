"""Makes token files from text: python -m examples.gpt2.prepare --help.

Documents are read and tokenized by Hugging Face Datasets, in parts that become
a token file each.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import tqdm
import tyro

from examples.gpt2.command import exit_on_error, table
from examples.gpt2.config import (
  UsageError,
  check_at_least,
  describe_changes,
  digest,
)
from examples.gpt2.data.corpus import cache_folder
from examples.gpt2.data.documents import load_documents
from examples.gpt2.data.files import find_files
from examples.gpt2.data.token_files import (
  PARTS,
  PROGRESS,
  token_dtype,
  token_writer,
  write_index,
)
from examples.gpt2.data.tokenizer import (
  END_OF_TEXT,
  find_end_token,
  num_identifiers,
  read_companions,
  read_tokenizer,
  train_tokenizer,
  with_end_token,
)
from examples.gpt2.storage import (
  as_path,
  file_system,
  is_remote,
  make_folder,
  write_whole,
)

_GPT2_VOCAB_SIZE = 50257
_SAMPLE_BYTES = 100_000_000
_BYTES_IN_TOKEN = 4  # Of English text, about.
_BATCH_BYTES = 1 << 20
_TOKENIZER = 'tokenizer.json'


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
  """Makes token files and tokenizer.json, for the trainer's --data.

  Lines of .jsonl files (and .ndjson, .jsonlines, .json), or the items of one
  array, and rows of .parquet files are documents. Other files are a document
  each, or more with lines '<|endoftext|>' between them; long ones are cut.
  Files ending in .gz, .zst, .bz2 and .xz are unpacked. An end-of-text token
  follows each document. What was killed goes on with the same command.
  """

  data: tuple[str, ...]
  """Files, and folders of files, to read in this order, text last."""

  out_dir: Path
  """Folder of the results: a new or an empty one, or that of the same command,
  which was killed."""

  text_field: str = 'text'
  """Field that holds the text of a document in JSON, column in Parquet."""

  tokenizer: Path | None = None
  """Vocabulary to use: a tokenizer.json, or a folder with it or with GPT-2's
  vocab.json and merges.txt (or encoder.json and vocab.bpe). Without, a
  byte-level byte-pair vocabulary is trained on up to 100 MB of the text."""

  end_token: str | None = None
  """Token of --tokenizer that follows each document. Default: what the files
  beside it name (tokenizer_config.json, special_tokens_map.json,
  generation_config.json, config.json), or its only special token."""

  vocab_size: int | None = None
  """Size of the vocabulary to train, at the most. Default: 50257."""

  validation_share: float = 0.005
  """Share of the documents to hold out: those whose SHA-256 hash, as a fraction
  of the largest, is below it. Equal documents fall into the same part."""

  shard_tokens: int = 100_000_000
  """Tokens of a file, about: of four bytes each. A kill loses what was made
  since the last file."""

  num_proc: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
  """Processes that tokenize. Default: one for each core."""

  cache_dir: Path = Path('~/.cache/merit_optax')
  """Folder on a disk that keeps the documents as Arrow files, in 'datasets'. It
  can be deleted afterwards."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  config = tyro.cli(
    PrepareConfig, args=args, prog='python -m examples.gpt2.prepare'
  )
  with exit_on_error():
    print(table(prepare(config)))


def prepare(config: PrepareConfig) -> dict[str, str]:
  """Makes the token files of a corpus, or goes on with them after a kill.

  Returns what was made, as names and values for people.

  Raises:
    UsageError: If settings or text are wrong, or a part would be empty.
    OSError: If a file cannot be read or written, or ``--out-dir`` holds
      something else.
  """
  _check(config)
  folder = as_path(config.out_dir)
  folder = folder if is_remote(folder) else folder.resolve()
  cache = cache_folder(config.cache_dir).absolute()
  paths = find_files(config.data, [folder, cache])
  _start(folder, _settings(config, paths))
  try:
    documents = load_documents(paths, config.text_field, cache / 'datasets')
    tokenizer, end_token = _tokenizer(documents, config, folder)
  except UsageError:
    if not any(folder.glob('progress-*.json')):
      _discard(folder)  # No token file is lost.
    raise
  count = math.ceil(
    documents.data.nbytes / _BYTES_IN_TOKEN / config.shard_tokens
  )
  count = max(min(count, len(documents)), 1)
  rows = [
    _make_shard(documents, i, count, tokenizer, end_token, config, folder)
    for i in tqdm.trange(count, desc='tokenizing', unit=' files')
  ]
  try:
    _check_parts(rows, config)
  except UsageError:
    _discard(folder)  # Of no use with another share.
    raise
  shards = {x: [row[x] for row in rows if x in row] for x in PARTS}
  sizes = {
    'documents': sum(row['documents'] for row in rows),
    'text_bytes': sum(row['bytes'] for row in rows),
  }
  vocab_size = num_identifiers(tokenizer)
  described = {'vocab_size': vocab_size, 'end_token': end_token, **sizes}
  write_index(folder, shards, described)
  for path in [folder / PROGRESS, *_progress(folder, count)]:
    path.unlink(missing_ok=True)
  tokens = [sum(x['tokens'] for x in shards[part]) for part in PARTS]
  return {
    'documents': f'{sizes["documents"]:,}',
    'tokens': '{:,} to train on, {:,} held out'.format(*tokens),
    'text': f'{sizes["text_bytes"]:,} bytes, '
    f'{sizes["text_bytes"] / sum(tokens):.2f} bytes per token',
    'vocabulary': f'{vocab_size:,} tokens, {end_token} after each document',
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
  if config.end_token is not None and not config.tokenizer:
    raise UsageError(
      f'--end-token {config.end_token} is for a --tokenizer: one that is '
      f'trained has {END_OF_TEXT}.'
    )
  if not 0 < share < 1:
    raise UsageError(f'--validation-share must be in (0, 1), got {share}.')
  check_at_least(257, vocab_size=size)
  check_at_least(1, shard_tokens=config.shard_tokens, num_proc=config.num_proc)


def _settings(config: PrepareConfig, paths: list[Path]) -> dict[str, Any]:
  """Returns what must be the same where a run goes on."""
  names = ('tokenizer', 'end_token', 'text_field', 'vocab_size')
  shares = config.validation_share, config.shard_tokens
  versions = [file_system(x).ukey(os.fspath(x)) for x in paths]
  return {
    **{x: str(getattr(config, x)) for x in names},
    **dict(zip(('validation_share', 'shard_tokens'), shares, strict=True)),
    'files': digest(list(map(str, paths)), versions),
  }


def _start(folder: Path, settings: dict[str, Any]) -> None:
  """Begins in a folder, or goes on with what the same settings left there."""
  progress = folder / PROGRESS
  if progress.is_file():
    changes = describe_changes(json.loads(progress.read_text()), settings)
    if changes:
      raise UsageError(
        f'{folder} holds a part of tokens of other settings or files '
        f'({changes}): choose another folder, or delete it.'
      )
    return
  if folder.exists() and any(folder.iterdir()):
    raise FileExistsError(
      f'{folder} is there and not empty: choose another folder, or delete it.'
    )
  make_folder(folder)
  write_whole(progress, json.dumps(settings).encode())


def _discard(folder: Path) -> None:
  """Deletes a folder, in which all is of this command."""
  file_system(folder).rm(os.fspath(folder), recursive=True)


def _tokenizer(
  documents: datasets.Dataset, config: PrepareConfig, folder: Path
) -> tuple[tokenizers.Tokenizer, str]:
  """Reads the tokenizer that the settings name, or trains and writes one."""
  path = folder / _TOKENIZER
  if not path.exists():
    if config.tokenizer is None:
      size = config.vocab_size or _GPT2_VOCAB_SIZE
      tokenizer = train_tokenizer(_sample(documents, config), size)
      companions = with_end_token({}, END_OF_TEXT)
    else:
      source = as_path(config.tokenizer)
      tokenizer = read_tokenizer(source)
      end_token = find_end_token(source, tokenizer, config.end_token)
      tokenizer.add_special_tokens([end_token])
      companions = with_end_token(read_companions(source), end_token)
    for name, content in companions.items():
      write_whole(folder / name, content)
    write_whole(path, tokenizer.to_str(pretty=True).encode())
  tokenizer = read_tokenizer(path)
  return tokenizer, find_end_token(folder, tokenizer)


def _sample(
  documents: datasets.Dataset, config: PrepareConfig
) -> Iterator[str]:
  """Yields training documents that are spread evenly, 100 MB at the most."""
  share = _SAMPLE_BYTES / max(1, documents.data.nbytes)
  chosen = documents.select(range(0, len(documents), math.ceil(1 / share)))
  left = _SAMPLE_BYTES
  for row in tqdm.tqdm(chosen, 'reading text for the vocabulary'):
    text = row['text'] or ''
    left -= len(text.encode())
    if left < 0:
      return
    if _fraction(text) >= config.validation_share:
      yield text


def _progress(folder: Path, count: int) -> list[Path]:
  """Returns the files that say that a part is done, and what it holds."""
  return [folder / f'progress-{i:05}.json' for i in range(count)]


def _make_shard(
  documents: datasets.Dataset,
  number: int,
  count: int,
  tokenizer: tokenizers.Tokenizer,
  end_token: str,
  config: PrepareConfig,
  folder: Path,
) -> dict[str, Any]:
  """Tokenizes a part of the documents, unless that is done."""
  done = _progress(folder, count)[number]
  if done.is_file():
    return json.loads(done.read_text())
  part = documents.shard(count, number, contiguous=True)
  size = math.ceil(part.data.nbytes / max(1, len(part)))
  dtype = token_dtype(num_identifiers(tokenizer)).name
  features = {
    'tokens': datasets.List(datasets.Value(dtype)),
    'bytes': datasets.Value('int64'),
    'fraction': datasets.Value('float64'),
  }
  key = digest(part._fingerprint, tokenizer.to_str(), end_token)
  made = part.with_format('arrow').map(
    _tokenize,
    batched=True,
    batch_size=min(max(_BATCH_BYTES // max(size, 1), 1), 1000),
    num_proc=config.num_proc if config.num_proc > 1 else None,
    remove_columns=['text'],
    features=datasets.Features(features),
    fn_kwargs={'tokenizer': tokenizer, 'end_token': end_token},
    # What was tokenized before a kill is found by this.
    new_fingerprint=key[:32],
    desc=f'file {number + 1} of {count}',
  )
  row = _write(made, number, count, config, folder)
  write_whole(done, json.dumps(row).encode())
  files = [x['filename'] for x in made.cache_files]
  del made
  for file in files:
    Path(file).unlink(missing_ok=True)
  return row


def _tokenize(
  batch: pa.Table, tokenizer: tokenizers.Tokenizer, end_token: str
) -> pa.Table:
  """Tokenizes documents; of an empty one, there is nothing."""
  # Threads do not survive in a process that was forked.
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  texts = [x for x in batch['text'].to_pylist() if x]
  tokenizer.encode_special_tokens = True
  end = tokenizer.token_to_id(end_token)
  dtype = token_dtype(num_identifiers(tokenizer))
  found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
  ids = [encoding.ids for encoding in found]
  offsets = np.cumsum([0, *(len(x) + 1 for x in ids)], dtype=np.int32)
  values = np.fromiter(
    itertools.chain.from_iterable((*x, end) for x in ids), dtype
  )
  return pa.table(
    {
      'tokens': pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
      'bytes': pa.array([len(x.encode()) for x in texts], pa.int64()),
      'fraction': pa.array([_fraction(x) for x in texts], pa.float64()),
    }
  )


def _fraction(text: str) -> float:
  """Returns the hash of a text, as a fraction of the largest."""
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8]) / 2**64


def _write(
  made: datasets.Dataset,
  number: int,
  count: int,
  config: PrepareConfig,
  folder: Path,
) -> dict[str, Any]:
  """Writes the token files of a part; returns what is known of them."""
  fractions = np.array(made.data['fraction'])
  row: dict[str, Any] = {
    'documents': len(fractions),
    'bytes': int(np.sum(np.array(made.data['bytes']))),
    'fractions': [fractions.min(initial=1), fractions.max(initial=0)],
  }
  for part in PARTS:
    held_out = fractions < config.validation_share
    chosen = np.flatnonzero(held_out if part == 'val' else ~held_out)
    if not len(chosen):
      continue
    name = f'{part}-{number:05}.bin' if count > 1 else f'{part}.bin'
    row[part] = {'documents': len(chosen)}
    with token_writer(folder / name, row[part]) as write:
      for some in made.select(chosen).with_format('arrow').iter(1000):
        write(some['tokens'].combine_chunks().flatten().to_numpy())
  return row


def _check_parts(rows: list[dict[str, Any]], config: PrepareConfig) -> None:
  """Raises ``UsageError`` if there is no document in one of the parts."""
  if all(any(part in row for row in rows) for part in PARTS):
    return
  count = sum(row['documents'] for row in rows)
  least = min((row['fractions'][0] for row in rows), default=1)
  most = max((row['fractions'][1] for row in rows), default=0)
  share = f'{least + (most - least) / max(count, 2):.2g}'
  hint = (
    f'--validation-share {share} would hold some out and leave some'
    if count > 1 and least < float(share) < most
    else 'give more documents to --data'
  )
  raise UsageError(
    f'--validation-share {config.validation_share} of {count} documents leaves '
    f'one part empty: {hint}.'
  )


if __name__ == '__main__':
  main()
