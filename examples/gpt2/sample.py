"""Writes a sample of what a model has learned."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.gpt2.tokens import Tokens

_TEMPERATURE = 0.8
_PROMPT_SHARE = 8  # An eighth of the context is the prompt.
_MAX_TOKENS = 256


def sample_text(
  logits_of: Callable[[Any, jax.Array], jax.Array],
  params: Any,
  tokens: Tokens,
  context_length: int,
  seed: int,
) -> str:
  """Continues the start of the validation text.

  Args:
    logits_of: Function from parameters and tokens (B, T) to logits (B, T, V).
    params: Tree of parameters.
    tokens: Tokens of the run, for a prompt and the tokenizer.
    context_length: Largest number of tokens that the model takes.
    seed: Seed of the sample.

  Returns:
    Prompt and continuation; token identifiers where there is no tokenizer.
  """
  length = min(context_length, _MAX_TOKENS)
  prompt = tokens.validation[: max(1, length // _PROMPT_SHARE)].astype(np.int32)
  key = jax.random.key(seed)
  ids = np.asarray(
    _continue(logits_of, params, prompt, length, tokens.vocab_size, key)
  )
  decode = tokens.tokenizer.decode if tokens.tokenizer else _spell
  start = decode(prompt.tolist())
  rest = decode(ids[len(prompt) :].tolist())
  return f'[prompt]\n{start}\n[continuation]\n{rest}\n'


@functools.partial(jax.jit, static_argnums=(0, 3))
def _continue(
  logits_of: Callable[[Any, jax.Array], jax.Array],
  params: Any,
  prompt: jax.Array,
  length: int,
  vocab_size: jax.Array,
  key: jax.Array,
) -> jax.Array:
  """Returns the prompt, sampled on to a length, shape (length,)."""

  def sample_next(i: jax.Array, ids: jax.Array) -> jax.Array:
    logits_V = logits_of(params, ids[None])[0, i - 1] / _TEMPERATURE
    known_V = jnp.arange(len(logits_V)) < vocab_size
    choice = jax.random.categorical(
      jax.random.fold_in(key, i), jnp.where(known_V, logits_V, -jnp.inf)
    )
    return ids.at[i].set(choice.astype(ids.dtype))

  ids = jnp.pad(prompt, (0, length - len(prompt)))
  return jax.lax.fori_loop(len(prompt), length, sample_next, ids)


def _spell(ids: list[int]) -> str:
  return ' '.join(map(str, ids))
