"""Optimizers of the study, as chains of parts."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
import optax

from examples.gpt2.config import RunConfig
from examples.gpt2.devices.sharding import path_name
from examples.gpt2.optim.optimizers import (
  OTHERS_B1,
  decay_mask,
  dimension_numbers,
  make_schedule,
  size_of_adam,
  with_clips,
)
import merit_optax

GROUPS = ('embeddings', 'head', 'vectors')
"""What is no hidden matrix: embeddings, an untied head, gains and biases."""


@dataclasses.dataclass(frozen=True)
class Chain:
  """A chain for hidden matrices, and an optimizer for all other parameters.

  The text of a chain, such as ``'muon > l2 > keep l2; adam 0.33'``, is a part
  of the keys of trials.

  Attributes:
    parts: Names of the parts, in order; those of ``PARTS``. The learning rate
      comes last, but before those of ``AFTER_RATE``.
    others: Optimizer of all other parameters, a name of ``OTHERS``; if empty,
      the parts update everything.
    others_rate: Its learning rate over that of the hidden matrices.
    rates: Learning rates of some of ``GROUPS`` in place of that, by name.

  Raises:
    ValueError: If a name is not accepted.
  """

  parts: tuple[str, ...]
  others: str = ''
  others_rate: float = 1.0
  rates: tuple[tuple[str, float], ...] = ()

  def __post_init__(self) -> None:
    _check('parts', self.parts, PARTS)
    _check('others', (self.others,), ('', *OTHERS))
    _check('rates', tuple(name for name, _ in self.rates), GROUPS)

  def __str__(self) -> str:
    text = ' > '.join(self.parts)
    if self.others:
      text += f'; {self.others} {self.others_rate}'
    return text + ''.join(f', {name} {rate}' for name, rate in self.rates)

  def make(self, config: RunConfig) -> optax.GradientTransformation:
    """Returns the optimizer, with the clips of the trainer's.

    Args:
      config: Resolved settings.
    """
    hidden = self._chain(self.parts, 1.0, config)
    if not self.others:
      return with_clips(hidden, config)
    own_rates = dict(self.rates)
    others = {
      group: self._chain(
        OTHERS[self.others], own_rates.get(group, self.others_rate), config
      )
      for group in GROUPS
    }
    return with_clips(
      optax.partition({'hidden': hidden, **others}, _labels), config
    )

  def _chain(
    self, names: tuple[str, ...], rate: float, config: RunConfig
  ) -> optax.GradientTransformation:
    """Returns the chain of some parts, with the learning rate among them."""
    schedule = make_schedule(config)
    parts = [PARTS[name](config) for name in names]
    after = [name for name in names if name in AFTER_RATE]
    parts.insert(
      len(parts) - len(after),
      optax.scale_by_learning_rate(lambda step: rate * schedule(step)),
    )
    return optax.chain(*parts)


def _check(
  field: str, names: tuple[str, ...], accepted: Mapping[str, Any] | tuple
) -> None:
  unknown = sorted(set(names) - set(accepted))
  if unknown:
    raise ValueError(
      f'{field} has unknown names: {", ".join(unknown)}; accepted are '
      f'{", ".join(accepted)}.'
    )


def _labels(params: Any) -> Any:
  """Returns a tree of labels: hidden matrices, and the groups of others."""

  def label(path: Any, _: Any, is_hidden: bool) -> str:
    name = path_name(path)
    if is_hidden:
      return 'hidden'
    if 'embedding' in name:
      return 'embeddings'
    return 'head' if name == 'head.kernel' else 'vectors'

  return jax.tree.map_with_path(
    label, params, merit_optax.hidden_matrices(params)
  )


def _with_specs(
  make: Callable[..., Any], **options: Any
) -> Callable[[RunConfig], optax.GradientTransformation]:
  """Returns a part that is told which axes of a parameter form a matrix."""
  return lambda config: make(
    **options,
    weight_dimension_numbers=functools.partial(
      dimension_numbers, qkv=config.qkv
    ),
  )


def _spectral_size(rows: int, columns: int) -> float:
  """Returns what gives an orthogonal matrix the size that Scion asks for."""
  return math.sqrt(columns / rows)


def _shrink(config: RunConfig) -> optax.GradientTransformation:
  """Decays everything, at the same rate whatever the rate of its group."""
  schedule = make_schedule(config)
  return optax.add_decayed_weights(
    lambda step: -config.weight_decay * schedule(step)
  )


_ALL_RATIOS = ('weight', 'row', 'column')
_l2_ratio = merit_optax.scale_by_l2_norm_trust_ratio
_max_ratio = merit_optax.scale_by_max_norm_trust_ratio
PARTS: dict[str, Callable[[RunConfig], optax.GradientTransformation]] = {
  'adam': lambda x: merit_optax.scale_by_adam(x.b1, x.b2),
  'adam corrected': lambda x: optax.scale_by_adam(x.b1, x.b2, eps=1e-6),
  'adam others': lambda x: merit_optax.scale_by_adam(OTHERS_B1, x.b2),
  'adam others corrected': lambda x: optax.scale_by_adam(
    OTHERS_B1, x.b2, eps=1e-6
  ),
  'muon': lambda x: _with_specs(merit_optax.scale_by_muon, beta=x.b1)(x),
  'muon momentum': lambda x: _with_specs(
    merit_optax.scale_by_muon, beta=x.b1, nesterov=False
  )(x),
  'accelerate 0.9': lambda _: merit_optax.add_acceleration(0.9),
  'accelerate 0.975': lambda _: merit_optax.add_acceleration(0.975),
  'accelerate 0.99': lambda _: merit_optax.add_acceleration(0.99),
  'momentum': lambda x: optax.ema(x.b1, debias=False),
  'lmo max': _with_specs(merit_optax.scale_by_lmo, norm='max'),
  'lmo row': _with_specs(merit_optax.scale_by_lmo, norm='row'),
  'lmo column': _with_specs(merit_optax.scale_by_lmo, norm='column'),
  'decay': lambda x: optax.add_decayed_weights(x.weight_decay, decay_mask(x)),
  'rms': _with_specs(merit_optax.scale_by_shape, factor=size_of_adam),
  'balance': lambda x: optax.chain(PARTS['lmo column'](x), optax.scale(0.2)),
  'spectral': _with_specs(merit_optax.scale_by_shape, factor=_spectral_size),
  'l2': _with_specs(_l2_ratio),
  'l2 calibrated': _with_specs(
    _l2_ratio, min_ratio=0.1, max_ratio=5.0, calibrate=True
  ),
  'row': _with_specs(_max_ratio, ratios=('weight', 'row')),
  'merit': _with_specs(_max_ratio, ratios=_ALL_RATIOS),
  'l2 merit': _with_specs(_l2_ratio, ratios=_ALL_RATIOS),
  'clip': lambda x: merit_optax.elementwise_clip(x.clip_threshold),
  'trace': lambda x: optax.trace(x.b1),
  'shrink': _shrink,
  'keep l2': _with_specs(merit_optax.keep_matrix_norms, norm='l2'),
}
"""Parts by name. Directions: ``adam`` (without bias correction), ``adam
corrected``, ``muon``, ``muon momentum`` (not Nesterov's), ``lmo max``, ``lmo
row`` and ``lmo column`` (of a ``momentum``); ``accelerate`` comes before one.
Sizes: ``rms``, that of Adam's updates; ``balance``, about that for each column;
``spectral``, Scion's; ``l2``, the ratio of the matrix, calibrated as in
OrScale-LM; in max-norms ``row``, the larger of matrix and row, and ``merit``,
the largest of matrix, row and column; ``l2 merit``, the same in l2 norms.
Others: ``decay``, ``clip``, and those of ``AFTER_RATE``."""

AFTER_RATE = ('trace', 'shrink', 'keep l2')
"""Parts after the learning rate: a momentum of steps, Scion's decay, and the
norm that is kept."""

OTHERS: dict[str, tuple[str, ...]] = {
  'adam': ('adam others',),
  'adam corrected': ('adam others corrected',),
  'lmo max': ('momentum', 'lmo max', 'shrink'),
  'lmo row': ('momentum', 'lmo row', 'shrink'),
}
"""Parts for all other parameters, by name."""
