"""The MERIT optimizer: a chain of this package's transforms."""

from collections.abc import Iterable
from typing import Any

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number, NumberOrSchedule
from merit_optax.matrices import masks
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.norms import Ratio
from merit_optax.transforms.adam import scale_by_adam
from merit_optax.transforms.clip import elementwise_clip
from merit_optax.transforms.trust_ratio import scale_by_max_norm_trust_ratio


def merit(
  learning_rate: optax.ScalarOrSchedule,
  b1: Number = 0.9,
  b2: Number = 0.95,
  eps: Number = 1e-6,
  eps_root: Number = 0.0,
  weight_decay: NumberOrSchedule = 0.0,
  mask: Any = None,
  *,
  mu_dtype: jax.typing.DTypeLike | None = None,
  nu_dtype: jax.typing.DTypeLike | None = None,
  bias_correction: bool = False,
  clip_threshold: Number | None = 1.0,
  ratios: Iterable[Ratio] = ('weight', 'row', 'column'),
  trust_ratio_mask: Any = None,
  min_norm: Number = 0.0,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
  r"""The MERIT optimizer.

  MERIT trains language models at large batch sizes. It scales Adam's update
  element by element, with the largest of three trust ratios in the max-norm:
  one of the whole weight matrix, one of the element's row and one of its
  column. For a matrix :math:`w` and Adam's update :math:`u`,

  .. math::

    z &= u + \lambda w \\
    s_{ij} &= \max\left(
      \frac{\max |w|}{\max |z|},
      \frac{\max |w_{i:}|}{\max |z_{i:}|},
      \frac{\max |w_{:j}|}{\max |z_{:j}|}
    \right) \\
    w_{ij} &\leftarrow w_{ij} - \eta \, \text{clip}(s_{ij} z_{ij}, 1)

  with learning rate :math:`\eta` and weight decay :math:`\lambda`. Therefore
  :math:`|\Delta w| \le \eta \max |w|`, provided that no norm is zero and
  ``min_norm`` is not above :math:`\max |w|`: the learning rate is the largest
  change in a step as a fraction of the largest weight.

  Specify ``weight_dimension_numbers`` for parameters with more than two axes.
  Otherwise ``init`` warns and treats them as stacks of matrices over their last
  two axes. Call ``update`` under ``jax.jit``, not inside ``jax.shard_map``,
  where each device would silently take the norms of its own shards.

  The arguments up to ``mask`` are in the same order as in :func:`optax.lamb`.
  The optimizer is a chain of :func:`merit_optax.scale_by_adam`,
  :func:`optax.add_decayed_weights`,
  :func:`merit_optax.scale_by_max_norm_trust_ratio`,
  :func:`merit_optax.elementwise_clip` and
  :func:`optax.scale_by_learning_rate`.

  Args:
    learning_rate: Learning rate, or a schedule from steps to learning rates. A
      negative one maximizes the loss.
    b1: Decay rate of the first moment, in [0, 1).
    b2: Decay rate of the second moment, in [0, 1).
    eps: Added to the root of the second moment, >= 0. With both ``eps`` and
      ``eps_root`` at zero, a zero gradient gives NaN.
    eps_root: Added to the second moment inside the root, >= 0.
    weight_decay: Weight decay, inside the trust ratio, >= 0, or a schedule.
    mask: Tree of booleans (or a function from parameters to one) that selects
      the parameters to decay; ``None`` for all.
    mu_dtype: dtype of the first moment; ``None`` for the parameter's.
    nu_dtype: dtype of the second moment; ``None`` for the parameter's.
    bias_correction: Whether to apply Adam's bias correction. The paper does
      not use it.
    clip_threshold: Largest magnitude of an element of the scaled update, before
      the learning rate, > 0 (``max_delta`` of
      :func:`merit_optax.elementwise_clip`); ``None`` for no clip.
    ratios: Which trust ratios take part in the maximum: one or more of
      ``'weight'``, ``'row'`` and ``'column'``.
    trust_ratio_mask: Tree of booleans (or a function from parameters to one)
      that selects the parameters to scale by trust ratios; the others take
      Adam's step, clipped. ``None`` for all.
    min_norm: Lower bound of the norms in the trust ratios, >= 0.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  Returns:
    The corresponding :class:`optax.GradientTransformationExtraArgs`. Its
    ``update`` needs ``params``. Updates have the dtypes that
    :func:`optax.lamb` gives them, and the state is as large as Adam's.

  Raises:
    ValueError: If an argument is out of range; by ``init`` if the moments of a
      parameter would not decay in its dtype, see
      :func:`merit_optax.scale_by_adam`; by ``init`` and ``update`` if a spec or
      a mask does not fit the parameters; by ``update`` if it is called without
      ``params``.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> def loss(params):
    ...   return jnp.sum((params['w'] @ jnp.ones(3) - 1.0) ** 2)
    >>> schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)
    >>> optimizer = merit_optax.merit(schedule)
    >>> @jax.jit
    ... def step(params, state):
    ...   gradients = jax.grad(loss)(params)
    ...   updates, state = optimizer.update(gradients, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> params = {'w': jnp.full((2, 3), 0.5)}
    >>> state = optimizer.init(params)
    >>> print(f'loss: {loss(params):.1f}')
    loss: 0.5
    >>> for _ in range(20):
    ...   params, state = step(params, state)
    >>> print(f'loss: {loss(params):.1f}')
    loss: 0.0

  References:
    Luo et al., `MERIT: Maximum-normalized Element-wise Ratio for Language
    Model Large-batch Training <https://arxiv.org/abs/2508.20577>`_, 2025,
    Algorithm 1.
  """
  learning_rate = arguments.learning_rate('learning_rate', learning_rate)
  weight_decay = arguments.weight_decay('weight_decay', weight_decay)
  if clip_threshold is None:
    clip = optax.identity()
  else:
    clip = elementwise_clip(
      arguments.above_zero('clip_threshold', clip_threshold)
    )
  trust_ratio = scale_by_max_norm_trust_ratio(
    min_norm=min_norm,
    ratios=ratios,
    weight_dimension_numbers=weight_dimension_numbers,
  )
  if trust_ratio_mask is not None:
    trust_ratio = optax.masked(
      trust_ratio, masks.as_function('trust_ratio_mask', trust_ratio_mask)
    )
  if mask is not None:
    mask = masks.as_function('mask', mask)
  return optax.chain(
    scale_by_adam(
      b1=b1,
      b2=b2,
      eps=eps,
      eps_root=eps_root,
      mu_dtype=mu_dtype,
      nu_dtype=nu_dtype,
      bias_correction=bias_correction,
    ),
    optax.add_decayed_weights(weight_decay, mask),
    trust_ratio,
    clip,
    optax.scale_by_learning_rate(learning_rate),
  )
