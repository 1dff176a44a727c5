"""Gives EasyDeL merit_optax: ``optimizer='merit_optax'`` after an import."""

import dataclasses

from eformer.optimizers import OptimizerBuilder, register_optimizer
import merit_by_name

import merit_optax


def dimension_numbers(params):
  """Returns Flax's; the scale of a norm is a kernel with one axis."""
  return merit_optax.flax_dimension_numbers(
    params, overrides={'norm/kernel$': None}
  )


@dataclasses.dataclass
class MeritOptaxConfig:
  """The ``extra_optimizer_kwargs`` of the trainer."""

  name: str = 'merit'
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-6
  # Not `weight_decay`, which EasyDeL would add after the optimizer.
  decay: float = 0.01


@register_optimizer('merit_optax')
@dataclasses.dataclass
class MeritOptaxBuilder(OptimizerBuilder):
  """An optimizer by name, for the parameters of EasyDeL's modules."""

  config: MeritOptaxConfig

  def build(self, scheduler):
    """Returns the optimizer with a schedule of the learning rate."""
    return merit_by_name.make(
      self.config.name,
      scheduler,
      weight_decay=self.config.decay,
      b1=self.config.b1,
      b2=self.config.b2,
      eps=self.config.eps,
      weight_dimension_numbers=dimension_numbers,
    )
