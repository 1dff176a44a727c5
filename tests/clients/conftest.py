"""MERIT's rule in NumPy, to compare the optimizers of frameworks with."""

from collections.abc import Callable, Mapping
import importlib.util
import os
from pathlib import Path
import re
import subprocess
import sys
import types
from typing import Any

import jax
import numpy as np
import pytest

_RECIPES = Path(__file__).parents[2] / 'examples/clients'


def _first_update(
  param: np.ndarray,
  gradient: np.ndarray,
  layout: str,
  weight_decay: float,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-6,
) -> np.ndarray:
  """Returns the update of new moments at a learning rate of 1.

  Args:
    param: A parameter.
    gradient: Its gradient.
    layout: One letter per axis: r for rows, c for columns, b for a batch.
    weight_decay: Weight decay inside the ratio.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Added to the root of the second moment.
  """
  assert len(layout) == param.ndim, (layout, param.shape)
  w, g = param.astype(np.float64), gradient.astype(np.float64)
  z = (1 - b1) * g / (np.sqrt((1 - b2) * g**2) + eps) + weight_decay * w
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


def _named(tree: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a tree by their paths."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
    for path, leaf in leaves
  }


@pytest.fixture(scope='session')
def gradients_like() -> Callable[[Any], Any]:
  """Returns random gradients whose norm no framework clips."""

  def make(params: Any) -> Any:
    generator = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(params)
    size = sum(x.size for x in leaves)
    random = [generator.normal(size=x.shape) for x in leaves]
    return jax.tree.unflatten(
      structure, [np.float32(0.5 * x / size**0.5) for x in random]
    )

  return make


@pytest.fixture(scope='session')
def assert_merit() -> Callable[..., None]:
  """Checks the first updates of a tree, at a learning rate, leaf by leaf."""

  def check(
    updates: Any,
    params: Any,
    gradients: Any,
    layouts: Mapping[str, str],
    *,
    learning_rate: float,
    weight_decay: Mapping[str, float] | float,
    **settings: float,
  ) -> None:
    updates, params, gradients = map(_named, (updates, params, gradients))
    assert updates
    used = set()
    for name, update in updates.items():
      found = [x for x in layouts if re.search(x, name)]
      assert len(found) == 1, (name, params[name].shape, found)
      used.update(found)
      decay = (
        weight_decay
        if isinstance(weight_decay, float)
        else sum(x for y, x in weight_decay.items() if re.search(y, name))
      )
      expected = learning_rate * _first_update(
        params[name], gradients[name], layouts[found[0]], decay, **settings
      )
      np.testing.assert_allclose(
        update, expected, rtol=1e-4, atol=1e-7, err_msg=name
      )
    assert used == set(layouts)

  return check


@pytest.fixture(scope='session')
def load_recipe() -> Callable[[str], types.ModuleType]:
  """Imports a recipe."""

  def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name[:-3], _RECIPES / name)
    # Dataclasses and pickles look for it there.
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  return load


@pytest.fixture(scope='session')
def run_recipe() -> Callable[..., str]:
  """Runs a recipe as a user does, and returns what it writes."""

  def run(name: str, *arguments: str | Path, cwd: Path) -> str:
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
