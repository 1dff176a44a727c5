"""Image classifiers in which attention or an MLP mixes patches: ViT and Mixer.

After Dosovitskiy et al., `An Image is Worth 16x16 Words
<https://arxiv.org/abs/2010.11929>`_, and Tolstikhin et al., `MLP-Mixer
<https://arxiv.org/abs/2105.01601>`_, both 2021; here with the mean of the
patches, and learned positions, in both.

Axes: B images, T patches, D features, K classes.
"""

from collections.abc import Callable
import functools

from flax import nnx
import jax

from examples.gpt2.config import Config
from examples.study.tasks import digits


class MLP(nnx.Module):
  """GELU between two linear layers, the inner one four times as wide."""

  def __init__(self, config: Config, features: int, rngs: nnx.Rngs):
    linear = functools.partial(
      nnx.Linear, kernel_init=_kernel_init(config), rngs=rngs
    )
    self.up = linear(features, 4 * features)
    self.down = linear(4 * features, features)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Transforms the last axis."""
    return self.down(jax.nn.gelu(self.up(x)))


class PatchMLP(MLP):
  """An MLP across the patches of an image, the same for all features."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    super().__init__(config, digits.NUM_PATCHES, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Transforms the axis of patches."""
    return super().__call__(x_BTD.mT).mT


class Block(nnx.Module):
  """Pre-norm block: what mixes patches, then an MLP for each of them."""

  def __init__(
    self,
    config: Config,
    make_mixer: Callable[[Config, nnx.Rngs], nnx.Module],
    rngs: nnx.Rngs,
  ):
    self.mixer_norm = nnx.LayerNorm(config.width, rngs=rngs)
    self.mixer = make_mixer(config, rngs)
    self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
    self.mlp = MLP(config, config.width, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream after the block."""
    x_BTD += self.mixer(self.mixer_norm(x_BTD))
    return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Classifier(nnx.Module):
  """Patches with their positions, blocks, and a head on the mean.

  Weights start with a variance of one over the number of inputs, as is usual in
  Flax; those of the blocks with ``config.init_std`` times that deviation.
  """

  def __init__(
    self,
    config: Config,
    make_mixer: Callable[[Config, nnx.Rngs], nnx.Module],
    *,
    rngs: nnx.Rngs,
  ):
    pixels = digits.PIXELS_PER_PATCH
    self.patches = nnx.Linear(pixels, config.width, rngs=rngs)
    self.positions = nnx.Embed(digits.NUM_PATCHES, config.width, rngs=rngs)
    self.blocks = nnx.List(
      [Block(config, make_mixer, rngs) for _ in range(config.num_layers)]
    )
    self.final_norm = nnx.LayerNorm(config.width, rngs=rngs)
    self.head = nnx.Linear(config.width, digits.NUM_CLASSES, rngs=rngs)

  def __call__(self, patches_BTP: jax.Array) -> jax.Array:
    """Returns logits, shape (B, K)."""
    x_BTD = self.patches(patches_BTP) + self.positions.embedding
    for block in self.blocks:
      x_BTD = block(x_BTD)
    return self.head(self.final_norm(x_BTD).mean(1))


def _attention(config: Config, rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
  return nnx.MultiHeadAttention(
    config.num_heads,
    config.width,
    kernel_init=_kernel_init(config),
    decode=False,
    rngs=rngs,
  )


def _kernel_init(config: Config) -> nnx.initializers.Initializer:
  return nnx.initializers.variance_scaling(
    config.init_std**2, 'fan_in', 'truncated_normal'
  )


MIXERS: dict[str, Callable[[Config, nnx.Rngs], nnx.Module]] = {
  'vit': _attention,
  'mixer': PatchMLP,
}
"""What mixes patches, by the task of a run."""
