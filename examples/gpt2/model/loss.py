"""Cross-entropy without all logits at once.

Letters at the end of a name give the axes of an array: B sequences, T tokens,
C tokens of a sequence in a chunk, N all tokens of a chunk, D features, V
vocabulary.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from examples.gpt2.devices.sharding import num_batch_shards

# Float32 logits of a chunk, of all sequences of a device.
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
    features_BCD, targets_BC = chunk
    losses_N, _ = _losses_and_probabilities(
      _flat(features_BCD), targets_BC.ravel(), head_VD
    )
    return losses_N.reshape(targets_BC.shape)

  chunks = _cut(features_BTD, head_VD), _cut(targets_BT, head_VD)
  return _join(jax.lax.map(measure, chunks))


def _forward(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the loss, and its gradients for features and head."""

  def measure(
    total: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    loss, head_gradient_DV = total
    features_ND, targets_N = _flat(chunk[0]), chunk[1].ravel()
    losses_N, p_NV = _losses_and_probabilities(features_ND, targets_N, head_VD)
    error_NV = (p_NV - _one_hot(targets_N, head_VD)).astype(dtype)
    gradient_ND = _matmul(error_NV, head_VD.astype(dtype))
    # The reverse product would have XLA transpose the larger matrix on CPU.
    head_gradient_DV += _matmul(features_ND.T, error_NV)
    total = loss + jnp.sum(losses_N), head_gradient_DV
    return total, gradient_ND.reshape(chunk[0].shape)

  dtype = features_BTD.dtype
  chunks = _cut(features_BTD, head_VD), _cut(targets_BT, head_VD)
  zero = jnp.zeros([]), jnp.zeros(head_VD.T.shape)
  (loss, head_gradient_DV), gradients = jax.lax.scan(measure, zero, chunks)
  count = targets_BT.size
  return loss / count, (
    (_join(gradients) / count).astype(dtype),
    (head_gradient_DV.T / count).astype(head_VD.dtype),
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
  features_ND: jax.Array, targets_N: jax.Array, head_VD: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the loss of each token, and the softmax, shape (N, V)."""
  logits_NV = _matmul(features_ND, head_VD.astype(features_ND.dtype).T)
  largest_N1 = jnp.max(logits_NV, axis=-1, keepdims=True)
  exp_NV = jnp.exp(logits_NV - largest_N1)
  sum_N1 = jnp.sum(exp_NV, axis=-1, keepdims=True)
  # A masked sum, unlike a gather, takes a vocabulary that lies on many devices.
  target_N = jnp.sum(
    jnp.where(_one_hot(targets_N, head_VD), logits_NV, 0), axis=-1
  )
  losses_N = (jnp.log(sum_N1) + largest_N1)[:, 0] - target_N
  return losses_N, exp_NV / sum_N1


def _one_hot(targets_N: jax.Array, head_VD: jax.Array) -> jax.Array:
  return targets_N[:, None] == jnp.arange(len(head_VD))


def _flat(x_BCD: jax.Array) -> jax.Array:
  return x_BCD.reshape(-1, x_BCD.shape[-1])


_matmul: Callable[..., jax.Array] = functools.partial(
  jnp.matmul, preferred_element_type=jnp.float32
)


def chunk_length(batch: int, length: int, vocab_size: int) -> int:
  """Returns for how many tokens of each sequence logits exist at once.

  Args:
    batch: Sequences of a device.
    length: Tokens of a sequence.
    vocab_size: Size of the vocabulary.
  """
  wanted = max(1, _LOGITS_AT_ONCE // (batch * vocab_size))
  # At least two chunks, so that all logits never exist at once.
  sizes = range(1, max(1, length // 2) + 1)
  return max(n for n in sizes if length % n == 0 and n <= wanted)


def _cut(x: jax.Array, head_VD: jax.Array) -> jax.Array:
  """Moves chunks of tokens, (B, T, ...), to a leading axis."""
  batch, length = x.shape[:2]
  # On many devices, few chunks: each gathers the head and sums its gradient.
  mesh = jax.sharding.get_abstract_mesh()
  shards = 1 if mesh.empty else num_batch_shards(mesh)
  chunk = chunk_length(-(-batch // shards), length, len(head_VD))
  return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
  """Undoes :func:`_cut`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
