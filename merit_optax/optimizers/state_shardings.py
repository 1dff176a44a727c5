"""Where the state of an optimizer lies on a mesh."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import optax

from merit_optax._internal.arguments import check_optimizer
from merit_optax._internal.trees import path_namer


def state_shardings(
  optimizer: optax.GradientTransformation, params: optax.Params
) -> Any:
  """Returns the shardings of an optimizer's state: moments lie as parameters.

  An array of the state whose path ends with the path of a parameter, and which
  has its shape, gets its sharding. All other arrays are copied to every device:
  counters, and what factored optimizers keep of rows and columns.

  Args:
    optimizer: Any optimizer.
    params: Tree of arrays on a mesh, or of ``jax.ShapeDtypeStruct`` with a
      ``sharding``.

  Returns:
    Tree like the state, of ``jax.sharding.NamedSharding``, to be used as
    ``out_shardings``: on a mesh of Auto axes, a plain ``jax.jit`` of ``init``
    copies all of the state to every device.

  Raises:
    ValueError: If ``optimizer`` is none, if a parameter has no
      ``jax.sharding.NamedSharding``, or if there is no parameter.

  Examples:
    >>> import jax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> mesh = jax.make_mesh((1,), ('fsdp',))
    >>> sharding = NamedSharding(mesh, P('fsdp'))
    >>> params = jax.device_put({'kernel': jnp.ones((4, 2))}, sharding)
    >>> optimizer = optax.scale_by_adam()
    >>> shardings = merit_optax.state_shardings(optimizer, params)
    >>> shardings.mu['kernel'] == sharding
    True
    >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  """
  check_optimizer('optimizer', optimizer)
  name = path_namer(params)
  by_path: dict[tuple[Any, ...], Any] = {}
  copied = None
  for path, param in jax.tree.leaves_with_path(params):
    sharding = getattr(param, 'sharding', None)
    if not isinstance(sharding, NamedSharding):
      raise ValueError(
        'params must lie on a mesh, each with a NamedSharding (jax.device_put '
        f'moves them), got {sharding} for {name(path)!r}.'
      )
    by_path[path] = param
    copied = NamedSharding(sharding.mesh, P())
  if copied is None:
    raise ValueError(f'params must hold an array, got {params!r}.')

  def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> Any:
    ends = (path[start:] for start in range(len(path) + 1))
    param = next((by_path[end] for end in ends if end in by_path), None)
    if param is None or param.shape != x.shape:
      return copied
    return param.sharding

  return jax.tree.map_with_path(place, jax.eval_shape(optimizer.init, params))
