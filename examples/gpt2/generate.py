"""Continues text with a model: python -m examples.gpt2.generate --help."""

from collections.abc import Callable
import dataclasses
import math
from pathlib import Path
import sys
from typing import Any

import jax
import numpy as np
import tokenizers
import tyro

from examples.gpt2.config import UsageError, flag
from examples.gpt2.data.tokenizer import END_OF_TEXT
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.model.decoding import generate_tokens
from examples.gpt2.model.files import Model, load_model
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.transformer import Transformer
from examples.gpt2.run.command import exit_on_error

_TEMPERATURE = 0.8
_PROMPT_SHARE = 8  # An eighth of the sample is the prompt.
_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """Continues text with a model."""

  folder: tyro.conf.Positional[Path]
  """Folder of a finished run or of an imported model."""

  prompt: str = ''
  """Text to continue; for a model without a tokenizer, token identifiers with
  spaces between them. Default: the start of a document."""

  tokens: int = 200
  """Tokens to generate."""

  temperature: float = _TEMPERATURE
  """How far to stray from the likeliest token; 0 always takes that one."""

  top_k: int = 0
  """Likeliest tokens to choose from; 0 for all."""

  num_samples: int = 1
  """Continuations, which differ by their random numbers."""

  seed: int = 0
  """Seed of the random numbers."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read, and 130 after control-C.
  """
  config = tyro.cli(
    GenerateConfig, args=args, prog='python -m examples.gpt2.generate'
  )
  with exit_on_error():
    for number, text in enumerate(generate(config), start=1):
      if config.num_samples > 1:
        print(f'[sample {number}]')
      print(text)


def generate(config: GenerateConfig) -> list[str]:
  """Continues a prompt with the model of a folder.

  Args:
    config: Settings as the user gave them.

  Returns:
    Prompt and continuation, a text for each sample; token identifiers where
    there is no tokenizer.

  Raises:
    UsageError: If the settings or the folder are wrong.
    OSError: If a file cannot be read.
  """
  _check(config)
  model = load_model(config.folder)
  prompt = _encode(model, config.prompt)
  _check_length(model.config, len(prompt), config.tokens)
  ids_BT = generate_tokens(
    model.config,
    model.params,
    np.array(prompt, np.int32),
    config.tokens,
    num_identifiers=model.num_tokens,
    temperature=config.temperature,
    top_k=config.top_k,
    num_samples=config.num_samples,
    key=jax.random.key(config.seed),
  )
  return [
    _decode(model.tokenizer, prompt + ids)
    for ids in np.asarray(ids_BT).tolist()
  ]


def _check(config: GenerateConfig) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  for name, least in dict(tokens=1, num_samples=1, top_k=0).items():
    value = getattr(config, name)
    if value < least:
      raise UsageError(f'{flag(name)} must be at least {least}, got {value}.')
  if not 0 <= config.temperature < math.inf:
    raise UsageError(
      f'--temperature must be finite and at least 0, got {config.temperature}.'
    )
  if not 0 <= config.seed < 2**32:
    raise UsageError(f'--seed must be in [0, 2**32), got {config.seed}.')


def _check_length(config: ModelConfig, prompt: int, tokens: int) -> None:
  """Refuses positions that the model has not learned."""
  if prompt + tokens <= config.context_length:
    return
  text = (
    f'The prompt of {prompt} tokens and --tokens {tokens} exceed the context '
    f'length of the model, {config.context_length}'
  )
  if config.architecture == 'gpt2':
    raise UsageError(f'{text}: give a shorter prompt or fewer --tokens.')
  print(
    f'{text}, which it was trained with; what comes after may be worse.',
    file=sys.stderr,
  )


def _encode(model: Model, prompt: str) -> list[int]:
  """Returns the tokens of a prompt, at least one."""
  if model.tokenizer is None:
    return _parse(prompt, model.num_tokens)
  ids = model.tokenizer.encode(prompt).ids
  start = model.tokenizer.token_to_id(END_OF_TEXT)
  if not ids and start is None:
    raise UsageError(
      f'--prompt must not be empty: the tokenizer has no token {END_OF_TEXT} '
      'to start with.'
    )
  return ids or [start]


def _parse(prompt: str, num_tokens: int) -> list[int]:
  """Returns token identifiers that are spelled out."""
  words = prompt.split()
  if not words or not all(
    word.isdecimal() and int(word) < num_tokens for word in words
  ):
    raise UsageError(
      f'--prompt must be token identifiers below {num_tokens}, such as "17 4", '
      f'for the model has no tokenizer, got {prompt!r}.'
    )
  return [int(word) for word in words]


def _decode(tokenizer: tokenizers.Tokenizer | None, ids: list[int]) -> str:
  if tokenizer is None:
    return ' '.join(map(str, ids))
  # A document's end is seen, where the next one would seem to go on with it.
  return tokenizer.decode(ids, skip_special_tokens=False)


def sample_text(
  model: Callable[[Any], Transformer],
  params: Any,
  tokens: Tokens,
  context_length: int,
  seed: int,
) -> str:
  """Continues the start of the validation text; no mesh must be set.

  Args:
    model: Function from parameters to the model.
    params: Tree of parameters, on any devices of this process.
    tokens: Tokens of the run, for a prompt and the tokenizer.
    context_length: Largest number of tokens that the model takes.
    seed: Seed of the sample.

  Returns:
    Prompt and continuation; token identifiers where there is no tokenizer.
  """
  length = min(context_length, _MAX_TOKENS)
  prompt = tokens.validation[: max(1, length // _PROMPT_SHARE)].astype(np.int32)
  ids_BT = generate_tokens(
    model(params).config,
    params,
    prompt,
    length - len(prompt),
    num_identifiers=tokens.vocab_size,
    temperature=_TEMPERATURE,
    key=jax.random.key(seed),
  )
  start = _decode(tokens.tokenizer, prompt.tolist())
  rest = _decode(tokens.tokenizer, np.asarray(ids_BT)[0].tolist())
  return f'[prompt]\n{start}\n[continuation]\n{rest}\n'


if __name__ == '__main__':
  main()
