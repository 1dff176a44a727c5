"""Token files, and the tokens of a run: text is tokenized once and cached."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import operator
from pathlib import Path, PurePath
import shutil
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import RunConfig, UsageError, digest
from examples.gpt2.data.corpus import Corpus, load_corpus
from examples.gpt2.data.counts import (
  cached_statistics,
  check_largest,
  check_length,
  count_tokens,
)
from examples.gpt2.data.evaluation import load_evaluation
from examples.gpt2.data.mixture import Mixture, parse_sources
from examples.gpt2.data.shards import (
  PARTS,
  TokenFiles,
  open_files,
  open_parts,
  read_index,
)
from examples.gpt2.data.tokenizer import (
  END_OF_LINE,
  END_OF_TEXT,
  Encoder,
  end_token_of_folder,
  grouped,
  num_identifiers,
  read_companions,
  read_tokenizer,
  train_tokenizer,
)
from examples.gpt2.devices.processes import check_same, on_process_0
from examples.gpt2.storage import as_path, is_remote, new_folder

_TOKENIZER = 'tokenizer.json'
_STATISTICS = 'statistics.json'


class EvaluationSet(NamedTuple):
  """Tokens to evaluate on."""

  name: str
  tokens: TokenFiles | np.ndarray
  weight: float  # Of its loss in the validation loss; may be 0.
  sha256: str  # Hash of what was given by itself, or ''.


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokens of a run."""

  source: str  # Where they came from, for people.
  num_bytes: int  # Size of the text, or of the token files.
  sha256: str  # Hash of the text, or of the token files.
  train: TokenFiles
  validation: TokenFiles  # Of the first source.
  tokenizer: tokenizers.Tokenizer | None  # Of the text, where there is one.
  vocab_size: int  # Number that all token identifiers are below.
  # Of the frequencies of all tokens, nats a token: the loss of the best model
  # that ignores the context. Of several sources, the mean.
  unigram_entropy: float
  end_token: str | None = None  # Follows each document, where that is known.
  # Files beside the tokenizer that say how it is used.
  companions: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  has_index: bool = False  # Whether they were counted when they were written.
  # What decides, beside the seed, which sequences a step takes, as JSON values;
  # empty where that is as in former releases.
  order: dict[str, Any] = dataclasses.field(default_factory=dict)
  evaluations: Sequence[EvaluationSet] = ()


def load_tokens(config: RunConfig) -> Tokens:
  """Reads the tokens that the settings name, tokenizing text the first time.

  Token files are read in whole, to count and hash the tokens, only the first
  time too: ``--cache-dir`` keeps what was found until the files change. Of
  several processes, the first does this work for all that see its cache.

  Raises ``UsageError`` if the data is missing, empty, not text, too short for a
  sequence in one of its parts, or not the same in all processes.
  """
  if jax.process_count() > 1:
    on_process_0(lambda: _load(config).sha256)
  tokens = _load(config)
  hashes = {
    f'--eval-data {x.name}': x.sha256 for x in tokens.evaluations if x.sha256
  }
  check_same(
    {
      'the hash of --data': tokens.sha256,
      'the order of --data': json.dumps(tokens.order, sort_keys=True),
      'the size of the vocabulary': str(tokens.vocab_size),
      **hashes,
    }
  )
  return tokens


def _load(config: RunConfig) -> Tokens:
  sources = parse_sources(config.data)
  loaded = []
  for source in sources:
    with _named('--data', source.path):
      loaded.append(_load_source(source.path, config))
  tokens = _mix(loaded, [source.weight for source in sources], config)
  names = [PurePath(source.path).name for source in sources]
  if len(set(names)) < len(names):
    names = [source.path for source in sources]
  weights = tokens.order.get('weights', [1.0])
  evaluations = [
    EvaluationSet(name, part.validation, weight, '')
    for name, part, weight in zip(names, loaded, weights, strict=True)
  ]
  for text in config.eval_data:
    name, separator, path = text.partition('=')
    if not separator:
      name, path = PurePath(text).name or text, text
    if not name or not path:
      raise UsageError(
        f'--eval-data must be a path or name=path, got {text!r}.'
      )
    if name in [evaluation.name for evaluation in evaluations]:
      raise UsageError(
        f'--eval-data {text} has the name of another set, {name}: give each a '
        'name of its own, as in name=path.'
      )
    with _named('--eval-data', text):
      found = load_evaluation(
        path, tokens.vocab_size, tokens.tokenizer, tokens.end_token, config
      )
      check_length('validation', found.tokens, config.context_length)
    evaluations.append(EvaluationSet(name, found.tokens, 0.0, found.sha256))
  return dataclasses.replace(tokens, evaluations=evaluations)


@contextlib.contextmanager
def _named(flag: str, value: str) -> Iterator[None]:
  """Has a ``UsageError`` name the flag and the value that it is about."""
  try:
    yield
  except UsageError as error:
    raise UsageError(f'{flag} {value}: {error}') from error


def _mix(
  parts: list[Tokens], weights: list[float | None], config: RunConfig
) -> Tokens:
  """Returns the tokens of all sources, and the order of their sequences."""
  first, is_single = parts[0], len(parts) == 1
  is_former = is_single and not first.has_index
  default = 'with-replacement' if is_former else 'without-replacement'
  sampling = config.sampling or default
  if is_single and sampling == 'with-replacement':
    return first
  made_by = {x.tokenizer.to_str() for x in parts if x.tokenizer}
  if len(made_by) > 1 or len({x.vocab_size for x in parts}) > 1:
    raise UsageError(
      'Several sources of --data must have the same tokenizer: make token '
      'files of the others by python -m examples.gpt2.prepare --tokenizer '
      f'{first.source}.'
    )
  found = [x for x in weights if x] or [float(len(x.train)) for x in parts]
  shares = [weight / math.fsum(found) for weight in found]
  order: dict[str, Any] = {'sampling': sampling}
  if not is_single:
    order |= {'weights': shares}
  entropies = [x.unigram_entropy for x in parts]
  return dataclasses.replace(
    first,
    source=', '.join(x.source for x in parts),
    num_bytes=sum(x.num_bytes for x in parts),
    sha256=first.sha256 if is_single else digest([x.sha256 for x in parts]),
    train=Mixture(
      [x.train for x in parts], shares, sampling == 'with-replacement'
    ),
    unigram_entropy=math.fsum(map(operator.mul, shares, entropies)),
    order=order,
  )


def _load_source(data: str, config: RunConfig) -> Tokens:
  tokens = _open_folder(as_path(data), config)
  if tokens is not None:
    return tokens
  corpus = load_corpus(data, config.text_field)
  key = digest(corpus.sha256, config.vocab_size, tokenizers.__version__)
  folder = as_path(config.cache_dir) / key[:16]
  _fill_cache(folder, corpus, config)
  made = _open_folder(folder, config)
  assert made is not None
  return dataclasses.replace(
    made,
    source=corpus.source,
    num_bytes=corpus.num_bytes,
    sha256=corpus.sha256,
  )


def _open_folder(folder: Path, config: RunConfig) -> Tokens | None:
  """Opens a folder with token files, if it has some, perhaps a tokenizer."""
  vocab_size, tokenizer, companions = config.vocab_size, None, {}
  if (folder / _TOKENIZER).is_file():
    tokenizer = read_tokenizer(folder / _TOKENIZER)
    companions = read_companions(folder)
    vocab_size = num_identifiers(tokenizer)
  index = read_index(folder)
  has_index = index is not None
  parts = open_parts(folder, vocab_size, index)
  missing = [part for part in PARTS if part not in parts]
  if len(missing) == len(PARTS):
    return None
  if missing:
    raise UsageError(f'{folder} holds token files, but no {missing[0]}.bin.')
  train, validation = (parts[part] for part in PARTS)
  check_length('training', train, config.context_length)
  check_length('validation', validation, config.context_length)
  if index is None:
    index = cached_statistics([train, validation], vocab_size, config)
    sha256 = index['sha256']
  else:
    sha256 = digest(index['shards'])
  check_largest(index['largest_token'], vocab_size, folder)
  return Tokens(
    source=str(folder),
    num_bytes=train.num_bytes + validation.num_bytes,
    sha256=sha256,
    train=train,
    validation=validation,
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    unigram_entropy=index['unigram_entropy'],
    end_token=tokenizer and end_token_of_folder(folder / _TOKENIZER, tokenizer),
    companions=companions,
    has_index=has_index,
  )


def _fill_cache(folder: Path, corpus: Corpus, config: RunConfig) -> None:
  """Tokenizes a corpus, all or nothing, unless the folder has its tokens."""
  if _is_whole(folder, config):
    return
  # Releases before 0.2.0 wrote no such file.
  if (folder / _STATISTICS).exists():
    warnings.warn(f'{folder} is damaged, and is made again.', stacklevel=2)
  is_in_store = is_remote(folder)
  if folder.exists() and not is_in_store:
    shutil.rmtree(folder)
  try:
    # In a store, another run may be writing its files, which are the same ones.
    with new_folder(folder, replace=is_in_store) as scratch:
      tokenizer = train_tokenizer(corpus.train, config.vocab_size)
      tokenizer.save(str(scratch / _TOKENIZER))
      encode = Encoder(tokenizer, END_OF_TEXT, END_OF_LINE)
      for part, texts in (('train', corpus.train), ('val', corpus.validation)):
        with (scratch / f'{part}.bin').open('wb') as file:
          for group in grouped(tqdm.tqdm(texts, f'tokenizing for {part}')):
            encode(group).tofile(file)
      written = json.dumps(count_tokens(*_open_cached(scratch)))
      (scratch / _STATISTICS).write_text(written)
  except OSError:
    # On a disk, another run may have been quicker.
    if is_in_store or not folder.is_dir():
      raise


def _open_cached(folder: Path) -> tuple[list[TokenFiles], int]:
  """Opens both parts of a folder of the cache, and counts its vocabulary."""
  size = num_identifiers(read_tokenizer(folder / _TOKENIZER))
  return [open_files([folder / f'{x}.bin'], size) for x in PARTS], size


def _is_whole(folder: Path, config: RunConfig) -> bool:
  """Returns whether a cached folder holds what was written to it.

  An error of the disk is raised: it is no damage, and the cache is shared.
  """
  try:
    written = json.loads((folder / _STATISTICS).read_text())
    return written == cached_statistics(*_open_cached(folder), config)
  except (FileNotFoundError, ValueError):
    return False
