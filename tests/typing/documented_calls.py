"""Calls as the pages show them, and mistakes that a type checker has to find.

An ignored line that is no mistake is an error too (`warn_unused_ignores`).
"""

import functools
import re

import jax
import optax

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers
_FUSED = merit_optax.FusedDimensionNumbers(0, 1, 3)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)
_HIDDEN = re.compile('blocks/.*kernel')


def choose_hidden_matrices(params: optax.Params) -> None:
  """Chooses by expressions, trees and functions."""
  merit_optax.muon(0.02, hidden='blocks/.*kernel')
  merit_optax.muon(0.02, hidden=['attention', re.compile('mlp')])
  merit_optax.muon_hyperball(0.02, hidden={'mlp': True, 'head': False})
  merit_optax.adam_hyperball(0.02, hidden=_HIDDEN)
  merit_optax.partition_hidden(
    merit_optax.merit(0.02), optax.adam(0.004), hidden=lambda _: {'mlp': True}
  )
  merit_optax.hidden_matrices(params, jax.tree.map(lambda x: True, params))
  merit_optax.muon(0.02, hidden=3)  # type: ignore[arg-type]
  merit_optax.muon(0.02, hidden=True)  # type: ignore[arg-type]
  merit_optax.hidden_matrices(params, 0.1)  # type: ignore[arg-type]


def give_dimension_numbers(params: optax.Params) -> None:
  """Gives specs: one, a tree, a function, and matrices side by side."""
  merit_optax.merit(0.02, weight_dimension_numbers=_FUSED)
  merit_optax.merit(0.02, weight_dimension_numbers=_Spec(0, (1, 2)))
  merit_optax.muon(0.02, weight_dimension_numbers=_STACKED)
  merit_optax.scale_by_muon(weight_dimension_numbers={'c_attn': _FUSED})
  merit_optax.scale_by_lmo(
    'row', weight_dimension_numbers=merit_optax.flax_dimension_numbers
  )
  overrides = {'c_attn': _FUSED, 'scale': None}
  specs = merit_optax.flax_dimension_numbers(
    params,
    stacked={'blocks/': 1, re.compile('experts/'): (0, 1)},
    overrides=overrides,
    fused={'qkv/': 3, 'kv/': (64, 16)},
  )
  merit_optax.keep_matrix_norms(weight_dimension_numbers=specs)
  merit_optax.merit(0.02, weight_dimension_numbers=2)  # type: ignore[arg-type]
  merit_optax.flax_dimension_numbers(params, overrides={'q': 'rows'})  # type: ignore[dict-item]


def describe(params: optax.Params) -> str:
  """Returns the tables with and without an optimizer."""
  optimizer = optax.chain(optax.clip(1.0), merit_optax.muon(0.02))
  table: str = merit_optax.describe(params, optimizer)
  merit_optax.describe(params, 'muon')  # type: ignore[arg-type]
  return table + merit_optax.describe(params)
