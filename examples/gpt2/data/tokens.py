"""The tokens of a run: what --data and --eval-data name."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import json
import math
from pathlib import Path, PurePath
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers

from examples.gpt2.config import Config, UsageError, check_at_least, digest
from examples.gpt2.data.batches import Mixture
from examples.gpt2.data.corpus import cache_folder, fill_cache, load_corpus
from examples.gpt2.data.files import find_files
from examples.gpt2.data.token_files import (
  PARTS,
  TOKEN_SUFFIXES,
  TokenFiles,
  check_token,
  entropy,
  has_token_files,
  open_files,
  open_parts,
  read_index,
)
from examples.gpt2.data.tokenizer import (
  encode,
  end_token_of_folder,
  num_identifiers,
  read_companions,
  read_tokenizer,
)
from examples.gpt2.processes import check_same, on_process_0
from examples.gpt2.storage import as_path

_TOKENIZER = 'tokenizer.json'


class EvaluationSet(NamedTuple):
  """Tokens to evaluate on."""

  name: str
  tokens: TokenFiles | np.ndarray
  weight: float  # Of its loss in the validation loss; may be 0.
  sha256: str  # Hash of what was given by itself, or ''.
  num_bytes: int = 0  # Of the text, 0 where that is not known.


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
  # Of the frequencies of training tokens, nats a token: the loss of the best
  # model that ignores the context. Of several sources, the mean; of more than
  # 2**30 tokens without an index, by so many.
  unigram_entropy: float
  end_token: str | None = None  # Follows each document, where that is known.
  # Files beside the tokenizer that say how it is used.
  companions: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  # What decides, beside the seed, which sequences a step takes, as JSON values.
  order: dict[str, Any] = dataclasses.field(default_factory=dict)
  evaluations: Sequence[EvaluationSet] = ()


class Source(NamedTuple):
  """A source of tokens."""

  path: str
  weight: float | None  # Share of the sequences, as a multiple of any unit.


def load_tokens(config: Config) -> Tokens:
  """Reads the tokens that the settings name, tokenizing text the first time.

  Of several processes, the first does this for all that see its cache. Token
  files without an index are read, up to 2**30 tokens of each part, to find
  tokens that are not in the vocabulary.

  Raises:
    UsageError: If the data is missing, empty, not text, too short for a
      sequence in one of its parts, not of the vocabulary, or not the same in
      all processes.
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


def parse_sources(data: str | Sequence[str]) -> list[Source]:
  """Parses paths, such as ``'tokens/web:0.7'``.

  Raises ``UsageError`` unless all of several have a weight above 0, or none.
  """
  texts = [data] if isinstance(data, str) else list(data)
  sources = [_parse(text) for text in texts]
  given = [source.weight for source in sources if source.weight is not None]
  is_each = len(given) in (0, len(sources))
  if not sources or not is_each or not all(0 < x < math.inf for x in given):
    raise UsageError(
      '--data must name sources, each with a weight above 0, as in '
      f'tokens/web:0.7 tokens/code:0.3, or none, got {" ".join(texts)!r}.'
    )
  return sources


def _parse(text: str) -> Source:
  path, _, weight = text.rpartition(':')
  if Path(text).exists():  # A name with a colon.
    return Source(text, None)
  try:
    return Source(path, float(weight)) if path else Source(text, None)
  except ValueError:  # As in gs://bucket.
    return Source(text, None)


def _load(config: Config) -> Tokens:
  sources = parse_sources(config.data)
  paths = [source.path for source in sources]
  texts = [x for x in paths if x == 'stdlib' or not has_token_files(as_path(x))]
  if not texts:
    loaded = []
    for path in paths:
      with _named('--data', path):
        loaded.append(_open_folder(as_path(path), config))
    tokens = _mix(loaded, [source.weight for source in sources], config)
  elif len(texts) < len(paths) or sources[0].weight is not None:
    tokenizer = next((x for x in paths if x not in texts), 'FOLDER')
    raise UsageError(
      f'--data {texts[0]} holds no token files, which can be mixed and have '
      'weights: make them by python -m examples.gpt2.prepare --data '
      f'{texts[0]} --tokenizer {tokenizer} --out-dir OTHER.'
    )
  else:
    loaded = [_load_text(texts, config)]
    tokens = _mix(loaded, [None], config)
    paths = paths if len(paths) == 1 else ['text']
  names = [PurePath(path).name for path in paths]
  names = names if len({*names}) == len(names) else paths
  if len({*names}) < len(names):
    raise UsageError(
      f'--data names a source twice: {" ".join(names)}. Give each once, with '
      'the sum of its weights.'
    )
  weights = tokens.order.get('weights', [1.0])
  evaluations = [
    EvaluationSet(name, part.validation, weight, '')
    for name, part, weight in zip(names, loaded, weights, strict=True)
  ]
  for text in config.eval_data:
    known = [x.name for x in evaluations]
    evaluations.append(_named_evaluation(text, known, tokens, config))
  return dataclasses.replace(tokens, evaluations=evaluations)


@contextlib.contextmanager
def _named(flag: str, value: str) -> Iterator[None]:
  """Has a ``UsageError`` name the flag and the value that it is about."""
  try:
    yield
  except UsageError as error:
    raise UsageError(f'{flag} {value}: {error}') from error


def _mix(
  parts: list[Tokens], weights: list[float | None], config: Config
) -> Tokens:
  """Returns the tokens of all sources, and the order of their sequences."""
  first, order = parts[0], {'sampling': config.sampling}
  if len(parts) == 1:
    return dataclasses.replace(first, order=order)
  made_by = {x.tokenizer.to_str() for x in parts if x.tokenizer}
  if len(made_by) > 1 or len({x.vocab_size for x in parts}) > 1:
    raise UsageError(
      'Several sources of --data must have the same tokenizer: make token '
      'files of the others by python -m examples.gpt2.prepare --tokenizer '
      f'{first.source}.'
    )
  found = [x for x in weights if x] or [float(len(x.train)) for x in parts]
  shares = [weight / math.fsum(found) for weight in found]
  pairs = zip(shares, parts, strict=True)
  return dataclasses.replace(
    first,
    source=', '.join(x.source for x in parts),
    num_bytes=sum(x.num_bytes for x in parts),
    sha256=digest([x.sha256 for x in parts]),
    train=Mixture([x.train for x in parts], shares),
    unigram_entropy=math.fsum(x * part.unigram_entropy for x, part in pairs),
    order={**order, 'weights': shares},
  )


def _load_text(data: list[str], config: Config) -> Tokens:
  """Reads a text, from the cache where it has been tokenized before."""
  check_at_least(257, vocab_size=config.model.vocab_size)
  cache = cache_folder(config.cache_dir)
  with _named('--data', ' '.join(data)):
    corpus = load_corpus(data, [cache.absolute()])
    key = digest(corpus.sha256, config.model.vocab_size, tokenizers.__version__)
    folder = cache / key[:16]
    if read_index(folder) is None:
      fill_cache(folder, corpus, config.model.vocab_size)
    return dataclasses.replace(
      _open_folder(folder, config),
      source=corpus.source,
      num_bytes=corpus.num_bytes(*PARTS),
      sha256=corpus.sha256,
    )


def _open_folder(folder: Path, config: Config) -> Tokens:
  """Opens a folder with token files, perhaps with a tokenizer."""
  vocab_size, tokenizer, companions = config.model.vocab_size, None, {}
  if (folder / _TOKENIZER).is_file():
    tokenizer = read_tokenizer(folder / _TOKENIZER)
    companions = read_companions(folder)
    vocab_size = num_identifiers(tokenizer)
  index = read_index(folder)
  parts = open_parts(folder, vocab_size, index)
  for part in PARTS:
    if part not in parts:
      raise UsageError(f'{folder} holds token files, but no {part}.bin.')
    check_length(part, parts[part], config.model.context_length)
  if index is not None:
    check_token(index['vocab_size'] - 1, vocab_size, folder)
    sha256, mean = digest(index['shards']), index['unigram_entropy']
  else:
    counts, hashes = zip(*(parts[x].count() for x in PARTS), strict=True)
    sha256, mean = digest(hashes), entropy(counts[0])
  return Tokens(
    source=str(folder),
    num_bytes=sum(x.num_bytes for x in parts.values()),
    sha256=sha256,
    train=parts['train'],
    validation=parts['val'],
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    unigram_entropy=mean,
    end_token=tokenizer and end_token_of_folder(folder / _TOKENIZER, tokenizer),
    companions=companions,
  )


def check_length(
  part: str, tokens: TokenFiles | np.ndarray, length: int
) -> None:
  """Raises ``UsageError`` where tokens are too few for a sequence."""
  if len(tokens) <= length:
    raise UsageError(
      f'The {part} part of the data has {len(tokens)} tokens, too few for a '
      f'sequence of --context-length {length} and its last target: give more '
      'text or a shorter context.'
    )


def _named_evaluation(
  text: str, known: list[str], tokens: Tokens, config: Config
) -> EvaluationSet:
  """Opens a set of ``--eval-data``."""
  name, separator, path = text.partition('=')
  if not separator:
    name, path = PurePath(text).name or text, text
  if not name or not path:
    raise UsageError(f'--eval-data must be a path or name=path, got {text!r}.')
  if name in known:
    raise UsageError(
      f'--eval-data {text} has the name of another set, {name}: give each a '
      'name of its own, as in name=path.'
    )
  with _named('--eval-data', text):
    found = load_evaluation(
      path, tokens.vocab_size, tokens.tokenizer, tokens.end_token
    )
    check_length('val', found.tokens, config.model.context_length)
  return found._replace(name=name)


def load_evaluation(
  data: str,
  vocab_size: int,
  tokenizer: tokenizers.Tokenizer | None,
  end_token: str | None,
  text_field: str = 'text',
) -> EvaluationSet:
  """Opens token files, or tokenizes documents as examples.gpt2.prepare does.

  Args:
    data: Token file, folder with those to validate on, or text, JSON lines or
      Parquet, a file or a folder of files.
    vocab_size: Number that all tokens have to be below.
    tokenizer: Of text.
    end_token: Follows each document of text.
    text_field: Field of the text in JSON, column in Parquet.

  Returns:
    A set with neither name nor weight.

  Raises:
    UsageError: If there is no such data, or it does not fit the vocabulary.
  """
  path = as_path(data)
  is_file = path.suffix in TOKEN_SUFFIXES and path.is_file()
  if is_file or has_token_files(path):
    index = None if is_file else read_index(path)
    parts = (
      {'val': open_files([path], vocab_size)}
      if is_file
      else open_parts(path, vocab_size, index)
    )
    if 'val' not in parts:
      raise UsageError(f'{path} holds token files, but no val.bin.')
    if index is not None:
      check_token(index['vocab_size'] - 1, vocab_size, path)
    _, sha256 = parts['val'].count()
    return EvaluationSet('', parts['val'], 0.0, sha256)
  if tokenizer is None or end_token is None:
    raise UsageError(
      f'{data} holds no token files to validate on, and there is no tokenizer '
      'for text that names the token after each document: expected a token '
      'file, or a folder with val.bin.'
    )
  # Slow to import, and needed here alone.
  from examples.gpt2.data.documents import load_documents  # noqa: PLC0415

  with tempfile.TemporaryDirectory() as folder:
    documents = load_documents(find_files([data]), text_field, Path(folder))
    texts = [text for text in documents['text'] if text]
  found = encode(tokenizer, end_token, (x for y in texts for x in (y, '')))
  tokens = np.concatenate([*found, np.zeros(0, np.uint16)])
  sha256 = hashlib.sha256(tokens.tobytes()).hexdigest()
  num_bytes = sum(len(text.encode()) for text in texts)
  return EvaluationSet('', tokens, 0.0, sha256, num_bytes)
