"""The optimizers: a rule for hidden matrices, and Adam for all else."""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import optax

from examples.study.settings import Rule, Settings
import merit_optax

_B1, _B2, _EPS = 0.8, 0.95, 1e-6
_WARMUP_SHARE = 0.3
_ADAM_RATE = 0.004
# Of stacked layers, (L, inputs, outputs).
_MATRICES = optax.contrib.MuonDimensionNumbers((-2,), (-1,))


def _hidden_rule(rule: Rule, dtype: str) -> optax.GradientTransformation:
  """Returns the update of hidden matrices before the learning rate."""
  adam = optax.scale_by_adam(_B1, _B2, eps=_EPS)
  decay = optax.add_decayed_weights
  rules: dict[Rule, Callable[[], optax.GradientTransformation]] = {
    'merit': lambda: optax.chain(
      merit_optax.scale_by_adam(_B1, _B2, eps=_EPS),
      decay(0.01),
      merit_optax.scale_by_max_norm_trust_ratio(
        weight_dimension_numbers=_MATRICES
      ),
      merit_optax.elementwise_clip(1.0),
    ),
    'lamb': lambda: optax.chain(
      adam,
      decay(0.01),
      merit_optax.scale_by_l2_norm_trust_ratio(
        weight_dimension_numbers=_MATRICES
      ),
    ),
    'adamw': lambda: optax.chain(adam, decay(0.1)),
    'muon': lambda: optax.chain(
      merit_optax.scale_by_muon(
        beta=_B1, ns_dtype=dtype, weight_dimension_numbers=_MATRICES
      ),
      merit_optax.scale_by_shape(
        lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        weight_dimension_numbers=_MATRICES,
      ),
      decay(0.1),
    ),
  }
  return rules[rule]()


def make_optimizer(
  rule: Rule, rate: jax.typing.ArrayLike, settings: Settings
) -> optax.GradientTransformation:
  """Returns a rule for hidden matrices, and Adam for all else.

  Args:
    rule: Name of the rule.
    rate: Peak of its learning rate.
    settings: Steps and dtype.
  """
  warmup, end = _WARMUP_SHARE * settings.steps, settings.steps + 1

  def scale(peak: jax.typing.ArrayLike) -> optax.GradientTransformation:
    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
      nodes = jnp.array([0, warmup, end], jnp.float32)
      return peak * jnp.interp(count + 1, nodes, jnp.array([0.0, 1.0, 0.0]))

    return optax.scale_by_learning_rate(schedule)

  adam = optax.scale_by_adam(_B1, _B2, eps=_EPS)
  hidden = optax.chain(_hidden_rule(rule, settings.dtype), scale(rate))
  others = optax.chain(adam, scale(_ADAM_RATE))
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    merit_optax.partition_hidden(hidden, others),
  )
