"""The optimizers: a rule for hidden matrices beside Adam, or for everything.

To add a rule, add an entry to ``RULES``: ``--rules`` then takes its name.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples import pretrain
import merit_optax

_B2 = 0.95
_ADAM_RATE = 0.004

chain, decay = optax.chain, optax.add_decayed_weights
clip = merit_optax.elementwise_clip


@dataclasses.dataclass(frozen=True)
class Moments:
  """What all rules of a comparison share.

  Attributes:
    b1: Decay rate of the first moment, and of Muon's momentum.
    eps: What is added to the root of the second moment.
    dtype: dtype of the products of Muon.
  """

  b1: float
  eps: float
  dtype: str

  def adam(self) -> optax.GradientTransformation:
    """Returns Adam's direction."""
    return optax.scale_by_adam(self.b1, _B2, eps=self.eps)

  def merit(self) -> optax.GradientTransformation:
    """Returns MERIT's direction before the ratio, without bias correction."""
    return merit_optax.scale_by_adam(self.b1, _B2, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class Rule:
  """How parameters are updated.

  Attributes:
    middle_rate: Returns the middle of the learning rates to try, from the
      number of steps and the width.
    make: Returns the update before the learning rate.
    for_all: Whether it updates all parameters. Otherwise it updates hidden
      matrices, and Adam all else.
  """

  middle_rate: Callable[[int, int], float]
  make: Callable[[Moments], optax.GradientTransformation]
  for_all: bool = False


def by_steps(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates in proportion to the weights."""
  return lambda steps, width: factor / math.sqrt(steps)


def by_width(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates of Adam's size."""
  return lambda steps, width: factor / width


def max_ratio(**settings: Any) -> optax.GradientTransformation:
  """Returns MERIT's ratio, of the matrices of the model."""
  return merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=pretrain.matrices, **settings
  )


def l2_ratio(**settings: Any) -> optax.GradientTransformation:
  """Returns LAMB's ratio, or MERIT's with l2 norms."""
  return merit_optax.scale_by_l2_norm_trust_ratio(
    weight_dimension_numbers=pretrain.matrices, **settings
  )


def _muon(moments: Moments) -> optax.GradientTransformation:
  """Returns Muon with updates of Adam's size and a decay of 0.1."""
  muon = merit_optax.scale_by_muon(
    beta=moments.b1,
    ns_dtype=moments.dtype,
    weight_dimension_numbers=pretrain.matrices,
  )
  shape = merit_optax.scale_by_shape(
    lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    weight_dimension_numbers=pretrain.matrices,
  )
  return chain(muon, shape, decay(0.1))


def _adamw(moments: Moments) -> optax.GradientTransformation:
  return chain(moments.adam(), decay(0.1))


def _lamb(moments: Moments) -> optax.GradientTransformation:
  return chain(moments.adam(), decay(0.01), l2_ratio())


def _merit(
  *parts: optax.GradientTransformation,
) -> Callable[[Moments], optax.GradientTransformation]:
  """Returns MERIT with these parts as its ratio and its clip."""
  return lambda moments: chain(moments.merit(), decay(0.01), *parts)


_MERIT_RATE, _LAMB_RATE = by_steps(0.35), by_steps(0.45)
_MERIT = _merit(max_ratio(), clip(1.0))

RULES = {
  'merit': Rule(_MERIT_RATE, _MERIT),
  'muon': Rule(by_steps(0.5), _muon),
  'adamw': Rule(by_width(1.0), _adamw),
  'lamb': Rule(_LAMB_RATE, _lamb),
  # The paper's setting: one rule for all parameters.
  'merit-all': Rule(_MERIT_RATE, _MERIT, for_all=True),
  'lamb-all': Rule(_LAMB_RATE, _lamb, for_all=True),
  'adamw-all': Rule(by_width(1.0), _adamw, for_all=True),
  # The ablation.
  'merit-no-clip': Rule(_MERIT_RATE, _merit(max_ratio())),
  'merit-l2': Rule(
    _MERIT_RATE,
    _merit(l2_ratio(ratios=('weight', 'row', 'column')), clip(1.0)),
  ),
  'merit-weight-only': Rule(
    _MERIT_RATE, _merit(max_ratio(ratios=('weight',)), clip(1.0))
  ),
  'merit-no-weight-floor': Rule(
    _MERIT_RATE, _merit(max_ratio(ratios=('row', 'column')), clip(1.0))
  ),
}
"""The rules by name."""


def make_optimizer(
  rule: str,
  rate: jax.typing.ArrayLike,
  steps: int,
  warmup: float,
  moments: Moments,
) -> optax.GradientTransformation:
  """Returns a rule for all parameters, or for hidden matrices beside Adam.

  Args:
    rule: Name of the rule.
    rate: Peak of its learning rate.
    steps: Number of steps.
    warmup: Share of them in which the learning rate rises.
    moments: What all rules share.
  """

  def scale(peak: jax.typing.ArrayLike) -> optax.GradientTransformation:
    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
      nodes = jnp.array([0, warmup * steps, steps + 1], jnp.float32)
      return peak * jnp.interp(count + 1, nodes, jnp.array([0.0, 1.0, 0.0]))

    return optax.scale_by_learning_rate(schedule)

  own = chain(RULES[rule].make(moments), scale(rate))
  if not RULES[rule].for_all:
    others = chain(moments.adam(), scale(_ADAM_RATE))
    own = merit_optax.partition_hidden(own, others)
  return chain(optax.clip_by_global_norm(1.0), own)
