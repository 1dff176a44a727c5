"""MERIT's rule in NumPy, to compare the optimizers of frameworks with."""

import importlib.util
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

_RECIPES = Path(__file__).parents[2] / 'examples/clients'


def _first_update(param, gradient, layout, weight_decay):
  """Returns the update of new moments at a learning rate of 1.

  The layout has a letter for each axis: r for rows, c for columns, b for a
  batch.
  """
  assert len(layout) == param.ndim, (layout, param.shape)
  w, g = param.astype(np.float64), gradient.astype(np.float64)
  z = 0.1 * g / (np.sqrt(0.05 * g**2) + 1e-6) + weight_decay * w
  # The whole matrix; if it has rows, then each column and each row.
  groups = ['rc', 'r', 'c'] if 'r' in layout else ['c']
  ratio = np.zeros_like(w)
  for group in groups:
    axes = tuple(i for i, letter in enumerate(layout) if letter in group)
    norms = (np.max(np.abs(x), axes, keepdims=True) for x in (w, z))
    with np.errstate(divide='ignore'):
      param_norm, update_norm = norms
      quotient = np.where(param_norm == 0, np.inf, param_norm / update_norm)
    ratio = np.maximum(ratio, quotient)
  return -np.clip(np.where(np.isinf(ratio), 1, ratio) * z, -1, 1)


def _named(tree):
  """Returns the arrays of a tree by their paths."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
    for path, leaf in leaves
  }


@pytest.fixture(scope='session')
def gradients_like():
  """Returns random gradients whose norm no framework clips."""

  def make(params):
    generator = np.random.default_rng(0)
    size = sum(x.size for x in jax.tree.leaves(params))
    return jax.tree.map(
      lambda x: np.float32(0.5 * generator.normal(size=x.shape) / size**0.5),
      params,
    )

  return make


@pytest.fixture(scope='session')
def assert_merit():
  """Checks the first updates of a tree, at a learning rate, leaf by leaf.

  Layouts belong to patterns of names. Weight decay is inside the ratio.
  """

  def check(
    updates, params, gradients, layouts, *, learning_rate, weight_decay,
    undecayed='(?!)',
  ):  # fmt: skip
    updates, params, gradients = map(_named, (updates, params, gradients))
    assert updates
    used = set()
    for name, update in updates.items():
      found = [x for x in layouts if re.search(x, name)]
      assert len(found) == 1, (name, params[name].shape, found)
      used.update(found)
      decay = 0.0 if re.search(undecayed, name) else weight_decay
      expected = learning_rate * _first_update(
        params[name], gradients[name], layouts[found[0]], decay
      )
      np.testing.assert_allclose(
        update, expected, rtol=1e-4, atol=1e-7, err_msg=name
      )
    assert used == set(layouts)

  return check


@pytest.fixture(scope='session')
def load_recipe():
  """Imports a recipe."""

  def load(name):
    spec = importlib.util.spec_from_file_location(name[:-3], _RECIPES / name)
    # Dataclasses and pickles look for it there.
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  return load


@pytest.fixture(scope='session')
def run_recipe():
  """Runs a recipe as a user does, and returns what it writes."""

  def run(name, *arguments, cwd):
    done = subprocess.run(
      [sys.executable, _RECIPES / name, *arguments],
      cwd=cwd,
      env={**os.environ, 'HF_HUB_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout

  return run
