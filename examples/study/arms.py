"""Optimizers of the study, written as chains of parts.

An arm is text such as ``'muon > merit > l2 > keep l2; adam 0.33'``: the parts
of the chain that updates the hidden matrices, and after the semicolon the
optimizer of all other parameters with its learning rate over that of the
hidden matrices. Without a semicolon the chain updates everything. The learning
rate comes last, but before a norm that is kept.
"""

from collections.abc import Callable
import functools
from typing import Any

import optax

from examples.gpt2.config import Config
from examples.gpt2.optim.optimizers import (
  OTHERS_B1,
  decay_mask,
  dimension_numbers,
  hidden_or_others,
  make_schedule,
  with_clips,
)
import merit_optax

_ALL_RATIOS = ('weight', 'row', 'column')


def make_optimizer(arm: str, config: Config) -> optax.GradientTransformation:
  """Returns the optimizer of an arm, with the clips of the trainer's.

  Args:
    arm: Chains of parts. Directions: ``adam`` (without bias correction),
      ``adam corrected``, ``muon``. Sizes: ``l2`` and ``max``, the ratio of the
      matrix; ``row``, the larger of that and the row's; ``merit``, the largest
      of matrix, row and column; ``l2 merit``, the same in l2 norms. Others:
      ``decay``, ``clip``, ``keep l2``, ``keep max``.
    config: Resolved settings.

  Raises:
    ValueError: If there is no part of such a name.
  """
  hidden, _, rest = arm.partition('; ')
  optimizer = _chain(hidden, config)
  if rest:
    name, rate = rest.rsplit(' ', 1)
    others = _chain(_OTHERS[name], config, float(rate))
    optimizer = optax.partition(
      {'hidden': optimizer, 'others': others},
      functools.partial(hidden_or_others, qkv=config.qkv),
    )
  return with_clips(optimizer, config)


_OTHERS = {'adam': 'adam others', 'merit': 'adam others > decay > merit > clip'}


def _chain(
  text: str, config: Config, rate: float = 1.0
) -> optax.GradientTransformation:
  """Returns the chain of some parts, with the learning rate among them."""
  names = text.split(' > ')
  unknown = sorted(set(names) - _PARTS.keys())
  if unknown:
    raise ValueError(
      f'the arm {text!r} has unknown parts: {", ".join(unknown)}; accepted are '
      f'{", ".join(_PARTS)}.'
    )
  schedule = make_schedule(config)
  parts = [_PARTS[name](config) for name in names]
  kept = sum(name.startswith('keep') for name in names)
  parts.insert(
    len(parts) - kept,
    optax.scale_by_learning_rate(lambda step: rate * schedule(step)),
  )
  return optax.chain(*parts)


def _with_specs(
  make: Callable[..., Any], **options: Any
) -> Callable[[Config], optax.GradientTransformation]:
  """Returns a part that is told which axes of a parameter form a matrix."""
  return lambda config: make(
    **options,
    weight_dimension_numbers=functools.partial(
      dimension_numbers, qkv=config.qkv
    ),
  )


_l2_ratio = merit_optax.scale_by_l2_norm_trust_ratio
_max_ratio = merit_optax.scale_by_max_norm_trust_ratio
_PARTS: dict[str, Callable[[Config], optax.GradientTransformation]] = {
  'adam': lambda x: merit_optax.scale_by_adam(x.b1, x.b2),
  'adam corrected': lambda x: optax.scale_by_adam(x.b1, x.b2, eps=1e-6),
  'adam others': lambda x: merit_optax.scale_by_adam(OTHERS_B1, x.b2),
  'muon': lambda x: _with_specs(optax.contrib.scale_by_muon, beta=x.b1)(x),
  'decay': lambda x: optax.add_decayed_weights(x.weight_decay, decay_mask(x)),
  'l2': _with_specs(_l2_ratio),
  'max': _with_specs(_max_ratio, ratios=('weight',)),
  'row': _with_specs(_max_ratio, ratios=('weight', 'row')),
  'merit': _with_specs(_max_ratio, ratios=_ALL_RATIOS),
  'l2 merit': _with_specs(_l2_ratio, ratios=_ALL_RATIOS),
  'clip': lambda x: merit_optax.elementwise_clip(x.clip_threshold),
  'keep l2': _with_specs(merit_optax.keep_matrix_norms, norm='l2'),
  'keep max': _with_specs(merit_optax.keep_matrix_norms, norm='max'),
}
