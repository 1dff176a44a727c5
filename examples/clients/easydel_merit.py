"""Trains with EasyDeL and MERIT: `optimizer='merit'`."""

import dataclasses

from eformer.optimizers import OptimizerBuilder, register_optimizer
import jax.numpy as jnp

import merit_optax


def dimension_numbers(params):
  """Those of Flax; the scale of a norm is a kernel with one axis."""
  return merit_optax.flax_dimension_numbers(
    params, overrides={'norm/kernel$': None}
  )


@dataclasses.dataclass
class MeritConfig:
  """Hyper-parameters, as the `extra_optimizer_kwargs` of the trainer."""

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-6
  mu_dtype: jnp.dtype | None = None
  # Not `weight_decay`, which EasyDeL would add outside of the ratio.
  decay: float = 0.01


@register_optimizer('merit')
@dataclasses.dataclass
class MeritBuilder(OptimizerBuilder):
  """MERIT for the parameters of EasyDeL's modules."""

  config: MeritConfig

  def build(self, scheduler):
    """Returns the optimizer with a schedule of the learning rate."""
    return merit_optax.merit(
      scheduler,
      b1=self.config.b1,
      b2=self.config.b2,
      eps=self.config.eps,
      mu_dtype=self.config.mu_dtype,
      weight_decay=self.config.decay,
      weight_dimension_numbers=dimension_numbers,
    )
