"""Our own loop, to compare the optimizers that frameworks make with."""

import collections
import importlib
import math
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers
import pytest

import merit_optax

_RECIPES = Path(__file__).parents[2] / 'examples/clients'
_STEPS = 3


def _arrays(tree):
  """Returns the arrays of a tree by their paths."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
    for path, leaf in leaves
  }


def _plain(array, layout):
  """Returns matrices (batch, rows, columns), or vectors (batch, features)."""
  assert len(layout) == array.ndim, (layout, array.shape)
  order = sorted(range(array.ndim), key=lambda i: 'brc'.index(layout[i]))
  groups = 'brc' if 'r' in layout else 'bc'
  shape = [
    math.prod(n for n, x in zip(array.shape, layout, strict=True) if x == group)
    for group in groups
  ]
  return array.transpose(order).reshape(shape)


def _expected(name, learning_rate, weight_decay, mask, hidden, specs):
  """Returns the library's optimizer of plain arrays."""
  merit = merit_optax.merit(
    learning_rate,
    weight_decay=weight_decay,
    mask=mask,
    weight_dimension_numbers=specs,
  )
  if name == 'merit':
    return merit
  if name == 'merit_hidden':
    adam = optax.adam(learning_rate, b2=0.95, eps=1e-6)
    return merit_optax.partition_hidden(
      merit, others=optax.chain(adam, optax.scale(0.2)), hidden=hidden
    )
  decay = {'weight_decay': weight_decay} if name == 'muon' else {}
  return getattr(merit_optax, name)(
    learning_rate,
    hidden=hidden,
    weight_dimension_numbers=specs,
    **decay,
  )


def _train(optimizer, params, each_gradient):
  """Returns the sum of the updates of some steps."""
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  start = params
  for gradients in each_gradient:
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, start)


@pytest.fixture(params=['merit', 'merit_hidden', 'muon', 'muon_hyperball'])
def name(request):
  """The names of the recipes' optimizers."""
  return request.param


@pytest.fixture(scope='session')
def assert_like_our_loop():
  """Checks some steps of a framework's optimizer, by name.

  Layouts belong to patterns of parameters' names, with a letter for each axis:
  r for rows, c for columns, b for a batch. Those in ``others`` are no hidden
  matrices, as are vectors, and those in ``undecayed`` have no weight decay.
  """

  def check(
    optimizer, name, params, layouts, *, learning_rate, weight_decay,
    others, undecayed='(?!)',
  ):  # fmt: skip
    generator = np.random.default_rng(0)
    size = sum(x.size for x in jax.tree.leaves(params))
    # Their norm is so small that no framework clips them.
    each_gradient = [
      jax.tree.map(
        lambda x: np.float32(0.5 * generator.normal(size=x.shape) / size**0.5),
        params,
      )
      for _ in range(_STEPS)
    ]
    arrays = _arrays(params)
    found = {
      path: [layout for x, layout in layouts.items() if re.search(x, path)]
      for path in arrays
    }
    assert all(len(x) == 1 for x in found.values()), {
      path: (arrays[path].shape, x) for path, x in found.items() if len(x) != 1
    }
    assert all(any(re.search(x, y) for y in found) for x in layouts)

    def plain(tree):
      return {x: _plain(y, found[x][0]) for x, y in _arrays(tree).items()}

    is_matrix = {path: 'r' in x[0] for path, x in found.items()}
    changes = _train(
      _expected(
        name,
        learning_rate,
        weight_decay,
        {x: not re.search(undecayed, x) for x in found},
        {x: y and not re.search(others, x) for x, y in is_matrix.items()},
        {
          x: MuonDimensionNumbers((1,), (2,))
          if y
          else MuonDimensionNumbers((), (1,))
          for x, y in is_matrix.items()
        },
      ),
      plain(params),
      map(plain, each_gradient),
    )
    made = plain(_train(optimizer, params, each_gradient))
    assert made.keys() == changes.keys()
    for path, change in changes.items():
      np.testing.assert_allclose(
        made[path], change, rtol=0, atol=1e-3 * np.abs(change).max(),
        err_msg=path,
      )  # fmt: skip

  return check


@pytest.fixture(scope='session')
def load_recipe():
  """Imports a recipe as a user does who has its folder in the path."""
  sys.path.insert(0, str(_RECIPES))
  yield importlib.import_module
  sys.path.remove(str(_RECIPES))


@pytest.fixture(scope='session')
def run_recipe():
  """Runs a recipe as a user does, and returns what it writes."""

  def run(name, *arguments, cwd, **variables):
    done = subprocess.run(
      [sys.executable, _RECIPES / name, *arguments],
      cwd=cwd,
      env=os.environ
      | {'HF_HUB_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu', **variables},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout

  return run


@pytest.fixture(scope='session')
def collectives():
  """Counts the collectives of the first program of XLA's dump in a folder."""

  def count(folder):
    program = min(folder.glob('*after_optimizations.txt'))
    return collections.Counter(
      re.findall(
        r' (all-\w[\w-]*|reduce-scatter|collective-permute)\(',
        program.read_text(),
      )
    )

  return count
