"""The optimizers: a rule for hidden matrices beside Adam, or for everything.

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

from examples.gpt2.optimizers import dimension_numbers
import merit_optax

_B2 = 0.95
_ADAM_RATE = 0.004

# Queries, keys and values of all heads are one matrix.
matrices = functools.partial(dimension_numbers, qkv='fused')
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
    keeps_norms: Whether matrices keep their norms, as in Hyperball.
    decay_of_others: Weight decay of what Adam updates.
    fall: Returns the learning rate over its peak from the share of the fall
      that is left; a line by default.
  """

  middle_rate: Callable[[int, int], float]
  make: Callable[[Moments], optax.GradientTransformation]
  for_all: bool = False
  keeps_norms: bool = False
  decay_of_others: float = 0.0
  fall: Callable[[jax.Array], jax.Array] | None = None


def by_steps(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates in proportion to the weights."""
  return lambda steps, width: factor / math.sqrt(steps)


def by_width(factor: float) -> Callable[[int, int], float]:
  """Returns a middle rate for updates of Adam's size."""
  return lambda steps, width: factor / width


def max_ratio(**settings: Any) -> optax.GradientTransformation:
  """Returns MERIT's ratio, of the matrices of the model."""
  return merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=matrices, **settings
  )


def l2_ratio(**settings: Any) -> optax.GradientTransformation:
  """Returns LAMB's ratio, or MERIT's with l2 norms."""
  return merit_optax.scale_by_l2_norm_trust_ratio(
    weight_dimension_numbers=matrices, **settings
  )


def scale_by_neuron() -> optax.GradientTransformation:
  """Returns NorMuon's part: each column's own second moment divides it.

  A neuron is a column here, an output of its layer. Each matrix keeps its norm.
  """

  def mean_square(x: jax.Array, spec: Any) -> jax.Array:
    return jnp.mean(x**2, spec.reduction_axis, keepdims=True)

  def norm(x: jax.Array, spec: Any) -> jax.Array:
    axes = *spec.reduction_axis, *spec.output_axis
    return jnp.sqrt(jnp.sum(x**2, axes, keepdims=True))

  def init(params: optax.Params) -> Any:
    zeros = jax.tree.map(mean_square, params, matrices(params))
    return jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, zeros)

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    count, nu = optax.safe_increment(state[0]), state[1]
    specs = matrices(updates)
    nu = jax.tree.map(
      lambda v, x, spec: _B2 * v + (1 - _B2) * mean_square(x, spec),
      nu, updates, specs,
    )  # fmt: skip

    def scale(x: jax.Array, v: jax.Array, spec: Any) -> jax.Array:
      y = x / (jnp.sqrt(v / (1 - _B2**count)) + 1e-8)
      return y * norm(x, spec) / (norm(y, spec) + 1e-8)

    return jax.tree.map(scale, updates, nu, specs), (count, nu)

  return optax.GradientTransformation(init, update)


def cautious_decay(rate: float) -> optax.GradientTransformation:
  """Returns weight decay of weights that the update shrinks, and no others."""
  return optax.stateless(
    lambda updates, params: jax.tree.map(
      lambda u, w: u + rate * w * (u * w > 0), updates, params
    )
  )


def by_heads(params: Any) -> Any:
  """Returns the matrices of the model, with those of each head apart."""
  return merit_optax.flax_dimension_numbers(
    params,
    stacked={'^blocks/': 1},
    overrides={'qkv/kernel$': optax.contrib.MuonDimensionNumbers(-4, -1)},
  )


def _muon(
  dtype: str | None = None,
  coefficients: str = 'jordan',
  matrices: Callable[[Any], Any] = matrices,
  after: Callable[[], optax.GradientTransformation] | None = None,
  decay: Callable[[float], optax.GradientTransformation] = decay,
) -> Callable[[Moments], optax.GradientTransformation]:
  """Returns Muon with updates of Adam's size and a decay of 0.1."""

  def make(moments: Moments) -> optax.GradientTransformation:
    muon = merit_optax.scale_by_muon(
      coefficients,
      beta=moments.b1,
      ns_dtype=dtype or moments.dtype,
      weight_dimension_numbers=matrices,
    )
    shape = merit_optax.scale_by_shape(
      lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
      weight_dimension_numbers=matrices,
    )
    parts = [muon, after()] if after else [muon]
    return chain(*parts, shape, decay(0.1))

  return make


def _muon_hyperball(moments: Moments) -> optax.GradientTransformation:
  muon = merit_optax.scale_by_muon(
    beta=moments.b1,
    ns_dtype=moments.dtype,
    weight_dimension_numbers=matrices,
  )
  ratio = merit_optax.scale_by_l2_norm_trust_ratio(
    weight_dimension_numbers=matrices
  )
  return chain(muon, ratio)


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
_MUON_RATE, _BALL_RATE = by_steps(0.5), by_steps(1.25)
_MERIT = _merit(max_ratio(), clip(1.0))
_MERIT_L2 = _merit(l2_ratio(ratios=('weight', 'row', 'column')), clip(1.0))
_BALL = functools.partial(Rule, _BALL_RATE, _muon_hyperball, keeps_norms=True)

RULES = {
  'merit': Rule(_MERIT_RATE, _MERIT),
  'muon': Rule(_MUON_RATE, _muon()),
  'adamw': Rule(by_width(1.0), _adamw),
  'lamb': Rule(_LAMB_RATE, _lamb),
  # The paper's setting: one rule for all parameters.
  'merit-all': Rule(_MERIT_RATE, _MERIT, for_all=True),
  'lamb-all': Rule(_LAMB_RATE, _lamb, for_all=True),
  'adamw-all': Rule(by_width(1.0), _adamw, for_all=True),
  # What may help Muon.
  'muon-bfloat16': Rule(_MUON_RATE, _muon('bfloat16')),
  'muon-polar-express': Rule(_MUON_RATE, _muon(coefficients='polar_express')),
  'muon-heads': Rule(_MUON_RATE, _muon(matrices=by_heads)),
  'muon-neurons': Rule(_MUON_RATE, _muon(after=scale_by_neuron)),
  'muon-cautious': Rule(_MUON_RATE, _muon(decay=cautious_decay)),
  'muon-hyperball': _BALL(),
  'muon-hyperball-decay': _BALL(decay_of_others=0.1),
  'muon-hyperball-sqrt': _BALL(fall=lambda x: 1 - jnp.sqrt(1 - x)),
  # The ablation.
  'merit-no-clip': Rule(_MERIT_RATE, _merit(max_ratio())),
  'merit-l2': Rule(_MERIT_RATE, _MERIT_L2),
  'merit-l2-all': Rule(_MERIT_RATE, _MERIT_L2, for_all=True),
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
  chosen = RULES[rule]

  def scale(peak: jax.typing.ArrayLike) -> optax.GradientTransformation:
    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
      nodes = jnp.array([0, warmup * steps, steps + 1], jnp.float32)
      share = jnp.interp(count + 1, nodes, jnp.array([0.0, 1.0, 0.0]))
      if chosen.fall is not None:
        share = jnp.where(count + 1 < nodes[1], share, chosen.fall(share))
      return peak * share

    return optax.scale_by_learning_rate(schedule)

  own = chain(chosen.make(moments), scale(rate))
  if chosen.keeps_norms:
    own = chain(
      own,
      merit_optax.keep_matrix_norms(weight_dimension_numbers=matrices),
    )
  if not chosen.for_all:
    parts = [moments.adam()]
    if chosen.decay_of_others:
      parts.append(decay(chosen.decay_of_others))
    others = chain(*parts, scale(_ADAM_RATE))
    own = merit_optax.partition_hidden(own, others)
  return chain(optax.clip_by_global_norm(1.0), own)
