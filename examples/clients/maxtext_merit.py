"""Trains with MaxText and merit_optax: ``opt_type=merit_optax.merit``."""

import functools

from absl import app
import jax
from maxtext.optimizers import optimizers
from maxtext.optimizers.muon import ShardedMuonDimensionNumbers
from maxtext.trainers.pre_train import train
from maxtext.utils.maxtext_muon_utils import (
  get_maxtext_muon_weight_dimension_numbers,
)
from maxtext.utils.muon_utils import transform_logic
import merit_by_name
from optax.contrib import MuonDimensionNumbers

_OPTION = 'opt_type=merit_optax.'
# Ends of the names of layers that are stacked along the second axis.
_SCANNED = ('layers', 'scanned_blocks', 'outside_pipeline')
_get_optimizer = optimizers.get_optimizer


def main(arguments):
  """Runs MaxText's ``train.py``, which takes the optimizer for its Adam."""
  for i, argument in enumerate(arguments):
    if argument.startswith(_OPTION):
      use(argument.removeprefix(_OPTION))
      arguments[i] = 'opt_type=adam_pax'
  train.main(arguments)


def use(name):
  """Puts an optimizer in the place of ``opt_type=adam_pax``."""

  def get_optimizer(config, learning_rate, model=None, mesh=None):
    optimizers.adam_pax = functools.partial(
      adam_pax, name, shardings(model, config, mesh)
    )
    return _get_optimizer(config, learning_rate, model, mesh)

  optimizers.get_optimizer = get_optimizer


def adam_pax(
  name, shardings, learning_rate, beta1, beta2, epsilon, epsilon_root,
  weight_decay, mask=None,
):  # fmt: skip
  """Returns an optimizer, from the arguments of MaxText's Adam."""
  del epsilon_root
  return merit_by_name.make(
    name,
    learning_rate,
    weight_decay=weight_decay,
    mask=mask,
    b1=beta1,
    b2=beta2,
    eps=epsilon,
    hidden=hidden,
    shardings=shardings,
    weight_dimension_numbers=dimension_numbers,
  )


def shardings(model, config, mesh):
  """Returns those of what MaxText gives to Muon, ``None`` for the others."""
  if model is None:  # In distillation.
    return None
  return jax.tree.map(
    lambda x: x.sharding,
    get_maxtext_muon_weight_dimension_numbers(model, config, mesh),
    is_leaf=lambda x: isinstance(x, ShardedMuonDimensionNumbers),
  )


def hidden(params):
  """Returns what MaxText gives to Muon, but for routers."""
  return jax.tree.map_with_path(
    lambda path, x: _matrix(path, x, include_routers=False) is not None, params
  )


def dimension_numbers(params):
  """Returns MaxText's for Muon, and those of embeddings, heads and vectors."""

  def spec(path, x):
    names = _names(path)
    is_scanned = any(name.endswith(_SCANNED) for name in names)
    axes = tuple(i for i in range(x.ndim) if i != 1 or not is_scanned)
    is_table = 'embedding' in names or 'logits_dense' in names
    return _matrix(path, x) or MuonDimensionNumbers(
      axes[:is_table], axes[is_table:]
    )

  return jax.tree.map_with_path(spec, params)


def _matrix(path, x, **settings):
  return transform_logic(_names(path), x.shape, **settings)


def _names(path):
  return tuple(x.key for x in path if isinstance(x, jax.tree_util.DictKey))


if __name__ == '__main__':
  app.run(main)
