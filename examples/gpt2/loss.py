"""Cross-entropy without all logits at once.

S at the end of a name is an axis of shards of the batch, N of tokens of all
sequences in a chunk; other letters as in ``model.py``.
"""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp

from examples.gpt2.sharding import constrain, num_current_batch_shards

# Float32 logits of a chunk, of all sequences of a device.
_LOGITS_AT_ONCE = 1 << 27
# Target of what fills the last chunk.
_FILL = -1


@jax.custom_vjp
def mean_cross_entropy(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy in nats a token, float32.

  Logits exist for a few tokens of each sequence at a time, and only once: the
  gradient is computed beside the loss, so that the backward pass need not
  recompute them.
  """
  return jnp.mean(token_losses(features_BTD, head_VD, targets_BT))


def token_losses(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> jax.Array:
  """Returns the cross-entropy of each token in nats, float32, shape (B, T)."""

  def measure(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
    features_BCD, targets_BC = chunk
    losses_N, _ = _losses_and_errors(
      _flat(features_BCD), targets_BC.ravel(), head_VD
    )
    return losses_N.reshape(targets_BC.shape)

  head_VD = _gather(head_VD, features_BTD.dtype)
  chunks = _chunks(features_BTD, head_VD, targets_BT)
  return _join(jax.lax.map(measure, chunks), targets_BT.shape[1])


def _forward(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the loss, and its gradients for features and head."""
  dtype, head_dtype = features_BTD.dtype, head_VD.dtype
  head_VD = _gather(head_VD, dtype)
  # Each shard of the batch has a sum of its own until all chunks are done.
  shards = math.gcd(len(targets_BT), num_current_batch_shards())

  def by_shard(x: jax.Array) -> jax.Array:
    return x.reshape(shards, -1, x.shape[-1])

  def measure(
    total: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    loss, head_gradient_SDV = total
    features_ND, targets_N = _flat(chunk[0]), chunk[1].ravel()
    losses_N, error_NV = _losses_and_errors(features_ND, targets_N, head_VD)
    error_NV = error_NV.astype(dtype)
    gradient_ND = _matmul(error_NV, head_VD)
    # The reverse product would have XLA transpose the larger matrix on CPU.
    head_gradient_SDV += _matmul(by_shard(features_ND).mT, by_shard(error_NV))
    # Features that fill the last chunk are zero, so they have no gradients.
    loss += jnp.sum(losses_N, where=targets_N != _FILL)
    return (loss, head_gradient_SDV), gradient_ND.reshape(chunk[0].shape)

  chunks = _chunks(features_BTD, head_VD, targets_BT)
  zeros_SDV = jnp.zeros((shards, *head_VD.T.shape))
  zero = jnp.zeros([]), constrain(zeros_SDV, 'vocabulary_by_shard')
  (loss, head_gradient_SDV), gradients = jax.lax.scan(measure, zero, chunks)
  count = targets_BT.size
  return loss / count, (
    (_join(gradients, targets_BT.shape[1]) / count).astype(dtype),
    (head_gradient_SDV.mT.sum(0) / count).astype(head_dtype),
  )


def _backward(
  residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  features_BTD, head_VD = ((g * x).astype(x.dtype) for x in residuals)
  return features_BTD, head_VD, None


mean_cross_entropy.defvjp(_forward, _backward)


def _losses_and_errors(
  features_ND: jax.Array, targets_N: jax.Array, head_VD: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the loss of each token, and its gradient for the logits, (N, V)."""
  logits_NV = _matmul(features_ND, head_VD.T)
  largest_N1 = jnp.max(logits_NV, axis=-1, keepdims=True)
  exp_NV = jnp.exp(logits_NV - largest_N1)
  sum_N1 = jnp.sum(exp_NV, axis=-1, keepdims=True)
  # A masked sum, unlike a gather, takes a vocabulary that lies on many devices.
  one_hot_NV = targets_N[:, None] == jnp.arange(len(head_VD))
  target_N = jnp.sum(logits_NV, axis=-1, where=one_hot_NV)
  losses_N = (jnp.log(sum_N1) + largest_N1)[:, 0] - target_N
  return losses_N, exp_NV / sum_N1 - one_hot_NV


def _gather(head_VD: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns the head for all chunks, whole but for the tensor axis."""
  return constrain(head_VD.astype(dtype), 'vocabulary')


def _flat(x_BCD: jax.Array) -> jax.Array:
  return x_BCD.reshape(-1, x_BCD.shape[-1])


_matmul: Callable[..., jax.Array] = functools.partial(
  jnp.matmul, preferred_element_type=jnp.float32
)


def _chunks(
  features_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cuts tokens to chunks of one length, on a leading axis."""
  batch, length = targets_BT.shape
  # Those of a device: on many devices, chunks are as few as on one.
  rows = math.ceil(batch / num_current_batch_shards())
  # At least two chunks, so that all logits never exist at once.
  most = min(_LOGITS_AT_ONCE // (rows * len(head_VD)), math.ceil(length / 2))
  count = math.ceil(length / max(1, most))
  chunk = math.ceil(length / count)

  def cut(x: jax.Array, fill: int) -> jax.Array:
    widths = [(0, 0), (0, -length % chunk), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

  return cut(features_BTD, 0), cut(targets_BT, _FILL)


def _join(chunks: jax.Array, length: int) -> jax.Array:
  """Puts chunks of tokens together again, without what fills the last."""
  x = jnp.moveaxis(chunks, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
