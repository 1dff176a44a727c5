"""Trains with MaxText and MERIT: `opt_type=adam_pax`, which MERIT replaces."""

import re

from absl import app
import jax
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from optax.contrib import MuonDimensionNumbers

import merit_optax


def dimension_numbers(params):
  """Those of Flax; scanned layers are the second axis, after inputs."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  names = [
    jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves
  ]

  def present(patterns):
    return {
      pattern: value
      for pattern, value in patterns.items()
      if any(re.search(pattern, name) for name in names)
    }

  return merit_optax.flax_dimension_numbers(
    params,
    stacked=present({'/layers/': (1,)}),
    # Experts have shape (experts, layers, inputs, outputs).
    overrides=present({'(?i)moe[^/]*/w[io]': MuonDimensionNumbers(-2, -1)}),
  )


def merit(
  learning_rate, beta1, beta2, epsilon, epsilon_root, weight_decay, mask=None
):
  """MERIT with the arguments of MaxText's `adam_pax`."""
  return merit_optax.merit(
    learning_rate,
    b1=beta1,
    b2=beta2,
    eps=epsilon,
    eps_root=epsilon_root,
    weight_decay=weight_decay,
    mask=mask,
    weight_dimension_numbers=dimension_numbers,
  )


optimizers.adam_pax = merit

if __name__ == '__main__':
  app.run(train.main)
