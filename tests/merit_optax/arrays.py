"""Arrays, runs of optimizers and an oracle that tests share."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import inspect
import math
import re
from typing import Any, NamedTuple

import chex
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
import numpy as np
import optax

import merit_optax

# Matrices of numbers whose squares float32 holds, and of zeros.
_SIZES = st.floats(2.0**-10, 2.0**10, width=32)
MATRICES = hnp.arrays(
  np.float32,
  (3, 4),
  elements=st.one_of(st.just(0.0), _SIZES, _SIZES.map(lambda x: -x)),
)


# What a function needs besides parameters, by its name and by an argument's.
_HEADS = {'w': merit_optax.AttentionHeads(-1)}
_QUERY = jnp.ones((1, 2, 3, 4))
NEEDED: dict[str, dict[str, Any]] = {
  'attention_statistics': {'query': _QUERY, 'key': _QUERY},
  'flax_dimension_numbers': {'params': {'kernel': jnp.ones((2, 2))}},
  'hyperball': {'direction': optax.identity()},
  'partition_hidden': {'optimizer': optax.sgd(0.1), 'others': optax.sgd(0.1)},
  'qk_clip': {'threshold': 1.0, 'query': _HEADS, 'key': _HEADS},
  'scale_by_lmo': {'norm': 'row'},
  'scale_by_shape': {'factor': max},
  'starting_learning_rate': {'optimizer': 'merit', 'steps': 400},
}
_NEEDED_ANYWHERE = {
  'learning_rate': 0.1,
  'hidden': lambda params: jax.tree.map(lambda x: len(x.shape) > 1, params),
}


def call(name: str, **given: Any) -> Any:
  """Calls a public function, with what it needs besides what is given."""
  function = getattr(merit_optax, name)
  taken = inspect.signature(function).parameters
  everywhere = {k: v for k, v in _NEEDED_ANYWHERE.items() if k in taken}
  return function(**everywhere | NEEDED.get(name, {}) | given)


def transforms() -> list[str]:
  """Returns the names of all public functions that return a transform."""
  kinds = optax.GradientTransformation, optax.GradientTransformationExtraArgs
  return [
    name
    for name in merit_optax.__all__
    if inspect.signature(getattr(merit_optax, name)).return_annotation in kinds
  ]


def normal(seed: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
  """Returns random numbers, the same for each seed."""
  generator = np.random.default_rng(seed)
  numbers = generator.normal(size=shape)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    numbers = numbers + 1j * generator.normal(size=shape)
  return jnp.asarray(numbers, dtype)


@contextlib.contextmanager
def enable_x64(is_enabled: bool = True) -> Iterator[None]:
  """Enables float64, as `jax.enable_x64` does from jax 0.8 on."""
  jax.config.update('jax_enable_x64', is_enabled)
  try:
    yield
  finally:
    jax.config.update('jax_enable_x64', False)


class Step(NamedTuple):
  """What an optimizer gives in a step, and the parameters after it."""

  updates: Any
  state: Any
  params: Any


def run(
  optimizer: optax.GradientTransformation, params: Any, gradients: Iterable[Any]
) -> Iterator[Step]:
  """Yields the steps of an optimizer, under jit."""

  @jax.jit
  def step(params: Any, state: Any, gradient: Any) -> Step:
    updates, state = optimizer.update(gradient, state, params)
    return Step(updates, state, optax.apply_updates(params, updates))

  state = jax.jit(optimizer.init)(params)
  for gradient in gradients:
    found = step(params, state, gradient)
    params, state = found.params, found.state
    yield found


def make_mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
  """Returns a mesh whose axes have these names and sizes."""
  types = (axis_type,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def step_function(optimizer: optax.GradientTransformation) -> Callable:
  """Returns the step from parameters, state and gradient to the first two."""

  def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return step


def collectives(text: str) -> list[tuple[str, list[int]]]:
  """Returns the collectives of an HLO text: name, and sizes of their arrays."""
  names = 'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter'
  found = re.findall(rf'= (.*?) ({names}|ragged-\S+)(?:-start)?\(', text)
  return [
    (
      name,
      [
        math.prod(int(size) for size in shape.split(',') if size)
        for shape in re.findall(r'\w\[([\d,]*)\]', types)
      ],
    )
    for types, name in found
  ]


def norms(x: Any, axis: Any, kind: str = 'max') -> np.ndarray:
  """Returns norms in float64, 'max' or 'l2', along axes that keep size 1."""
  sizes = np.abs(np.asarray(x)).astype(np.float64)
  if kind == 'max':
    return np.max(sizes, axis=axis, keepdims=True)
  return np.sqrt(np.sum(sizes**2, axis=axis, keepdims=True))


def oracle_ratios(
  update: Any,
  param: Any,
  rows: tuple[int, ...] = (0,),
  columns: tuple[int, ...] = (1,),
  kind: str = 'max',
  min_norm: float = 0.0,
  trust_coefficient: float = 1.0,
  eps: float = 0.0,
) -> dict[str, np.ndarray]:
  """Returns the trust ratios of Algorithm 1, in float64.

  Each has the shape of the update, and is infinite where a norm is zero. There
  is a matrix for each index of other axes.
  """
  axes = {'weight': rows + columns}
  if rows:
    axes |= {'row': columns, 'column': rows}
  ratios = {}
  for name, axis in axes.items():
    of_z, of_w = (
      np.maximum(norms(x, axis, kind), min_norm) for x in (update, param)
    )
    is_zero = (of_z == 0) | (of_w == 0)
    ratio = trust_coefficient * of_w / np.where(is_zero, 1, of_z + eps)
    ratios[name] = np.broadcast_to(
      np.where(is_zero, np.inf, ratio), np.shape(update)
    )
  return ratios


def oracle_scale(
  update: Any,
  ratios: Iterable[np.ndarray],
  min_ratio: float | None = None,
  max_ratio: float | None = None,
) -> np.ndarray:
  """Returns an update times the largest of its ratios, within bounds.

  The ratio is the lower bound where a norm is zero, or 1 if there is none.
  """
  ratio = np.max(list(ratios), axis=0)
  ratio = np.where(np.isinf(ratio), min_ratio or 1, ratio)
  return np.clip(ratio, min_ratio, max_ratio) * np.asarray(update, np.float64)


def orthogonal(m: np.ndarray) -> np.ndarray:
  """Returns a matrix after five Newton-Schulz iterations, in float64."""
  x = m / (np.linalg.norm(m) + 1e-8)
  x = x.T if x.shape[0] > x.shape[1] else x
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x.T if m.shape[0] > m.shape[1] else x


def muon_directions(gradients: Iterable[Any], beta: float = 0.9) -> Iterator:
  """Yields Muon's updates, as Optax corrects Nesterov's momentum."""
  m = 0
  for t, gradient in enumerate(gradients, 1):
    g = np.asarray(gradient, np.float64)
    m = beta * m + (1 - beta) * g
    ahead = beta * m / (1 - beta ** (t + 1))
    yield orthogonal(ahead + (1 - beta) * g / (1 - beta**t))


def assert_same_bits(actual: Any, expected: Any) -> None:
  """Compares trees, wherever their arrays lie."""
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  paths = jax.tree.leaves_with_path(actual)
  for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path
