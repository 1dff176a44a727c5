"""Continues text with a model: python -m examples.gpt2.generate --help."""

from collections.abc import Sequence
import functools
import math
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np
import tyro

from examples.gpt2.command import UsageError, check_at_least, exit_on_error
from examples.gpt2.config import ModelConfig
from examples.gpt2.model import Transformer, as_module
from examples.gpt2.model_files import Model, load_model
from examples.gpt2.sharding import make_mesh, num_batch_shards
from examples.gpt2.tokenizer import find_begin

_TEMPERATURE = 0.8
_DEFAULT_TOKENS = 200

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of all layers, each of shape (L, B, S, G, K)."""


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
  devices = make_mesh(mesh)
  model = load_model(folder, devices, step)
  ids = _encode(model, prompt)
  tokens = _num_tokens(model.config, len(ids), tokens)
  ids_BT = generate_tokens(
    model, ids, tokens, devices, seed, temperature, top_k, num_samples
  )
  return [_decode(model, ids + row) for row in ids_BT.tolist()]


def _num_tokens(config: ModelConfig, prompt: int, tokens: int | None) -> int:
  """Returns how many tokens to generate after a prompt of some tokens.

  GPT-2 has learned no positions beyond its context length.
  """
  room = config.context_length - prompt
  count = min(_DEFAULT_TOKENS, max(1, room)) if tokens is None else tokens
  if count > room:
    text = (
      f'The prompt of {prompt} tokens and {count} more exceed the context '
      f'length of the model, {config.context_length}'
    )
    if config.architecture == 'gpt2':
      raise UsageError(f'{text}: give a shorter --prompt or fewer --tokens.')
    print(f'{text}: what comes after may be worse.', file=sys.stderr)
  return count


def _encode(model: Model, prompt: str) -> list[int]:
  """Returns the tokens of a prompt, at least one."""
  if model.tokenizer is None:
    ids = [int(x) if x.isdecimal() else -1 for x in prompt.split()]
    if not ids or min(ids) < 0 or max(ids) >= model.num_tokens:
      raise UsageError(
        f'--prompt must be token identifiers below {model.num_tokens}, such as '
        f'"17 4", for the model has no tokenizer, got {prompt!r}.'
      )
    return ids
  tokenizer: Any = model.tokenizer
  text = tokenizer.encode(prompt, add_special_tokens=False).ids
  ids = [*find_begin(tokenizer), *text]
  if ids:
    return ids
  if model.end_token is None:
    raise UsageError(
      '--prompt must not be empty: the tokenizer does not tell which token '
      'ends a document, to start after it.'
    )
  return [tokenizer.token_to_id(model.end_token)]


def _decode(model: Model, ids: Sequence[int]) -> str:
  if model.tokenizer is None:
    return ' '.join(map(str, ids))
  # A document's end is seen, where the next one would seem to go on with it.
  return model.tokenizer.decode(ids, skip_special_tokens=False)


def sample_text(model: Model, text_T: Any, mesh: Mesh, seed: int) -> str:
  """Continues the start of a text; all processes of the mesh must call it."""
  length = min(model.config.context_length, 256)
  prompt_T = text_T[: max(1, length // 8)]
  count = length - len(prompt_T)
  ids_BT = generate_tokens(model, prompt_T, count, mesh, seed, _TEMPERATURE)
  start, rest = _decode(model, prompt_T), _decode(model, ids_BT[0])
  return f'[prompt]\n{start}\n[continuation]\n{rest}\n'


def generate_tokens(
  model: Model,
  prompt_T: Sequence[int],
  num_tokens: int,
  mesh: Mesh,
  seed: int,
  temperature: float,
  top_k: int = 0,
  num_samples: int = 1,
) -> np.ndarray:
  """Continues a prompt of at least one token; all processes must call it.

  At temperature 0 the likeliest token is taken, with ``top_k`` 0 any may be.
  The parameters stay on the devices of the mesh as they are. Returns the
  generated tokens in each process, int32, shape (num_samples, num_tokens).
  """
  shards = num_batch_shards(mesh)
  # Each shard of the batch reads the prompt once, for all its continuations.
  prompt_BT = np.tile(np.asarray(prompt_T, np.int32), (shards, 1))
  sizes = num_tokens, math.ceil(num_samples / shards), top_k
  with jax.set_mesh(mesh):
    tokens_BT = _generate(
      model.config, sizes, model.params, prompt_BT,
      model.num_tokens, temperature, np.uint32(seed % 2**32),
    )  # fmt: skip
  return np.asarray(tokens_BT)[:num_samples]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
  config: ModelConfig,
  sizes: tuple[int, int, int],
  params: Any,
  prompt_BT: jax.Array,
  num_identifiers: jax.Array,
  temperature: jax.Array,
  seed: jax.Array,
) -> jax.Array:
  """Returns some continuations of each prompt, on all devices."""
  num_tokens, copies, top_k = sizes
  model = as_module(config, params)
  batch_size, length = prompt_BT.shape
  cache = empty_cache(config, batch_size, length + num_tokens)
  features_BTD, cache = extend(model, prompt_BT, cache, 0)
  state = jax.tree.map(
    lambda x, axis: jnp.repeat(x, copies, axis),
    (features_BTD[:, -1:], cache),
    (0, (1, 1)),
  )

  def step(state: Any, inputs: tuple[jax.Array, jax.Array]) -> Any:
    (features_BTD, cache), (position, key) = state, inputs
    logits_BV = model.logits(features_BTD)[:, 0]
    logits_BV = _restrict(logits_BV, num_identifiers, top_k)
    # The largest of logits with Gumbel noise is a sample of their softmax.
    noise_BV = temperature * jax.random.gumbel(key, logits_BV.shape)
    tokens_B = jnp.argmax(logits_BV + noise_BV, axis=-1)
    return extend(model, tokens_B[:, None], cache, position), tokens_B

  positions_T = length + jnp.arange(num_tokens)
  keys_T = jax.random.split(jax.random.key(seed), num_tokens)
  _, tokens_TB = jax.lax.scan(step, state, (positions_T, keys_T))
  return jax.lax.with_sharding_constraint(tokens_TB.T, P())


def _restrict(
  logits_BV: jax.Array, num_identifiers: jax.Array, top_k: int
) -> jax.Array:
  """Rules out padding of the vocabulary, and all but the largest logits."""
  size = logits_BV.shape[-1]
  logits_BV = jnp.where(jnp.arange(size) < num_identifiers, logits_BV, -jnp.inf)
  if not 0 < top_k < size:
    return logits_BV
  least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
  return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def empty_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
  """Returns a cache of zeros with slots for some tokens."""
  heads = config.num_kv_heads, config.head_width
  shape = config.num_layers, batch_size, length, *heads
  zeros = jnp.zeros(shape, config.dtype)
  return zeros, zeros


def extend(
  model: Transformer,
  tokens_BT: jax.Array,
  cache: Cache,
  position: jax.typing.ArrayLike,
) -> tuple[jax.Array, Cache]:
  """Runs the model on tokens that follow those of a cache.

  Those are in its first slots, as many as the position says; the new ones must
  have room. Returns their features, shape (B, T, D), and the cache with them.
  """
  length, slots = tokens_BT.shape[1], cache[0].shape[2]
  positions_T = position + jnp.arange(length)
  visible_TS = jnp.arange(slots) <= positions_T[:, None]
  put = functools.partial(
    jax.lax.dynamic_update_slice_in_dim, start_index=position
  )

  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array
  ) -> tuple[jax.Array, Cache]:
    keys, values = put(keys, k, axis=1), put(values, v, axis=1)
    mask = visible_TS[None, None]
    return jax.nn.dot_product_attention(q, keys, values, mask=mask), (k, v)

  features_BTD, new = model.features(
    tokens_BT, attend, first_position=position, by_layer=cache
  )
  return features_BTD, jax.tree.map(functools.partial(put, axis=2), cache, new)


if __name__ == '__main__':
  main()
