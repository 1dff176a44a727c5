"""Trains with Kauldron and merit_optax: the ``optimizer`` of the trainer."""

from flax import linen as nn
from kauldron import kd
import merit_by_name
import numpy as np
import optax

import merit_optax

STEPS = 30


class Model(nn.Module):
  """A layer of attention over the rows of an image."""

  image: kd.kontext.Key = 'batch.image'

  @nn.compact
  def __call__(self, image):
    """Returns logits of ten labels."""
    x = nn.Dense(32)(image)
    x += kd.nn.ImprovedMultiHeadDotProductAttention(num_heads=4)(
      nn.LayerNorm()(x)
    )
    return nn.Dense(10)(x.mean(axis=-2))


def examples():
  """Returns random images, with labels."""
  generator = np.random.default_rng(0)
  return {
    'image': generator.normal(size=(64, 8, 8)).astype(np.float32),
    'label': generator.integers(0, 10, size=(64, 1)),
  }


rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, STEPS // 10, STEPS)
trainer = kd.train.Trainer(
  seed=0,
  workdir='runs/kauldron',
  train_ds=kd.data.InMemoryPipeline(
    loader=examples, batch_size=64, shuffle=True
  ),
  model=Model(),
  train_losses={
    'loss': kd.losses.SoftmaxCrossEntropyWithIntLabels(
      logits='preds', labels='batch.label'
    )
  },
  num_train_steps=STEPS,
  log_metrics_every=1,
  schedules={'learning_rate': rate},
  optimizer=merit_by_name.make(
    'merit',
    rate,
    weight_decay=0.01,
    weight_dimension_numbers=merit_optax.flax_dimension_numbers,
  ),
)

if __name__ == '__main__':
  trainer.train()
