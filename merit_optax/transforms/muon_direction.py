"""Muon's direction, with whole matrices on a mesh."""

import functools

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.dtypes import (
  cast_to_both,
  check_decay,
  check_real,
  corrected,
  moment_dtype,
  widen,
)
from merit_optax._internal.readings import record
from merit_optax._internal.trees import as_arrays, check_shapes
from merit_optax.matrices.dimension_numbers import (
  WeightDimensionNumbers,
  check_params,
  matrix_axes,
)
from merit_optax.matrices.shardings import (
  Shardings,
  check_layout,
  check_shardings,
)
from merit_optax.matrices.whole_matrices import map_matrices, where_multiplied
from merit_optax.transforms.newton_schulz import (
  Coefficients,
  Triple,
  check_coefficients,
  orthogonalize,
)


def scale_by_muon(
  ns_coeffs: Coefficients = 'jordan',
  ns_steps: int | None = None,
  beta: jax.typing.ArrayLike = 0.9,
  eps: jax.typing.ArrayLike = 1e-8,
  mu_dtype: jax.typing.DTypeLike | None = None,
  *,
  nesterov: bool = True,
  ns_dtype: jax.typing.DTypeLike | None = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  shardings: Shardings = None,
) -> optax.GradientTransformation:
  r"""Rescales updates according to the Muon algorithm.

  The momentum of each matrix is orthogonalized: its singular values all become
  about 1. For a gradient :math:`g` of a matrix at step :math:`t`,

  .. math::

    m &\leftarrow \beta m + (1 - \beta) g \\
    \hat m &= \beta \frac{m}{1 - \beta^{t + 1}}
      + (1 - \beta) \frac{g}{1 - \beta^t} \\
    X_0 &= \hat m / (\|\hat m\|_F + \varepsilon) \\
    X_{k + 1} &= (a_k I + b_k A_k + c_k A_k^2) X_k
      \quad \text{with} \quad A_k = X_k X_k^H

  where :math:`\beta` is ``beta``, :math:`\varepsilon` is ``eps``, and
  :math:`a_k`, :math:`b_k`, :math:`c_k` are ``ns_coeffs``. With
  ``nesterov=False``, :math:`\hat m = m / (1 - \beta^t)`. The update is the last
  :math:`X_k`. In float32 it equals that of :func:`optax.contrib.scale_by_muon`
  with the same coefficients up to rounding, and so does the state.

  All matrices of one shape are computed as one stack, whatever parameters they
  belong to. Where a matrix has more than 1.5 times as many columns as rows (or
  the reverse), the products are of its Gram matrix, which takes fewer FLOPs
  (two thirds of them at four times as many columns), as long as rounding errors
  stay small: if products have the full precision of float32 (on CPUs, or with
  ``jax.default_matmul_precision('highest')``), the Gram matrix is computed anew
  after two of five iterations. With fewer bits errors would not stay small.

  **On a mesh**, each device orthogonalizes whole matrices. Devices exchange
  pieces of matrices by all-to-alls, along each axis of the mesh that splits
  their rows or columns, and back. Axes that split layers or experts, or hold
  copies, send nothing. Updates lie as the momentum does. For this, it has to be
  known how parameters lie: types tell it on Explicit axes, ``shardings`` tells
  it on Auto axes. On Auto axes without ``shardings``, matrices are spread over
  the axes ``'fsdp'`` and ``'tensor'``, as far as the mesh has them, and the
  compiler chooses what it sends, which depends on its version: it may gather
  all matrices. Without these axes it may split each product, and send about 100
  times as much.

  Args:
    ns_coeffs: Coefficients of the iterations: three numbers for all of them, a
      sequence of three for each of them, or a name. ``'jordan'`` (3.4445,
      -4.7750, 2.0315) are those of Muon, after which singular values lie
      between about 0.7 and 1.2; ``'polar_express'`` those of Amsel et al.,
      which converge to 1; ``'dion'`` five from modded-nanogpt, as in
      :func:`optax.contrib.muon`.
    ns_steps: Number of iterations, >= 1; ``None`` for five. Of a name with
      coefficients for each iteration the last are repeated if there are more;
      ignored if ``ns_coeffs`` is a sequence of three for each.
    beta: Decay rate of the momentum, in [0, 1); 0.95 in Optax.
    eps: Added to the Frobenius norm, >= 0. With 0, a gradient that is zero
      becomes NaN.
    mu_dtype: dtype of the momentum; ``None`` for that of the parameter.
    nesterov: Whether to use Nesterov momentum.
    ns_dtype: dtype of the operands of products: float32, bfloat16 or float16;
      ``None`` for float32, or the dtype of the momentum if that is wider. Sums
      are taken in float32. As everywhere in JAX, products in float32 have the
      default precision of the platform (TensorFloat-32 on GPUs since Ampere,
      bfloat16 on TPUs), which :func:`jax.default_matmul_precision` sets.
      bfloat16 moves half the bytes on a mesh. float16 has eight times its
      precision, which small singular values need if there are many iterations.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`. A
      parameter that has only the weight-wise ratio there is one row.
    shardings: How parameters lie on a mesh with Auto axes: a tree like the
      parameters, or a prefix of it, of :class:`jax.sharding.PartitionSpec` or
      :class:`jax.sharding.NamedSharding`, such as what ``out_shardings`` of
      :func:`jax.jit` gets, or ``jax.tree.map(lambda x: x.sharding, params)``;
      or a function from parameters to such a tree. Specs need
      :func:`jax.set_mesh`. If only the state is split (ZeRO-1), give the
      shardings of its moments. Not read where all axes are Explicit.

  Returns:
    A :class:`optax.GradientTransformation` whose state is an
    :class:`optax.contrib.MuonState`. (Its ``ns_coeffs`` are not read.) Updates
    have the shape of the gradients and the dtype to which gradient and momentum
    promote.

  Raises:
    ValueError: If an argument is out of range, if ``mu_dtype`` or ``ns_dtype``
      is not accepted, or if the momentum would never decay in its dtype (by
      ``init`` if that dtype is the parameter's); by ``init`` if a dtype is
      given for complex parameters; by ``init`` and ``update`` if a spec does
      not fit its parameter, or if a parameter lacks its sharding; by ``update``
      if ``shardings`` do not fit the mesh.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes, or if it sees parameters that an Auto
      axis splits and no ``shardings`` are given.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_muon('polar_express', 8)
    >>> params = jnp.zeros((2, 2))
    >>> gradients = jnp.array([[0.0, -3.0], [0.1, 0.0]])
    >>> updates, _ = transform.update(gradients, transform.init(params))
    >>> print(updates.round(3) + 0.0)
    [[ 0. -1.]
     [ 1.  0.]]

  References:
    Jordan et al., `Muon: An optimizer for hidden layers in neural networks
    <https://kellerjordan.github.io/posts/muon>`_, 2024.

    Amsel et al., `The Polar Express: Optimal Matrix Sign Methods and Their
    Application to the Muon Algorithm <https://arxiv.org/abs/2505.16932>`_,
    2025.
  """
  coefficients = check_coefficients(ns_coeffs, ns_steps)
  beta = arguments.decay_rate('beta', beta)
  eps = arguments.at_least_zero('eps', eps)
  nesterov = arguments.boolean('nesterov', nesterov)
  mu_dtype = moment_dtype('mu_dtype', mu_dtype)
  ns_dtype = _products_dtype(ns_dtype)
  check_shardings(shardings)
  check_decay('beta', beta, mu_dtype)

  def init_fn(params: optax.Params) -> optax.contrib.MuonState:
    params = as_arrays(params)
    check_params(weight_dimension_numbers, params)
    axes = matrix_axes(weight_dimension_numbers, params)
    check_layout(params, shardings)
    where = functools.partial(where_multiplied, params, axes, shardings)
    leaves = jax.tree.leaves(params)
    record('products', params, [(where, i) for i in range(len(leaves))])
    check_decay('beta', beta, mu_dtype, params)
    check_real('mu_dtype', mu_dtype, params)
    check_real('ns_dtype', ns_dtype, params)
    return optax.contrib.MuonState(
      count=jnp.zeros([], jnp.int32),
      mu=optax.tree.zeros_like(params, dtype=mu_dtype),
      ns_coeffs=_as_stored(coefficients),
    )

  def update_fn(
    updates: optax.Updates,
    state: optax.contrib.MuonState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.contrib.MuonState]:
    updates = as_arrays(updates, 'updates')
    check_shapes(state.mu, updates)
    axes = matrix_axes(weight_dimension_numbers, updates)
    g, mu = jax.tree.map(widen, (updates, state.mu))
    count = optax.safe_increment(state.count)

    mu = optax.tree.update_moment(g, mu, beta, 1)
    new_state = optax.contrib.MuonState(
      count=count,
      mu=optax.tree.cast_like(mu, state.mu),
      ns_coeffs=state.ns_coeffs,
    )
    ahead = optax.safe_increment(count) if nesterov else count
    m = corrected(mu, beta, ahead)
    if nesterov:
      g = corrected(g, beta, count)
      m = optax.tree.update_moment(g, m, beta, 1)
    # In float16, momentum has to be normalized before it is rounded.
    moved = None if ns_dtype == jnp.float16 else ns_dtype
    m = optax.tree.cast(m, moved)
    u = map_matrices(
      functools.partial(_orthogonalize, coefficients, ns_dtype),
      m,
      axes,
      shardings,
      jnp.asarray(eps),
    )
    return jax.tree.map(cast_to_both, u, updates, state.mu), new_state

  return optax.GradientTransformation(init_fn, update_fn)


def _products_dtype(dtype: jax.typing.DTypeLike | None) -> jnp.dtype | None:
  """Returns the dtype of products, checked to be an accepted one."""
  accepted = {jnp.dtype(x) for x in ('float32', 'bfloat16', 'float16')}
  try:
    if dtype is None or jnp.dtype(dtype) in accepted:
      return None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    pass
  raise ValueError(
    f'ns_dtype must be None, float32, bfloat16 or float16, got {dtype!r}.'
  )


def _as_stored(coefficients: tuple[Triple, ...]) -> jax.Array:
  """Returns coefficients in the shape that optax stores them in."""
  is_constant = len(set(coefficients)) == 1
  return jnp.asarray(coefficients[0] if is_constant else coefficients)


def _orthogonalize(
  coefficients: tuple[Triple, ...],
  dtype: jnp.dtype | None,
  stack: jax.Array,
  eps: jax.Array,
) -> jax.Array:
  dtype = dtype or stack.dtype
  found: jax.Array = orthogonalize(stack, coefficients, eps, dtype)
  return found.astype(stack.dtype)
