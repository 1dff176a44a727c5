"""Trains with Levanter and merit_optax: ``optimizer: {type: merit_optax}``."""

from collections.abc import Sequence
import dataclasses

import haliax as hax
import jax
import levanter.config
from levanter.main import train_lm
from levanter.optim.config import OptimizerConfig
import merit_by_name
import optax
from optax.contrib import MuonDimensionNumbers


def dimension_numbers(model):
  """Inputs are rows and outputs columns; layers and experts are batch axes."""

  def spec(array, rows, columns):
    index = array.axis_names.index
    return MuonDimensionNumbers(
      tuple(map(index, rows)), tuple(map(index, columns))
    )

  def visit(x):
    if isinstance(x, hax.nn.Linear | hax.nn.MoELinear):
      rows, columns = _names(x.In), _names(x.Out)
    elif isinstance(x, hax.nn.Embedding):
      rows, columns = _names(x.Vocab), _names(x.Embed)
    elif isinstance(x, hax.NamedArray):  # of a norm, for example
      layers = ('layer', 'layers')
      return spec(x, (), [name for name in x.axis_names if name not in layers])
    else:
      return None
    specs = {'weight': spec(x.weight, rows, columns)}
    if getattr(x, 'bias', None) is not None:
      specs['bias'] = spec(x.bias, (), columns)
    return dataclasses.replace(x, **specs)

  layers = hax.nn.Linear, hax.nn.MoELinear, hax.nn.Embedding, hax.NamedArray
  return jax.tree.map(visit, model, is_leaf=lambda x: isinstance(x, layers))


def _names(axes):
  axes = axes if isinstance(axes, Sequence) else (axes,)
  return [axis.name for axis in axes]


@OptimizerConfig.register_subclass('merit_optax')
@dataclasses.dataclass(frozen=True)
class MeritOptaxConfig(OptimizerConfig):
  """An optimizer by name, warmed up over 10 % of the steps, decayed to zero."""

  name: str = 'merit'
  learning_rate: float = 0.02  # For 400 steps.
  weight_decay: float = 0.01
  warmup: int | float = 0.1
  min_lr_ratio: float = 0.0
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-6
  max_grad_norm: float | None = 1.0

  def build(self, num_train_steps):
    """Returns the optimizer of a run of so many steps."""
    # Levanter's mask takes whole models only, and decays hidden matrices.
    mask = self.build_weight_decay_mask() if self.name == 'merit' else None

    def optimizer(learning_rate):
      optimizer = merit_by_name.make(
        self.name,
        learning_rate,
        weight_decay=self.weight_decay,
        mask=mask,
        b1=self.beta1,
        b2=self.beta2,
        eps=self.epsilon,
        # By the names of axes that Levanter's trainer maps to its mesh.
        shardings=hax.partitioning.pspec_for,
        weight_dimension_numbers=dimension_numbers,
      )
      if self.max_grad_norm is None:
        return optimizer
      clip = optax.clip_by_global_norm(self.max_grad_norm)
      return optax.chain(clip, optimizer)

    return optax.inject_hyperparams(optimizer)(
      learning_rate=self.lr_scheduler(num_train_steps)
    )


if __name__ == '__main__':
  levanter.config.main(train_lm.main)()
