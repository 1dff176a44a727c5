"""Muon in one call: a chain for hidden matrices, and Adam for all others."""

import math

import jax
import optax

from merit_optax._internal import arguments
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.shardings import Shardings
from merit_optax.optimizers.hidden import (
  Hidden,
  partition_beside_adam,
  specs_or_names,
)
from merit_optax.transforms.adam import scale_by_adam
from merit_optax.transforms.muon_direction import scale_by_muon
from merit_optax.transforms.newton_schulz import Coefficients
from merit_optax.transforms.shape import scale_by_shape


def muon(
  learning_rate: optax.ScalarOrSchedule,
  beta: jax.typing.ArrayLike = 0.9,
  *,
  weight_decay: optax.ScalarOrSchedule = 0.0,
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
  r"""Muon for hidden matrices, and Adam for all other parameters.

  A hidden matrix :math:`w` of :math:`m` rows and :math:`n` columns takes steps
  along Muon's direction :math:`q`, which have the size of Adam's:

  .. math::

    w \leftarrow w - \eta \left(0.2 \sqrt{\max(m, n)} \, q + \lambda w\right)

  It is the chain of :func:`merit_optax.scale_by_muon`,
  :func:`merit_optax.scale_by_shape`, :func:`optax.add_decayed_weights` and
  :func:`optax.scale_by_learning_rate`. Embeddings, heads, biases and scales
  take Adam.

  - For a learning rate to start at, see
    :func:`merit_optax.starting_learning_rate`.
  - Put a clip of the gradient's norm in front, such as
    :func:`optax.clip_by_global_norm`, and use a warm-up.
  - ``print(merit_optax.describe(params, optimizer))`` shows how it treats each
    parameter.

  Coming from :func:`optax.contrib.muon`: its steps have this size with
  ``consistent_rms=0.2``. By default their factor is :math:`\sqrt{\max(1, n/m)}`
  instead of :math:`0.2 \sqrt{\max(m, n)}`: to keep the steps of a matrix,
  multiply its learning rate by :math:`5 / \sqrt m`, which is another number for
  matrices with another number of rows. Its ``beta`` is 0.95 by default, and its
  Adam has Nesterov momentum, a ``b2`` of 0.999 and an ``eps`` of 1e-8. There
  all parameters with two axes are hidden matrices, embeddings and heads too,
  and those with ``None`` among the dimension numbers are Adam's; here
  ``hidden`` decides. The states differ.

  Args:
    learning_rate: Learning rate of hidden matrices, or a schedule from steps to
      learning rates.
    beta: Decay rate of Muon's momentum, in [0, 1).
    weight_decay: Weight decay of hidden matrices, >= 0, or a schedule.
    others: Optimizer of all other parameters, such as ``optax.adamw(0.004)`` or
      an :func:`optax.partition` with a rate for each group; ``None`` for
      :func:`merit_optax.scale_by_adam` with bias correction, at
      ``learning_rate``.
    hidden: Which parameters are hidden matrices: regular expressions, a tree or
      a function, see :func:`merit_optax.hidden_matrices`; ``None`` for those
      that names tell.
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
    nesterov: Whether to use Nesterov momentum.
    ns_coeffs: Coefficients of the Newton-Schulz iterations: ``'jordan'``,
      ``'polar_express'``, ``'dion'``, or numbers, see
      :func:`merit_optax.scale_by_muon`.
    ns_steps: Number of iterations, >= 1; ``None`` for five.
    ns_dtype: dtype of the operands of their products: float32, bfloat16 or
      float16; ``None`` for float32.
    shardings: How parameters lie on a mesh with Auto axes, such as
      ``jax.tree.map(lambda x: x.sharding, params)``, see
      :func:`merit_optax.scale_by_muon`.

  Returns:
    The corresponding :func:`merit_optax.partition_hidden`, whose ``update``
    needs ``params``.

  Raises:
    ValueError: If an argument is out of range; by ``init`` and ``update`` if
      ``hidden`` or a spec does not fit the parameters, and if a hidden matrix
      with more than two axes is not recognized; by ``init`` if nothing is
      hidden, or if a hidden matrix lacks its sharding; by ``update`` if it is
      called without ``params``.

  Warns:
    UserWarning: By ``init``, if ``hidden`` is ``None`` and names do not tell
      what a parameter is.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.ones((50, 8)),
    ...     'mlp': {'kernel': jnp.eye(8), 'bias': jnp.ones(8)},
    ... }
    >>> optimizer = merit_optax.muon(0.02, weight_decay=0.1)
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> print(f'{jnp.linalg.norm(updates["mlp"]["kernel"]):.3f}')
    0.040

  References:
    Jordan et al., `Muon: An optimizer for hidden layers in neural networks
    <https://kellerjordan.github.io/posts/muon>`_, 2024.

    Liu et al., `Muon is Scalable for LLM Training
    <https://arxiv.org/abs/2502.16982>`_, 2025, for the size of a step.
  """
  rate = arguments.learning_rate('learning_rate', learning_rate)
  specs = specs_or_names(weight_dimension_numbers)
  matrices = optax.chain(
    scale_by_muon(
      ns_coeffs,
      ns_steps,
      beta,
      mu_dtype=mu_dtype,
      nesterov=nesterov,
      ns_dtype=ns_dtype,
      weight_dimension_numbers=specs,
      shardings=shardings,
    ),
    scale_by_shape(_size_of_adam, weight_dimension_numbers=specs),
    optax.add_decayed_weights(
      arguments.weight_decay('weight_decay', weight_decay)
    ),
    optax.scale_by_learning_rate(rate),
  )
  adam = scale_by_adam(mu_dtype=mu_dtype, bias_correction=True)
  return partition_beside_adam(
    matrices, others, adam, rate, hidden, weight_dimension_numbers
  )


def _size_of_adam(rows: int, columns: int) -> float:
  """Returns what gives an orthogonal matrix the size of Adam's updates."""
  return 0.2 * math.sqrt(max(rows, columns))
