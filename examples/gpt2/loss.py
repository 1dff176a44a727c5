"""Cross-entropy without all logits at once.

Letters at the end of a name give the axes of an array: B sequences, T tokens,
C tokens of a chunk, D features, V vocabulary.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

# Float32 logits of a chunk, of all sequences and devices together.
_LOGITS_AT_ONCE = 1 << 27


@jax.custom_vjp
def mean_cross_entropy(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy in nats a token, float32.

  Logits exist for a few tokens of each sequence at a time, and only once: the
  gradient is computed beside the loss, so that the backward pass need not
  compute them anew.

  Args:
    features_BTD: Features of each token, any floating type.
    head_VD: Matrix of the output head.
    targets_BT: Token that comes next, integers.
  """
  return jnp.mean(token_losses(features_BTD, head_VD, targets_BT))


def token_losses(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> jax.Array:
  """Returns the cross-entropy of each token in nats, float32, shape (B, T).

  Args:
    features_BTD: Features of each token, any floating type.
    head_VD: Matrix of the output head.
    targets_BT: Token that comes next, integers.
  """

  def measure(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
    return _losses_and_probabilities(*chunk, head_VD)[0]

  chunks = _cut(features_BTD, head_VD), _cut(targets_BT, head_VD)
  return _join(jax.lax.map(measure, chunks))


def _forward(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the loss, and its gradients for features and head."""

  def measure(
    total: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    loss, head_gradient_VD = total
    features_BCD, targets_BC = chunk
    losses_BC, p_BCV = _losses_and_probabilities(
      features_BCD, targets_BC, head_VD
    )
    error_BCV = (p_BCV - _one_hot(targets_BC, head_VD)).astype(dtype)
    gradient_BCD = _einsum('BCV,VD->BCD', error_BCV, head_VD.astype(dtype))
    head_gradient_VD += _einsum('BCV,BCD->VD', error_BCV, features_BCD)
    return (loss + jnp.sum(losses_BC), head_gradient_VD), gradient_BCD

  dtype = features_BTD.dtype
  chunks = _cut(features_BTD, head_VD), _cut(targets_BT, head_VD)
  zero = jnp.zeros([]), jnp.zeros(head_VD.shape)
  (loss, head_gradient_VD), gradients = jax.lax.scan(measure, zero, chunks)
  count = targets_BT.size
  return loss / count, (
    (_join(gradients) / count).astype(dtype),
    (head_gradient_VD / count).astype(head_VD.dtype),
  )


def _backward(
  residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  features_gradient, head_gradient = residuals
  return (
    (g * features_gradient).astype(features_gradient.dtype),
    (g * head_gradient).astype(head_gradient.dtype),
    None,
  )


mean_cross_entropy.defvjp(_forward, _backward)


def _losses_and_probabilities(
  features_BCD: jax.Array, targets_BC: jax.Array, head_VD: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the loss of each token, and the softmax, shape (B, C, V)."""
  head_VD = head_VD.astype(features_BCD.dtype)
  logits_BCV = _einsum('BCD,VD->BCV', features_BCD, head_VD)
  largest_BC1 = jnp.max(logits_BCV, axis=-1, keepdims=True)
  exp_BCV = jnp.exp(logits_BCV - largest_BC1)
  sum_BC1 = jnp.sum(exp_BCV, axis=-1, keepdims=True)
  # A masked sum, unlike a gather, takes a vocabulary that lies on many devices.
  target_BC1 = jnp.sum(
    jnp.where(_one_hot(targets_BC, head_VD), logits_BCV, 0), -1, keepdims=True
  )
  losses_BC1 = jnp.log(sum_BC1) + largest_BC1 - target_BC1
  return losses_BC1[..., 0], exp_BCV / sum_BC1


def _one_hot(targets_BC: jax.Array, head_VD: jax.Array) -> jax.Array:
  return targets_BC[..., None] == jnp.arange(len(head_VD))


_einsum: Callable[..., jax.Array] = functools.partial(
  jnp.einsum, preferred_element_type=jnp.float32
)


def chunk_length(batch: int, length: int, vocab_size: int) -> int:
  """Returns for how many tokens of each sequence logits exist at once."""
  wanted = max(1, _LOGITS_AT_ONCE // (batch * vocab_size))
  # At least two chunks, so that all logits never exist at once.
  sizes = range(1, max(1, length // 2) + 1)
  return max(n for n in sizes if length % n == 0 and n <= wanted)


def _cut(x: jax.Array, head_VD: jax.Array) -> jax.Array:
  """Moves chunks of tokens, (B, T, ...), to a leading axis."""
  batch, length = x.shape[:2]
  chunk = chunk_length(batch, length, len(head_VD))
  return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
  """Undoes :func:`_cut`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
