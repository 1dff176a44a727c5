"""Continues text with a model: python -m examples.gpt2.generate --help."""

from collections.abc import Sequence
import math
from pathlib import Path
import sys
from typing import Any

from jax.sharding import Mesh
import tyro

from examples.gpt2.command import exit_on_error
from examples.gpt2.config import UsageError, check_at_least
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.decoding import generate_tokens
from examples.gpt2.model.files import Model
from examples.gpt2.run.weights import load_model

_TEMPERATURE = 0.8
_PROMPT_SHARE = 8  # An eighth of the sample is the prompt.
_MAX_TOKENS = 256
_DEFAULT_TOKENS = 200


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  with exit_on_error():
    texts = tyro.cli(
      generate, args=args, prog='python -m examples.gpt2.generate'
    )
  for number, text in enumerate(texts, start=1):
    if len(texts) > 1:
      print(f'[sample {number}]')
    print(text)


def generate(
  folder: tyro.conf.Positional[Path],
  prompt: str = '',
  tokens: int | None = None,
  temperature: float = _TEMPERATURE,
  top_k: int = 0,
  num_samples: int = 1,
  seed: int = 0,
  step: int | None = None,
  mesh: str = '',
) -> list[str]:
  """Continues text with a model.

  Args:
    folder: Folder of a run, which may go on, or of an imported model.
    prompt: Text to continue; for a model without a tokenizer, token identifiers
      with spaces between them. Default: the start of a document.
    tokens: Tokens to generate. Default: 200, or what the context has room for.
    temperature: How far to stray from the likeliest token; 0 always takes that
      one.
    top_k: Likeliest tokens to choose from; 0 for all.
    num_samples: Continuations, which differ by their random numbers.
    seed: Seed of the random numbers.
    step: Step of the run's checkpoint to read. Default: the weights at the end
      of the run, or its last checkpoint.
    mesh: Axes of the device mesh, such as 'fsdp=4,tensor=2', as the trainer's.

  Returns:
    Prompt and continuation, a text for each sample; token identifiers where
    there is no tokenizer.
  """
  check_at_least(1, tokens=tokens, num_samples=num_samples)
  check_at_least(0, top_k=top_k)
  if not 0 <= temperature < math.inf:
    raise UsageError(
      f'--temperature must be finite and at least 0, got {temperature}.'
    )
  if not 0 <= seed < 2**32:
    raise UsageError(f'--seed must be in [0, 2**32), got {seed}.')
  devices = make_mesh(mesh)
  model = load_model(folder, devices, step)
  ids = _encode(model, prompt)
  if tokens is None:
    tokens = _room(model.config, len(ids))
  _check_length(model.config, len(ids), tokens)
  ids_BT = generate_tokens(
    model, ids, tokens, devices, seed, temperature, top_k, num_samples
  )
  return [_decode(model, ids + row) for row in ids_BT.tolist()]


def _room(config: ModelConfig, prompt: int) -> int:
  """Returns how many tokens to generate where the user does not say."""
  room = config.context_length - prompt
  if room < 1:
    raise UsageError(
      f'--prompt has {prompt} tokens, which fill the context length of the '
      f'model, {config.context_length}: give a shorter one'
      + (', or --tokens.' if config.architecture == 'llama' else '.')
    )
  return min(_DEFAULT_TOKENS, room)


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
    words = prompt.split()
    given = [int(x) for x in words if x.isdecimal()]
    is_wrong = len(given) < len(words) or not given
    if is_wrong or max(given) >= model.num_tokens:
      raise UsageError(
        f'--prompt must be token identifiers below {model.num_tokens}, such as '
        f'"17 4", for the model has no tokenizer, got {prompt!r}.'
      )
    return given
  tokenizer: Any = model.tokenizer
  try:
    prompt.encode()
  except UnicodeEncodeError as error:
    raise UsageError(f'--prompt must be text, got {prompt!r}.') from error
  ids: list[int] = tokenizer.encode(prompt).ids
  if not ids and model.end_token is None:
    raise UsageError(
      '--prompt must not be empty: the tokenizer does not tell which token '
      'ends a document, to start after it.'
    )
  if not ids:
    ids = [tokenizer.token_to_id(model.end_token)]
  return ids


def _decode(model: Model, ids: Sequence[int]) -> str:
  if model.tokenizer is None:
    return ' '.join(map(str, ids))
  # A document's end is seen, where the next one would seem to go on with it.
  return model.tokenizer.decode(ids, skip_special_tokens=False)


def sample_text(model: Model, text_T: Any, mesh: Mesh, seed: int) -> str:
  """Continues the start of a text; all processes of the mesh must call it."""
  length = min(model.config.context_length, _MAX_TOKENS)
  prompt_T = text_T[: max(1, length // _PROMPT_SHARE)]
  count = length - len(prompt_T)
  ids_BT = generate_tokens(model, prompt_T, count, mesh, seed, _TEMPERATURE)
  start, rest = _decode(model, prompt_T), _decode(model, ids_BT[0])
  return f'[prompt]\n{start}\n[continuation]\n{rest}\n'


if __name__ == '__main__':
  main()
