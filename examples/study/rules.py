"""The optimizers: a rule for hidden matrices, and Adam for all else.

To add a rule, add an entry to ``RULES``: ``--rules`` then takes its name.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

import merit_optax

_B1, _B2, _EPS = 0.8, 0.95, 1e-6
_WARMUP_SHARE = 0.3
_ADAM_RATE = 0.004


def _matrices(params: optax.Params) -> Any:
  """Returns the axes of stacked layers, (L, inputs, *outputs)."""
  numbers = optax.contrib.MuonDimensionNumbers
  return jax.tree.map(lambda x: numbers((1,), (*range(2, x.ndim),)), params)


chain, decay = optax.chain, optax.add_decayed_weights
clip = merit_optax.elementwise_clip
adam = functools.partial(optax.scale_by_adam, _B1, _B2, eps=_EPS)
max_ratio = functools.partial(
  merit_optax.scale_by_max_norm_trust_ratio, weight_dimension_numbers=_matrices
)
l2_ratio = functools.partial(
  merit_optax.scale_by_l2_norm_trust_ratio, weight_dimension_numbers=_matrices
)


@dataclasses.dataclass(frozen=True)
class Rule:
  """How hidden matrices are updated.

  Attributes:
    middle_rate: Returns the middle of the learning rates to try, from the
      number of steps and the width.
    make: Returns the update before the learning rate, from the dtype of
      activations.
  """

  middle_rate: Callable[[int, int], float]
  make: Callable[[str], optax.GradientTransformation]


def by_steps(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates in proportion to the weights."""
  return lambda steps, width: factor / math.sqrt(steps)


def by_width(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates of Adam's size."""
  return lambda steps, width: factor / width


def _muon(dtype: str) -> optax.GradientTransformation:
  """Returns Muon with updates of Adam's size and a decay of 0.1."""
  muon = merit_optax.scale_by_muon(
    beta=_B1, ns_dtype=dtype, weight_dimension_numbers=_matrices
  )
  shape = merit_optax.scale_by_shape(
    lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    weight_dimension_numbers=_matrices,
  )
  return chain(muon, shape, decay(0.1))


def _merit(*parts: optax.GradientTransformation) -> Rule:
  """Returns MERIT with these parts as its ratio and its clip."""
  momentum = merit_optax.scale_by_adam(_B1, _B2, eps=_EPS)
  return Rule(by_steps(0.35), lambda _: chain(momentum, decay(0.01), *parts))


RULES = {
  'merit': _merit(max_ratio(), clip(1.0)),
  'muon': Rule(by_steps(0.5), _muon),
  'adamw': Rule(by_width(1.0), lambda _: chain(adam(), decay(0.1))),
  'lamb': Rule(
    by_steps(0.45), lambda _: chain(adam(), decay(0.01), l2_ratio())
  ),
  # The ablation.
  'merit-no-clip': _merit(max_ratio()),
  'merit-l2': _merit(l2_ratio(ratios=('weight', 'row', 'column')), clip(1.0)),
  'merit-weight-only': _merit(max_ratio(ratios=('weight',)), clip(1.0)),
  'merit-no-weight-floor': _merit(
    max_ratio(ratios=('row', 'column')), clip(1.0)
  ),
  # The threshold of the clip.
  'merit-clip-0.5': _merit(max_ratio(), clip(0.5)),
  'merit-clip-2': _merit(max_ratio(), clip(2.0)),
  'merit-clip-5': _merit(max_ratio(), clip(5.0)),
}
"""The rules by name."""


def make_optimizer(
  rule: str, rate: jax.typing.ArrayLike, steps: int, dtype: str
) -> optax.GradientTransformation:
  """Returns a rule for hidden matrices, and Adam for all else.

  Args:
    rule: Name of the rule.
    rate: Peak of its learning rate.
    steps: Number of steps.
    dtype: Of activations.
  """
  warmup, end = _WARMUP_SHARE * steps, steps + 1

  def scale(peak: jax.typing.ArrayLike) -> optax.GradientTransformation:
    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
      nodes = jnp.array([0, warmup, end], jnp.float32)
      return peak * jnp.interp(count + 1, nodes, jnp.array([0.0, 1.0, 0.0]))

    return optax.scale_by_learning_rate(schedule)

  hidden = chain(RULES[rule].make(dtype), scale(rate))
  others = chain(adam(), scale(_ADAM_RATE))
  return chain(
    optax.clip_by_global_norm(1.0),
    merit_optax.partition_hidden(hidden, others),
  )
