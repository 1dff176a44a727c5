import re
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import optax

from benchmarks.hlo import collectives
from examples.gpt2 import loss
from examples.gpt2.loss import mean_cross_entropy, token_losses
from examples.gpt2.sharding import make_mesh


def _plain(features, head, targets):
  """Cross-entropy of all logits at once, in float32."""
  logits = jnp.einsum('BTD,VD->BTV', features.astype('float32'), head)
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _plain_mean(*args):
  return _plain(*args).mean()


def _inputs(batch, length, width, vocab_size, dtype='float32', scale=1.0):
  generator = np.random.default_rng((batch, length, vocab_size))
  features = scale * generator.normal(size=(batch, length, width))
  return (
    jnp.asarray(features, dtype),
    jnp.asarray(generator.normal(size=(vocab_size, width)), 'float32'),
    jnp.asarray(generator.integers(vocab_size, size=(batch, length)), 'int32'),
  )


def _jit(function):
  # A new function each time: the old would remember the size of its chunks.
  def run(*args):
    return function(*args)

  return jax.jit(run)


def _value_and_grad(function):
  return _jit(jax.value_and_grad(function, argnums=(0, 1)))


@hypothesis.given(
  batch=st.integers(1, 3),
  length=st.integers(1, 12),
  vocab_size=st.integers(1, 20),
  at_once=st.integers(0, 200),
)
@hypothesis.settings(max_examples=3)
# Chunks of an odd length, the last of which is filled up.
@hypothesis.example(batch=2, length=5, vocab_size=8, at_once=200)
def test_loss_and_gradients_equal_those_of_full_logits(
  batch: int, length: int, vocab_size: int, at_once: int
):
  inputs = _inputs(batch, length, 4, vocab_size)

  def everything(mean, each):
    # Of half the loss: its gradients scale with it.
    gradients = jax.value_and_grad(lambda *x: 0.5 * mean(*x), argnums=(0, 1))
    return _jit(lambda *inputs: (gradients(*inputs), each(*inputs)))(*inputs)

  expected = everything(_plain_mean, _plain)
  with mock.patch.object(loss, '_LOGITS_AT_ONCE', at_once):
    found = everything(mean_cross_entropy, token_losses)
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert one.dtype == other.dtype
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_chunks_share_what_is_sent_of_the_head():
  mesh = make_mesh('fsdp=8')
  whole = P('fsdp')
  inputs = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, whole))
    for x in _inputs(8, 64, 16, 32)
  ]
  with mock.patch.object(loss, '_LOGITS_AT_ONCE', 512), jax.set_mesh(mesh):
    compiled = _value_and_grad(mean_cross_entropy).lower(*inputs).compile()
  size_of_head = 4 * 16 * 32
  found = [x for x in collectives(compiled) if x.bytes == size_of_head]
  assert len(found) == 2
  assert all(x.executions == 1 for x in found)


def test_all_logits_never_exist_at_once():
  inputs = _inputs(4, 32, 8, 512)
  lean, plain = map(_value_and_grad, (mean_cross_entropy, _plain_mean))
  everything = 4 * 32 * 512
  assert _largest(lean.lower(*inputs).compile().as_text()) <= everything / 2
  assert _largest(plain.lower(*inputs).compile().as_text()) >= everything


def _largest(text: str) -> int:
  """Returns the size of the largest array in the text of a program."""
  shapes = re.findall(r'\w\[(\d+(?:,\d+)*)\]', text)
  return max(np.prod([int(n) for n in x.split(',')]) for x in shapes)
