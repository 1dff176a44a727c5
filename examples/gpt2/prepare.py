"""Makes token files from text: python -m examples.gpt2.prepare --help.

Hugging Face Datasets reads the documents and tokenizes them, in parts that
become a token file each.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path, PurePath
import sys
import tempfile
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import tqdm
import tyro

from examples.gpt2.command import (
  UsageError,
  about,
  check_at_least,
  describe_changes,
  exit_on_error,
  refuse_repeated,
  table,
)
from examples.gpt2.documents import (
  describe,
  find_files,
  load_documents,
  some_of,
)
from examples.gpt2.storage import (
  as_path,
  file_system,
  is_remote,
  make_folder,
  new_folder,
  read,
  resolved,
  size,
  whole_file,
  write_whole,
)
from examples.gpt2.token_files import (
  INDEX,
  PARTS,
  has_token_files,
  is_text,
  parse_sources,
  token_dtype,
)
from examples.gpt2.tokenizer import (
  END_OF_TEXT,
  TOKENIZER,
  find_begin,
  find_end_token,
  num_identifiers,
  read_companions,
  read_tokenizer,
  train_tokenizer,
  with_end_token,
)

_GPT2_VOCAB_SIZE = 50257
_SAMPLE_BYTES = 100_000_000  # Of text that a vocabulary is trained on.
_BYTES_IN_TOKEN = 4  # Of English text, about.
_DOCUMENTS_OF_A_PROCESS = 1000
# Held out by default: a share, but of a small text more, up to another share.
_SHARE, _LEAST_BYTES, _LARGEST_SHARE = 0.005, 1_000_000, 0.05


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
  """Makes token files and tokenizer.json, for the trainer's --data.

  Lines of .jsonl files (and .ndjson, .jsonlines, .json), or the items of one
  array, and rows of .parquet files are documents. Other files are a document
  each, or more with lines '<|endoftext|>' between them; long ones are cut.
  Files ending in .gz, .zst, .bz2 and .xz are unpacked. An end-of-text token
  follows each document, and one that the tokenizer begins a text with comes
  before it. What was killed goes on with the same command.
  """

  data: tuple[str, ...]
  """Files, and folders of files, to read in this order. 'stdlib' is the source
  of Python's standard library."""

  out_dir: Path
  """Folder of the results: a new or an empty one, or that of the same command,
  which was killed."""

  text_field: str = 'text'
  """Field that holds the text of a document in JSON, or a field of a field as
  in meta.text; column in Parquet."""

  skip_bad: bool = False
  """Leave out documents and files that cannot be read, and name them at the
  end."""

  tokenizer: Path | None = None
  """Vocabulary to use: a tokenizer.json, or a folder with it. Without, a
  byte-level byte-pair vocabulary is trained on up to 100 MB of the text."""

  end_token: str | None = None
  """Token of --tokenizer that follows each document. Default: the eos_token of
  the tokenizer_config.json beside it, else its only special token."""

  vocab_size: int | None = None
  """Size of the vocabulary to train, at the most. Default: 50257."""

  validation_share: float | None = None
  """Share of the text to hold out: whole documents, chosen by their SHA-256
  hash, so that equal ones fall into the same part, or the end of one. Default:
  0.005, or of a small text 1 MB, at most 0.05."""

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
  with exit_on_error():
    refuse_repeated(args, 'data')
    config = tyro.cli(
      PrepareConfig, args=args, prog='python -m examples.gpt2.prepare'
    )
    print(table(prepare(config)))


def prepare(
  config: PrepareConfig, leave_out: Sequence[Path] = ()
) -> dict[str, str]:
  """Makes the token files of a corpus, or goes on with them after a kill.

  Args:
    config: Settings.
    leave_out: Absolute paths of folders in the data that are not read.

  Returns:
    What was made, as names and values for people.

  Raises:
    UsageError: If settings or text are wrong, or a part would be empty.
    OSError: If a file cannot be read or written, or ``--out-dir`` holds
      something else.
  """
  _check(config)
  folder = resolved(config.out_dir)
  cache = as_path(config.cache_dir).absolute()
  settings = {
    field: str(value)
    for field, value in vars(config).items()
    if field not in ('out_dir', 'num_proc', 'cache_dir')
  }
  _check_folder(folder, settings)
  files = find_files(config.data, [folder, cache, *leave_out])
  documents, skipped = load_documents(
    files, config.text_field, cache / 'datasets', config.num_proc,
    config.skip_bad,
  )  # fmt: skip
  parts = _split(documents, config)
  tokenizer, end_token = _tokenizer(parts['train'], config, folder)
  make_folder(folder)
  write_whole(folder / INDEX, _json(settings=settings, shards={}))
  _write_tokenizer(folder, tokenizer, end_token, config)
  shards = {
    part: _write_part(part, parts[part], tokenizer, end_token, config, folder)
    for part in PARTS
  }
  vocab_size = num_identifiers(tokenizer)
  index = _json(
    settings=settings, vocab_size=vocab_size, end_token=end_token,
    dtype=token_dtype(vocab_size).name, skipped=skipped, shards=shards,
  )  # fmt: skip
  write_whole(folder / INDEX, index)
  tokens = [sum(shards[part].values()) for part in PARTS]
  begin = map(tokenizer.id_to_token, find_begin(tokenizer))
  around = ''.join(f'{token} before and ' for token in begin)
  found = {
    **describe(files),
    'skipped': f'{len(skipped):,} that cannot be read: {some_of(skipped)}',
    'tokens': '{:,} to train on, {:,} held out'.format(*tokens),
    'vocabulary': f'{vocab_size:,} tokens, {around}{end_token} after each '
    'document',
    'results': str(config.out_dir),
  }
  if not skipped:
    del found['skipped']
  return found


def _json(**content: Any) -> bytes:
  return json.dumps(content, indent=1).encode()


def _check(config: PrepareConfig) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  vocab_size, share = config.vocab_size, config.validation_share
  if vocab_size is not None and config.tokenizer:
    raise UsageError(
      f'--vocab-size {vocab_size} is for a vocabulary that is trained: leave '
      'it out where --tokenizer gives one.'
    )
  if config.end_token is not None and not config.tokenizer:
    raise UsageError(
      f'--end-token {config.end_token} is for a --tokenizer: one that is '
      f'trained has {END_OF_TEXT}.'
    )
  if share is not None and not 0 < share < 1:
    raise UsageError(f'--validation-share must be in (0, 1), got {share}.')
  check_at_least(257, vocab_size=vocab_size)
  check_at_least(1, shard_tokens=config.shard_tokens, num_proc=config.num_proc)


def _check_folder(folder: Path, settings: dict[str, Any]) -> None:
  """Raises an error unless a folder is empty, or the same command's."""
  if not folder.exists() or not any(folder.iterdir()):
    return
  index = {}
  with contextlib.suppress(FileNotFoundError, ValueError):
    index = json.loads(read(folder / INDEX))
  if index.get('shards') != {}:
    raise FileExistsError(
      f'{folder} is there and not empty: choose another folder, or delete it.'
    )
  changes = describe_changes(index['settings'], settings)
  if changes:
    raise UsageError(
      f'{folder} holds a part of tokens of other settings ({changes}): choose '
      'another folder, or delete it.'
    )


# Tokens.


def _split(
  documents: datasets.Dataset, config: PrepareConfig
) -> dict[str, datasets.Dataset]:
  """Holds documents out: those of the lowest hashes, for their share of bytes.

  Where these are too large for that, the end of the next one is held out.
  """
  columns = {'hash': datasets.Value('uint64'), 'size': datasets.Value('int64')}
  known = _map(documents, _measure, columns, config.num_proc)
  hashes, sizes = (np.array(known.data[x]) for x in ('hash', 'size'))
  total = int(sizes.sum())
  wanted = config.validation_share
  if wanted is None:
    wanted = np.clip(_LEAST_BYTES / max(total, 1), _SHARE, _LARGEST_SHARE)
  order = np.argsort(hashes, kind='stable')
  reached = np.cumsum(sizes[order]) > wanted * total
  if not reached.any():
    raise UsageError(f'{" ".join(config.data)} holds no text.')
  next_one = int(order[np.argmax(reached)])
  is_held_out = hashes < hashes[next_one]
  missing = wanted * total - sizes[is_held_out].sum()
  parts = {'train': ~is_held_out, 'val': is_held_out}
  ends = {'train': '', 'val': ''}
  if missing > wanted * total / 2:
    text = documents[next_one]['text']
    cut = _end(text, missing / sizes[next_one])
    ends = {'train': text[:cut], 'val': text[cut:]}
    parts['train'][next_one] = False
  split = {
    part: datasets.concatenate_datasets(
      [
        documents.select(np.flatnonzero(chosen)),
        datasets.Dataset.from_dict({'text': [ends[part]]}, documents.features),
      ]
    )
    for part, chosen in parts.items()
  }
  if not all((sizes[parts[x]] > 0).any() or ends[x] for x in PARTS):
    raise UsageError(
      f'{" ".join(config.data)} is too short to hold a part out: give more '
      'text.'
    )
  return split


def _measure(batch: pa.Table) -> pa.Table:
  """Returns a hash and the bytes of each text."""
  texts = [(text or '').encode() for text in batch['text'].to_pylist()]
  digests = b''.join(hashlib.sha256(text).digest()[:8] for text in texts)
  hashes = np.frombuffer(digests, '<u8')
  sizes = np.array([len(text) for text in texts], np.int64)
  return pa.table({'hash': hashes, 'size': sizes})


def _end(text: str, share: float) -> int:
  """Returns where the last share of a text begins, with a line if one is near.

  It is at least a character.
  """
  place = min(round(len(text) * (1 - share)), len(text) - 1)
  line = text.find('\n', place, place + (len(text) - place) // 2) + 1
  return line or place


def _map(
  documents: datasets.Dataset,
  function: Callable[..., pa.Table],
  columns: dict[str, Any],
  num_proc: int,
  **arguments: Any,
) -> datasets.Dataset:
  """Returns other columns than ``text``, made in several processes.

  Few documents are not worth the start of one: threads tokenize them.
  """
  processes = min(num_proc, len(documents) // _DOCUMENTS_OF_A_PROCESS)
  # Threads do not survive in a process that was forked.
  parallel = 'false' if processes > 1 else 'true'
  os.environ['TOKENIZERS_PARALLELISM'] = parallel
  return documents.with_format('arrow').map(
    function, batched=True, batch_size=100, remove_columns=['text'],
    num_proc=processes if processes > 1 else None,
    features=datasets.Features(columns), fn_kwargs=arguments,
  )  # fmt: skip


def _tokenizer(
  documents: datasets.Dataset, config: PrepareConfig, folder: Path
) -> tuple[tokenizers.Tokenizer, str]:
  """Reads the tokenizer of a killed command or the settings, or trains it."""
  if (folder / TOKENIZER).exists():
    tokenizer = read_tokenizer(folder / TOKENIZER)
    return tokenizer, find_end_token(folder, tokenizer)
  if config.tokenizer is None:
    vocab_size = config.vocab_size or _GPT2_VOCAB_SIZE
    return train_tokenizer(_sample(documents), vocab_size), END_OF_TEXT
  source = as_path(config.tokenizer)
  tokenizer = read_tokenizer(source)
  end_token = find_end_token(source, tokenizer, config.end_token)
  tokenizer.add_special_tokens([end_token])
  return tokenizer, end_token


def _sample(documents: datasets.Dataset) -> Iterator[str]:
  """Yields documents that are spread evenly, 100 MB at the most."""
  step = math.ceil(documents.data.nbytes / _SAMPLE_BYTES)
  chosen = documents.select(range(0, len(documents), max(step, 1)))
  left = _SAMPLE_BYTES
  for row in tqdm.tqdm(chosen, 'reading text for the vocabulary'):
    text = row['text'] or ''
    left -= len(text.encode())
    if left < 0:
      return
    yield text


def _write_tokenizer(
  folder: Path,
  tokenizer: tokenizers.Tokenizer,
  end_token: str,
  config: PrepareConfig,
) -> None:
  beside = (
    read_companions(as_path(config.tokenizer)) if config.tokenizer else {}
  )
  for name, content in with_end_token(beside, end_token).items():
    write_whole(folder / name, content)
  write_whole(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())


def _write_part(
  part: str,
  documents: datasets.Dataset,
  tokenizer: tokenizers.Tokenizer,
  end_token: str,
  config: PrepareConfig,
  folder: Path,
) -> dict[str, int]:
  """Writes the token files of a part, but for those that are there.

  Returns the number of tokens of each by its name.
  """
  dtype = token_dtype(num_identifiers(tokenizer))
  columns = {'tokens': datasets.List(datasets.Value(dtype.name))}
  # Of what was selected, ``data`` is the whole table.
  share = len(documents) / len(documents.data)
  num_tokens = documents.data.nbytes * share / _BYTES_IN_TOKEN
  count = min(math.ceil(num_tokens / config.shard_tokens), len(documents))
  shards = {}
  for i in tqdm.trange(count, desc=f'tokenizing for {part}', unit=' files'):
    path = folder / (f'{part}-{i:05}.bin' if count > 1 else f'{part}.bin')
    if not path.exists():
      made = _map(
        documents.shard(count, i, contiguous=True),
        _tokenize,
        columns,
        config.num_proc,
        tokenizer=tokenizer,
        end_token=end_token,
        dtype=dtype.name,
      )
      with whole_file(path) as scratch, scratch.open('wb') as file:
        for some in made.iter(1000):
          file.write(some['tokens'].combine_chunks().flatten().to_numpy())
      made_files = [x['filename'] for x in made.cache_files]
      del made
      for name in made_files:
        Path(name).unlink(missing_ok=True)
    shards[path.name] = size(path) // dtype.itemsize
  return shards


def _tokenize(
  batch: pa.Table, tokenizer: tokenizers.Tokenizer, end_token: str, dtype: str
) -> pa.Table:
  tokens = tokenize(batch['text'].to_pylist(), tokenizer, end_token, dtype)
  kind = pa.list_(pa.from_numpy_dtype(dtype))
  return pa.table({'tokens': pa.array(tokens, kind)})


def tokenize(
  texts: Sequence[str | None],
  tokenizer: tokenizers.Tokenizer,
  end_token: str,
  dtype: str = 'uint32',
) -> list[np.ndarray]:
  """Returns the tokens of texts, each with the end token; nothing of none.

  Each begins with what the tokenizer begins a text with. Text that spells a
  special token out does not become that token.
  """
  tokenizer.encode_special_tokens = True
  begin = find_begin(tokenizer)
  end = tokenizer.token_to_id(end_token)
  found = tokenizer.encode_batch_fast(
    [text or '' for text in texts], add_special_tokens=False
  )
  return [
    np.array([*begin, *x.ids, end] if text else [], dtype)
    for text, x in zip(texts, found, strict=True)
  ]


def read_text(
  data: str, text_field: str, tokenizer: tokenizers.Tokenizer, end_token: str
) -> tuple[np.ndarray, int]:
  """Returns the tokens of all documents of a text, and their bytes."""
  found, num_bytes = [], 0
  with tempfile.TemporaryDirectory() as folder:
    documents, _ = load_documents(find_files([data]), text_field, Path(folder))
    for rows in documents.iter(100):
      found += tokenize(rows['text'], tokenizer, end_token)
      num_bytes += sum(len((text or '').encode()) for text in rows['text'])
  return np.concatenate([np.zeros(0, np.uint32), *found]), num_bytes


# Text that the trainer is given.


def text_to_tokens(
  data: Sequence[str],
  eval_data: Sequence[str],
  vocab_size: int,
  cache_dir: Path,
) -> dict[str, list[str]]:
  """Makes tokens of text, once: they stay in the cache, by its content.

  Args:
    data: Sources to train on: text alone, of which the token files are one
      source, or folders of token files.
    eval_data: Text or token files to evaluate on, each as ``name=path``.
    vocab_size: Size of the vocabulary to train on text.
    cache_dir: Folder of the cache.

  Returns:
    Both, with token files instead of text.

  Raises:
    UsageError: If there is no text, or the cache cannot be written.
  """
  cache = resolved(cache_dir)
  if data and all(map(is_text, data)):
    data = [_prepared(data, vocab_size, cache)]
  folders = [as_path(name) for name, _ in parse_sources(data)]
  source = next((x for x in folders if (x / TOKENIZER).is_file()), None)
  sets = [_evaluated(text, source, cache) for text in eval_data]
  return {'data': [*data], 'eval_data': sets}


def _prepared(data: Sequence[str], vocab_size: int, cache: Path) -> str:
  """Returns the folder in the cache with the tokens of text to train on."""
  name = PurePath(data[0]).name if len(data) == 1 else 'text'
  folder = cache / _key(data, cache, vocab_size) / name
  if has_token_files(folder):
    return os.fspath(folder)
  with (
    _named_cache(folder),
    # In a store, another run may be writing the same files.
    new_folder(folder, replace=is_remote(folder)) as scratch,
    tempfile.TemporaryDirectory() as documents,
  ):
    settings = PrepareConfig(
      data=tuple(data), out_dir=scratch, num_proc=1, vocab_size=vocab_size,
      cache_dir=Path(documents),
    )  # fmt: skip
    made = prepare(settings, [cache])
    # Its folder is a scratch one.
    print(table({**made, 'results': str(folder)}), file=sys.stderr)
  return os.fspath(folder)


def _evaluated(text: str, source: Path | None, cache: Path) -> str:
  """Returns a set to evaluate on, with a token file in the cache for text."""
  name, separator, path = text.partition('=')
  if not separator:
    name, path = PurePath(text).name, text
  if not (name and path) or not is_text(path):
    return text
  with about(f'--eval-data {text}'):
    if source is None:
      raise UsageError(
        'it is text, and --data has no tokenizer: expected token files.'
      )
    tokenizer = read_tokenizer(source)
    end_token = find_end_token(source, tokenizer)
    key = _key([path], cache, tokenizer.to_str(), end_token)
    file = cache / key / f'{PurePath(path).name}.bin'
    if not file.is_file():
      tokens, _ = read_text(path, 'text', tokenizer, end_token)
      with _named_cache(file):
        make_folder(file.parent)
        dtype = token_dtype(num_identifiers(tokenizer))
        write_whole(file, tokens.astype(dtype).tobytes())
  return f'{name}={file}'


def _key(data: Sequence[str], cache: Path, *others: Any) -> str:
  """Returns what tells text apart, and what else decides its tokens."""
  known = [
    [str(x), size(x), str(file_system(x).modified(os.fspath(x)))]
    for x in find_files(data, [cache]).kinds
  ]
  parts = json.dumps([known, *others, tokenizers.__version__])
  return hashlib.sha256(parts.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _named_cache(path: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    # On a disk, another run may have been quicker.
    if is_remote(path) or not path.exists():
      raise UsageError(
        f'--cache-dir cannot be used for {path}: {error}. Name another folder.'
      ) from error


if __name__ == '__main__':
  main()
