"""Optimizers by name, with their defaults.

To add one, add it to :data:`OPTIMIZERS`: the flags, the checks and the
checkpoints follow.
"""

from collections.abc import Callable
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from examples.gpt2 import sharding
import merit_optax

# Of Adam's first moment beside Muon, whose own decays more slowly.
_OTHERS_B1 = 0.9
_GPT2_WIDTH = 768  # Of GPT-2 small.


def usual_init_std(width: int) -> float:
  """Returns GPT-2's 0.02, in proportion for widths below GPT-2 small's."""
  return _scaled_init_std(min(width, _GPT2_WIDTH), 1)


def _scaled_init_std(width: int, scale: float) -> float:
  return float(f'{scale * 0.02 * math.sqrt(_GPT2_WIDTH / width):.3g}')


class Optimizer(NamedTuple):
  """An optimizer that a run may choose."""

  # Takes the settings below by name; learning_rate and adam_rate as schedules.
  make: Callable[..., optax.GradientTransformation]
  # The settings that it has, each with its default: a value, or a function of
  # the run's settings with those before it. The flag of a setting that stands
  # here for other optimizers only is refused.
  defaults: dict[str, Any]
  # Standard deviation of the initial weights, by the width of the model.
  init_std: Callable[[int], float] = usual_init_std


def merit_arguments(
  *, clip_threshold: float, qkv: str, **settings: Any
) -> dict[str, Any]:
  """Returns the arguments of :func:`merit_optax.merit`."""
  return settings | {
    'clip_threshold': None if math.isinf(clip_threshold) else clip_threshold,
    'weight_dimension_numbers': _specs(qkv),
  }


def dimension_numbers(params: Any, qkv: str) -> Any:
  """Returns which axes of each parameter are rows and columns of a matrix.

  Query, key and value count as one matrix (``'fused'``), as three (``'split'``)
  or as three for each head (``'heads'``). Of groups of heads that share keys,
  the first heads of all count as a matrix, the second ones, and so on
  (``'split'``). The parameters are those of a model, or of one of its layers.
  """
  # The kernel's axes are (width, groups, heads + 2, features), after layers.
  columns = {'fused': (-3, -2, -1), 'split': (-3, -1), 'heads': (-1,)}[qkv]
  stacked = {r'^blocks/\D': 1}
  overrides = {
    r'/qkv/kernel$': MuonDimensionNumbers((-4,), columns),
    r'/qkv/bias$': MuonDimensionNumbers((), columns),
  }
  names = '\n'.join(
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, _ in jax.tree.leaves_with_path(params)
  )

  def matching(patterns: dict[str, Any]) -> dict[str, Any]:
    """Returns the patterns that match a parameter; others are refused."""
    return {k: x for k, x in patterns.items() if re.search(k, names, re.M)}

  return merit_optax.flax_dimension_numbers(
    params, stacked=matching(stacked), overrides=matching(overrides)
  )


def _specs(qkv: str) -> Any:
  return functools.partial(dimension_numbers, qkv=qkv)


def _merit(**settings: Any) -> optax.GradientTransformation:
  return merit_optax.merit(**merit_arguments(**settings))


def _merit_hidden(
  *, adam_rate: optax.Schedule, **settings: Any
) -> optax.GradientTransformation:
  adam = _adam(
    adam_rate, settings['b1'], settings['b2'], settings['weight_decay']
  )
  return merit_optax.partition_hidden(_merit(**settings), others=adam)


def _muon(
  learning_rate: optax.Schedule,
  weight_decay: float,
  b1: float,
  b2: float,
  adam_rate: optax.Schedule,
  qkv: str,
  dtype: str,
) -> optax.GradientTransformation:
  return merit_optax.muon(
    learning_rate,
    b1,
    weight_decay=weight_decay,
    others=_adam(adam_rate, _OTHERS_B1, b2, weight_decay),
    weight_dimension_numbers=_specs(qkv),
    ns_dtype=dtype,
    shardings=sharding.parameter_specs,
  )


def _muon_hyperball(
  learning_rate: optax.Schedule,
  weight_decay: float,
  b1: float,
  b2: float,
  adam_rate: optax.Schedule,
  qkv: str,
  dtype: str,
) -> optax.GradientTransformation:
  return merit_optax.muon_hyperball(
    learning_rate,
    b1,
    # Without a correction of its bias, as in examples/study.
    others=_adam(
      adam_rate, _OTHERS_B1, b2, weight_decay, bias_correction=False
    ),
    weight_dimension_numbers=_specs(qkv),
    ns_dtype=dtype,
    shardings=sharding.parameter_specs,
  )


def _adam(
  rate: optax.Schedule,
  b1: float,
  b2: float,
  weight_decay: float,
  *,
  bias_correction: bool = True,
) -> optax.GradientTransformation:
  """Returns Adam for other parameters than the hidden matrices."""
  return optax.chain(
    merit_optax.scale_by_adam(b1, b2, bias_correction=bias_correction),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(rate),
  )


def _starting_rate(name: Any) -> Callable[[Any], float | None]:
  return lambda config: merit_optax.starting_learning_rate(
    name, config.steps, config.model.width
  )


_MERIT: dict[str, Any] = dict(
  learning_rate=_starting_rate('merit'), weight_decay=0.01, b1=0.9, b2=0.95,
  clip_threshold=1.0, min_norm=0.0, qkv='fused',
)  # fmt: skip

OPTIMIZERS = {
  'merit': Optimizer(_merit, _MERIT),
  # The rate of Adam is that of examples/study.
  'merit-hidden': Optimizer(_merit_hidden, _MERIT | dict(adam_rate=0.004)),
  'adamw': Optimizer(
    optax.adamw,
    # The best at width 128 and 4 layers (of 0.7, 1 and 1.4 times that), and of
    # examples/study (width 64) at 305 and 610 steps.
    dict(
      learning_rate=lambda config: float(f'{1 / config.model.width:.2g}'),
      weight_decay=0.1, b1=0.9, b2=0.95,
    ),
  ),
  'lamb': Optimizer(
    optax.lamb,
    dict(
      learning_rate=_starting_rate('lamb'), weight_decay=0.01, b1=0.9, b2=0.95,
    ),
  ),
  'muon': Optimizer(
    _muon,
    dict(
      learning_rate=_starting_rate('muon'), weight_decay=0.1, b1=0.9, b2=0.95,
      adam_rate=lambda config: config.learning_rate, qkv='fused',
      dtype='float32',
    ),
  ),
  'muon-hyperball': Optimizer(
    _muon_hyperball,
    dict(
      learning_rate=_starting_rate('muon_hyperball'), weight_decay=0.0, b1=0.9,
      b2=0.95, adam_rate=lambda config: config.learning_rate / 3, qkv='fused',
      dtype='float32',
    ),
    # Norms are kept at twice the usual size.
    lambda width: _scaled_init_std(width, 2),
  ),
}  # fmt: skip
