"""Optimizers of the ablations that are other chains than MERIT."""

from typing import Any

import optax

from examples.gpt2.config import Config
from examples.gpt2.optim.optimizers import merit_settings
import merit_optax


def make_optimizer(arm: str, config: Config) -> optax.GradientTransformation:
  """Returns the optimizer of an arm, behind a clip of the gradient's norm.

  Args:
    arm: ``'l2'``: MERIT with l2 norms in the place of maxima.
      ``'decay_outside'``: MERIT whose weight decay is neither scaled by the
      ratio nor clipped, as in AdamW.
    config: Resolved settings, with ``optimizer='merit'``.
  """
  settings = merit_settings(config)
  decay = optax.add_decayed_weights(config.weight_decay, settings['mask'])
  clip = merit_optax.elementwise_clip(config.clip_threshold)
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    merit_optax.scale_by_adam(config.b1, config.b2),
    *_ARMS[arm](settings['weight_dimension_numbers'], decay, clip),
    optax.scale_by_learning_rate(settings['learning_rate']),
  )


def _l2(specs: Any, decay: Any, clip: Any) -> list[Any]:
  ratio = merit_optax.scale_by_l2_norm_trust_ratio(
    ratios=('weight', 'row', 'column'), weight_dimension_numbers=specs
  )
  return [decay, ratio, clip]


def _decay_outside(specs: Any, decay: Any, clip: Any) -> list[Any]:
  ratio = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=specs
  )
  return [ratio, clip, decay]


_ARMS = {'l2': _l2, 'decay_outside': _decay_outside}
