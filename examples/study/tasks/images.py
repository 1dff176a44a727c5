"""Trains an image classifier, within seconds.

Axes: S steps, B images of a step.
"""

import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.gpt2.config import Config
from examples.gpt2.optim import optimizers
from examples.gpt2.run.step import TrainState
from examples.study import arms
from examples.study.plans import Run
from examples.study.tasks import digits
from examples.study.tasks.classifiers import MIXERS, Classifier


def train(run: Run) -> dict[str, Any]:
  """Trains a classifier on the digits, from its beginning to its end.

  Args:
    run: The run; its batch size is in images.

  Returns:
    JSON values of its record: the final loss on all training images, nats an
    image (None if it diverged); as diagnostics that of the test images, and the
    share of these that is classified wrongly.

  Raises:
    UsageError: If scikit-learn is not installed.
  """
  config = run.config
  parts = digits.load_digits()

  def make_model(key: jax.Array) -> Classifier:
    return Classifier(config, MIXERS[run.task], rngs=nnx.Rngs(key))

  # Apart, since it does not depend on the optimizer, and is cached.
  init = jax.jit(lambda key: nnx.as_pure(nnx.state(make_model(key))))
  key = jax.random.key(config.seed)
  graphdef, _ = nnx.split(nnx.eval_shape(lambda: make_model(key)))
  fit = jax.jit(functools.partial(_fit, graphdef, _make_optimizer(run)))
  order_SB = _order(config, len(parts[0].labels))
  trained = fit(init(key), order_SB, *parts)
  found = {name: _finite(x) for name, x in trained.items()}
  return {
    'loss': found['train_loss'],
    # They come with scikit-learn.
    'corpus_sha256': None,
    'steps_done': config.steps,
    'diagnostics': {'step': [config.steps]}
    | {name: [x] for name, x in found.items()},
  }


def _order(config: Config, count: int) -> np.ndarray:
  """Returns the images of each step, shape (S, B), in a step each once."""
  generator = np.random.default_rng(config.seed)
  orders = [generator.permutation(count) for _ in range(config.steps)]
  return np.stack(orders)[:, : config.batch_size]


def _fit(
  graphdef: nnx.GraphDef[Classifier],
  optimizer: optax.GradientTransformation,
  params: Any,
  order_SB: jax.Array,
  train_images: digits.Images,
  test_images: digits.Images,
) -> dict[str, jax.Array]:
  """Returns what is measured after the last step; to be traced."""

  def loss(params: Any, images: digits.Images) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss, and the share that is classified wrongly."""
    logits_BK = nnx.merge(graphdef, params)(images.patches)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(
      logits_BK, images.labels
    )
    return losses_B.mean(), jnp.mean(logits_BK.argmax(-1) != images.labels)

  def step(state: TrainState, indices_B: jax.Array) -> tuple[TrainState, None]:
    params, opt_state = state
    images = jax.tree.map(lambda x: x[indices_B], train_images)
    gradients, _ = jax.grad(loss, has_aux=True)(params, images)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return TrainState(optax.apply_updates(params, updates), opt_state), None

  state = TrainState(params, optimizer.init(params))
  (params, _), _ = jax.lax.scan(step, state, order_SB)
  test_loss, test_errors = loss(params, test_images)
  return {
    'train_loss': loss(params, train_images)[0],
    'test_loss': test_loss,
    'test_errors': test_errors,
  }


def _make_optimizer(run: Run) -> optax.GradientTransformation:
  if run.arm:
    return arms.make_optimizer(run.arm, run.config)
  return optimizers.make_optimizer(run.config)


def _finite(x: jax.Array) -> float | None:
  return round(float(x), 5) if math.isfinite(x) else None
