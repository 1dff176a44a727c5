"""Hyperball optimizers in one call: chains of this package's transforms."""

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.shardings import Shardings
from merit_optax.optimizers.hidden import (
  Hidden,
  partition_beside_adam,
  specs_or_names,
)
from merit_optax.transforms.adam import scale_by_adam
from merit_optax.transforms.keep_norms import keep_matrix_norms
from merit_optax.transforms.l2_trust_ratio import scale_by_l2_norm_trust_ratio
from merit_optax.transforms.muon_direction import scale_by_muon
from merit_optax.transforms.newton_schulz import Coefficients

# Adam's learning rate over that of the hidden matrices.
_ADAM_RATE = 1 / 3


def hyperball(
  direction: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Turns any direction into a Hyperball optimizer.

  For a matrix :math:`w` and its direction :math:`u`,

  .. math::

    w \leftarrow R \, n(w - \eta R \, n(u)) \quad
    \text{with} \quad n(x) = x / \|x\|_F

  where :math:`R` is the norm of the matrix, which never changes, and
  :math:`\eta` the learning rate: the size of a step as a fraction of the norm,
  or roughly the angle in radians by which it turns the matrix. It is the chain
  of ``direction``, :func:`merit_optax.scale_by_l2_norm_trust_ratio`,
  :func:`optax.scale_by_learning_rate` and
  :func:`merit_optax.keep_matrix_norms`.

  All parameters are taken as matrices, embeddings too; biases and scales take a
  step of the size of their own norm, which may change. For a whole model use
  :func:`merit_optax.muon_hyperball`, or an :func:`optax.partition`.

  Args:
    direction: Transform from gradients to directions, such as
      :func:`merit_optax.scale_by_muon` or :func:`optax.scale_by_adam`. How long
      they are does not matter. Not a whole optimizer, such as
      :func:`optax.adamw`: its updates point downhill already, and the loss
      would rise.
    learning_rate: Learning rate, or a schedule from steps to learning rates.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`. The
      direction needs its own.

  Returns:
    The corresponding :class:`optax.GradientTransformationExtraArgs`, whose
    ``update`` needs ``params``.

  Raises:
    ValueError: If an argument is out of range; by ``init`` and ``update`` if a
      spec does not fit its parameter, and by ``update`` if it is called without
      ``params``.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> optimizer = merit_optax.hyperball(optax.scale_by_lion(), 0.5)
    >>> params = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    >>> state = optimizer.init(params)
    >>> updates, _ = optimizer.update(jnp.ones((2, 2)), state, params)
    >>> print(f'{jnp.linalg.norm(params + updates):.4f}')
    5.0000

  References:
    Wen et al., `Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization <https://arxiv.org/abs/2606.16899>`_, 2026.
  """
  arguments.check_optimizer('direction', direction)
  return optax.chain(
    direction,
    scale_by_l2_norm_trust_ratio(
      weight_dimension_numbers=weight_dimension_numbers
    ),
    optax.scale_by_learning_rate(
      arguments.learning_rate('learning_rate', learning_rate)
    ),
    keep_matrix_norms(weight_dimension_numbers=weight_dimension_numbers),
  )


def muon_hyperball(
  learning_rate: optax.ScalarOrSchedule,
  beta: jax.typing.ArrayLike = 0.9,
  *,
  others: optax.GradientTransformation | None = None,
  hidden: Hidden = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  mu_dtype: jax.typing.DTypeLike | None = None,
  nesterov: bool = True,
  ns_coeffs: Coefficients = 'jordan',
  ns_steps: int | None = None,
  ns_dtype: jax.typing.DTypeLike | None = None,
  shardings: Shardings = None,
) -> optax.GradientTransformationExtraArgs:
  """Hyperball with Muon's direction, and Adam for all other parameters.

  Each step turns every hidden matrix by a fraction of its norm along Muon's
  direction, and keeps its norm: :func:`merit_optax.hyperball` of
  :func:`merit_optax.scale_by_muon`. Embeddings, heads, biases and scales take
  :func:`merit_optax.scale_by_adam`. There is no weight decay to tune.

  - The norm that a matrix has at first is that of the whole run: initialize
    matrices and embeddings with a standard deviation of about
    0.04 sqrt(768 / width), and output matrices of residual branches with that
    over sqrt(2 layers).
  - For a learning rate to start at, see
    :func:`merit_optax.starting_learning_rate`.
  - Put a clip of the gradient's norm in front, such as
    :func:`optax.clip_by_global_norm`, and use a warm-up.
  - :func:`merit_optax.describe` shows how each parameter is treated.

  Args:
    learning_rate: Learning rate of hidden matrices, or a schedule from steps to
      learning rates: the norm of a step over the norm of the matrix.
    beta: Decay rate of Muon's momentum, in [0, 1).
    others: Optimizer of all other parameters, such as ``optax.adamw(0.004)`` or
      an :func:`optax.partition` with a rate for each group; ``None`` for
      :func:`merit_optax.scale_by_adam` at a third of ``learning_rate``.
    hidden: Which parameters are hidden matrices: regular expressions, a tree or
      a function, see :func:`merit_optax.hidden_matrices`; ``None`` for its
      default.
    weight_dimension_numbers: Which axes of a hidden matrix are rows and
      columns, see :func:`merit_optax.scale_by_max_norm_trust_ratio`; a tree may
      hold specs for other parameters too. ``None`` for the two of a parameter
      that has two, and for those of
      :func:`merit_optax.flax_dimension_numbers` of one that has more. For
      scanned layers, pass that function with ``stacked``:
      ``functools.partial(merit_optax.flax_dimension_numbers,
      stacked={'blocks/': 1})``.
    mu_dtype: dtype of the momentum, and of the first moment of the default
      ``others``; ``None`` for the parameter's.
    nesterov: Whether Muon uses Nesterov momentum.
    ns_coeffs: Coefficients of the Newton-Schulz iterations, see
      :func:`merit_optax.scale_by_muon`.
    ns_steps: Number of iterations; ``None`` for five.
    ns_dtype: dtype of the operands of their products.
    shardings: How parameters lie on a mesh with Auto axes, such as
      ``jax.tree.map(lambda x: x.sharding, params)``, see
      :func:`merit_optax.scale_by_muon`.

  Returns:
    The corresponding :func:`merit_optax.partition_hidden`.

  Raises:
    ValueError: If an argument is out of range; by ``init`` and ``update`` if
      ``hidden``, a spec or a mask does not fit the parameters, and if a hidden
      matrix with more than two axes is not recognized; by ``update`` if it is
      called without ``params``.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.ones((50, 8)),
    ...     'mlp': {'kernel': jnp.eye(8), 'bias': jnp.zeros(8)},
    ... }
    >>> optimizer = merit_optax.muon_hyperball(0.07)
    >>> state = optimizer.init(params)
    >>> gradients = jax.tree.map(jnp.ones_like, params)
    >>> updates, state = optimizer.update(gradients, state, params)
    >>> kernel = params['mlp']['kernel'] + updates['mlp']['kernel']
    >>> print(f'{jnp.linalg.norm(kernel):.4f} {jnp.sqrt(8):.4f}')
    2.8284 2.8284

  References:
    Wen et al., `Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization <https://arxiv.org/abs/2606.16899>`_, 2026.

    Jordan et al., `Muon: An optimizer for hidden layers in neural networks
    <https://kellerjordan.github.io/posts/muon>`_, 2024.
  """
  specs = specs_or_names(weight_dimension_numbers)
  direction = scale_by_muon(
    ns_coeffs,
    ns_steps,
    beta,
    mu_dtype=mu_dtype,
    nesterov=nesterov,
    ns_dtype=ns_dtype,
    weight_dimension_numbers=specs,
    shardings=shardings,
  )
  hidden_optimizer = hyperball(
    direction, learning_rate, weight_dimension_numbers=specs
  )
  adam = scale_by_adam(mu_dtype=mu_dtype)
  rate = _adam_rate(learning_rate)
  return partition_beside_adam(
    hidden_optimizer, others, adam, rate, hidden, weight_dimension_numbers
  )


def adam_hyperball(
  learning_rate: optax.ScalarOrSchedule,
  b1: Number = 0.9,
  b2: Number = 0.95,
  eps: Number = 1e-6,
  *,
  bias_correction: bool = False,
  others: optax.GradientTransformation | None = None,
  hidden: Hidden = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  mu_dtype: jax.typing.DTypeLike | None = None,
  nu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Hyperball with Adam's direction, and Adam for all other parameters.

  As :func:`merit_optax.muon_hyperball`, with the direction of
  :func:`merit_optax.scale_by_adam` for hidden matrices. Its update takes about
  twice as long as Adam's on a GPU, and needs no products of matrices.

  Args:
    learning_rate: Learning rate of hidden matrices, or a schedule from steps to
      learning rates: the norm of a step over the norm of the matrix.
    b1: Decay rate of the first moment of all parameters, in [0, 1).
    b2: Decay rate of the second moment of all parameters, in [0, 1).
    eps: Added to the root of the second moment, >= 0; at zero, a zero gradient
      gives NaN.
    bias_correction: Whether moments are corrected for their start at zero.
    others: As in ``muon_hyperball``.
    hidden: As in ``muon_hyperball``.
    weight_dimension_numbers: As in ``muon_hyperball``.
    mu_dtype: dtype of the first moment; ``None`` for that of the parameter.
    nu_dtype: dtype of the second moment; ``None`` for that of the parameter.

  Returns:
    The corresponding :func:`merit_optax.partition_hidden`.

  Raises:
    ValueError: As ``muon_hyperball`` does.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {'embedding': jnp.ones((50, 8)), 'mlp': jnp.eye(8)}
    >>> optimizer = merit_optax.adam_hyperball(0.03)
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> print(f'{jnp.linalg.norm(params["mlp"] + updates["mlp"]):.4f}')
    2.8284

  References:
    Wen et al., `Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization <https://arxiv.org/abs/2606.16899>`_, 2026.
  """
  direction = scale_by_adam(
    b1,
    b2,
    eps,
    mu_dtype=mu_dtype,
    nu_dtype=nu_dtype,
    bias_correction=bias_correction,
  )
  hidden_optimizer = hyperball(
    direction,
    learning_rate,
    weight_dimension_numbers=specs_or_names(weight_dimension_numbers),
  )
  rate = _adam_rate(learning_rate)
  return partition_beside_adam(
    hidden_optimizer, others, direction, rate, hidden, weight_dimension_numbers
  )


def _adam_rate(learning_rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
  """Returns a third of a learning rate, or of a schedule."""
  rate = arguments.learning_rate('learning_rate', learning_rate)
  if callable(rate):
    return lambda step: _ADAM_RATE * rate(step)
  return _ADAM_RATE * rate
