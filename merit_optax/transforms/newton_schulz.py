"""Orthogonalization of matrices by Newton-Schulz iterations."""

from collections.abc import Callable, Iterable, Sequence
import functools
import math
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from merit_optax._internal.arguments import is_integer
from merit_optax._internal.dtypes import widen
from merit_optax.matrices.norms import l2_norm

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = str | Triple | Sequence[Triple]

_Product: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def newton_schulz(
  x: jax.Array,
  coefficients: Iterable[Iterable[Any]],
  product: _Product = jnp.matmul,
  hermitian_product: _Product = jnp.matmul,
) -> jax.Array:
  """Moves the singular values of matrices, at most 1, towards 1."""
  for a, b, c in coefficients:
    gram = hermitian_product(x, _adjoint(x))
    polynomial = b * gram + c * hermitian_product(gram, gram)
    x = a * x + product(polynomial, x)
  return x


# Inlined, and equal shapes are traced once.
@functools.partial(
  jax.jit, static_argnames=('coefficients', 'dtype'), inline=True
)
def orthogonalize(
  x: jax.Array,
  coefficients: tuple[Triple, ...],
  eps: jax.typing.ArrayLike,
  dtype: jnp.dtype,
) -> jax.Array:
  """Moves all singular values of matrices towards 1, by the fastest products.

  Args:
    x: Matrices, shape (n, r, c) with r <= c.
    coefficients: a, b and c of each iteration.
    eps: Added to the Frobenius norm, which divides a matrix first.
    dtype: dtype of the products' operands; sums are taken in float32 or wider.

  Returns:
    Array of the same shape, in float32 or wider.
  """
  x = widen(x)
  norm = l2_norm(x, (1, 2))
  # Of an infinite one the matrix would become zero, which nobody would notice.
  x = x / (jnp.where(jnp.isinf(norm), jnp.nan, norm) + eps)
  product = functools.partial(_product, dtype=dtype)

  def segments(platform: str) -> list[list[Triple]] | None:
    found = _segments(coefficients, _rounding(dtype, platform))
    return found if _are_fewer_flops(found, x.shape) else None

  def iterated(
    x: jax.Array, platform: str, hermitian: _Product = product
  ) -> jax.Array:
    if found := segments(platform):
      return _by_gram_matrices(found, product, hermitian, x)

    def iterate(x: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
      return newton_schulz(x, [abc], product, hermitian), None

    return jax.lax.scan(iterate, x, jnp.asarray(coefficients, x.real.dtype))[0]

  def on_cpu(x: jax.Array) -> jax.Array:
    # XLA on CPU multiplies single matrices faster than stacks of them, and its
    # time is that of the FLOPs.
    hermitian = functools.partial(_hermitian_product, product)
    each: jax.Array = jax.lax.map(
      lambda y: iterated(y[None], 'cpu', hermitian)[0], x
    )
    return each

  def on_gpu(x: jax.Array) -> jax.Array:
    # XLA on GPU copies what a loop carries.
    if found := segments('cuda'):
      return _by_gram_matrices(found, product, product, x)
    return newton_schulz(x, coefficients, product, product)

  orthogonal: jax.Array = jax.lax.platform_dependent(
    x, cpu=on_cpu, cuda=on_gpu, default=lambda x: iterated(x, 'tpu')
  )
  return orthogonal


# Spacing of the numbers above 1 to which JAX rounds operands of products in
# float32 by default: TensorFloat-32 on GPUs since Ampere, bfloat16 on TPUs.
_ROUNDED = MappingProxyType({'cpu': 2.0**-23, 'cuda': 2.0**-10, 'tpu': 2.0**-7})


def _rounding(dtype: jnp.dtype, platform: str) -> float:
  """Returns the spacing above 1 of the operands of products."""
  spacing = float(jnp.finfo(dtype).eps)
  precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
  is_full = precision in ('float32', 'highest')
  if is_full or dtype not in (jnp.float32, jnp.complex64):
    return spacing
  return _ROUNDED[platform]


# In the Gram form, iterations enlarge a rounding error of the Gram matrix. Once
# it would be larger than this, the matrix is multiplied, and its Gram matrix
# computed anew.
_LARGEST_GRAM_ERROR = 1e-4
# Products of smaller matrices are not faster in blocks.
_LEAST_BLOCK = 256


def _segments(
  coefficients: tuple[Triple, ...], rounding: float
) -> list[list[Triple]]:
  """Returns runs of iterations in which errors of a Gram matrix stay small.

  The longest is the last one: small singular values, which suffer most from an
  error, are large by then.
  """
  segments = [[coefficients[-1]]]
  for triple in reversed(coefficients[:-1]):
    longer = [triple, *segments[0]]
    growth = math.prod(a**2 for a, _, _ in longer[:-1])
    if rounding * growth < _LARGEST_GRAM_ERROR:
      segments[0] = longer
    else:
      segments.insert(0, [triple])
  return segments


def _are_fewer_flops(
  segments: list[list[Triple]], shape: tuple[int, ...]
) -> bool:
  """Returns whether Gram matrices save FLOPs, counted in 2 r**3 a matrix."""
  aspect = shape[2] / shape[1]
  plain = sum(len(segment) * (2 * aspect + 1) for segment in segments)
  gram = sum(2 * aspect + max(1, 4 * len(segment) - 3) for segment in segments)
  return gram < plain


def _by_gram_matrices(
  segments: list[list[Triple]],
  product: _Product,
  hermitian_product: _Product,
  x: jax.Array,
) -> jax.Array:
  """Iterates with Gram matrices, and multiplies the matrix once a segment.

  Each iteration multiplies X by a polynomial of the Gram matrix. All of these
  commute, so that the next Gram matrix is the square of the polynomial times
  this one, and the product of all polynomials is applied in the end.
  """
  eye = jnp.eye(x.shape[1], dtype=x.dtype)[None]

  def polynomial(gram: jax.Array, triple: Triple) -> jax.Array:
    a, b, c = triple
    return a * eye + b * gram + c * hermitian_product(gram, gram)

  for first, *rest in segments:
    gram = hermitian_product(x, _adjoint(x))
    factor = total = polynomial(gram, first)
    for triple in rest:
      gram = hermitian_product(factor, hermitian_product(factor, gram))
      factor = polynomial(gram, triple)
      total = hermitian_product(factor, total)
    x = product(total, x)
  return x


def _hermitian_product(
  product: _Product, x: jax.Array, y: jax.Array
) -> jax.Array:
  """Multiplies matrices whose product is Hermitian.

  One of the two blocks beside the diagonal is the adjoint of the other.
  """
  half = x.shape[-2] // 2
  if half < _LEAST_BLOCK:
    return product(x, y)
  upper = product(x[..., :half, :], y)
  corner = _hermitian_product(product, x[..., half:, :], y[..., half:])
  lower = jnp.concatenate([_adjoint(upper[..., half:]), corner], -1)
  return jnp.concatenate([upper, lower], -2)


def _product(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Multiplies matrices of one dtype, and sums in float32 or wider."""
  return jnp.matmul(
    x.astype(dtype),
    y.astype(dtype),
    preferred_element_type=x.dtype,
  )


def _adjoint(x: jax.Array) -> jax.Array:
  return x.mT.conj()


_USUAL_STEPS = 5
# Polar Express divides the coefficients of all iterations but the last by
# powers of this, so that a singular value that was rounded up still converges.
_SAFETY = 1.01


def _with_safety(a: float, b: float, c: float) -> Triple:
  return a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5


NAMED_COEFFICIENTS = MappingProxyType(
  {
    # Jordan et al., https://kellerjordan.github.io/posts/muon, 2024.
    'jordan': ((3.4445, -4.7750, 2.0315),),
    # Jordan et al., modded-nanogpt; also those of Dion, arXiv 2504.05295, 2025.
    'dion': (
      (4.0848, -6.8946, 2.9270),
      (3.9505, -6.3029, 2.6377),
      (3.7418, -5.5913, 2.3037),
      (2.8769, -3.1427, 1.2046),
      (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., The Polar Express, arXiv 2505.16932, 2025.
    'polar_express': (
      _with_safety(8.28721201814563, -23.595886519098837, 17.300387312530933),
      _with_safety(4.107059111542203, -2.9478499167379106, 0.5448431082926601),
      _with_safety(3.9486908534822946, -2.908902115962949, 0.5518191394370137),
      _with_safety(3.3184196573706015, -2.488488024314874, 0.51004894012372),
      _with_safety(2.300652019954817, -1.6689039845747493, 0.4188073119525673),
      _with_safety(1.891301407787398, -1.2679958271945868, 0.37680408948524835),
      _with_safety(1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
      (1.875, -1.25, 0.375),
    ),
  }
)


def check_coefficients(ns_coeffs: Any, ns_steps: Any) -> tuple[Triple, ...]:
  """Returns the coefficients of each iteration.

  Raises:
    ValueError: If they are neither a known name, nor three numbers, nor a
      sequence of such; or if ``ns_steps`` is neither None nor an integer >= 1.
  """
  if ns_steps is None:
    ns_steps = _USUAL_STEPS
  if not is_integer(ns_steps) or ns_steps < 1:
    raise ValueError(
      f'ns_steps must be None or an integer >= 1, got {ns_steps!r}. Under '
      'optax.inject_hyperparams, which makes an array of it, name '
      "'ns_steps' in static_args."
    )
  if isinstance(ns_coeffs, str) and ns_coeffs in NAMED_COEFFICIENTS:
    named = NAMED_COEFFICIENTS[ns_coeffs]
    return tuple(named[min(i, len(named) - 1)] for i in range(ns_steps))
  try:
    given = np.asarray(ns_coeffs, float)
  except (TypeError, ValueError):
    given = np.zeros(())
  if given.ndim == 1:
    given = np.tile(given, (ns_steps, 1))
  is_valid = given.ndim == 2 and given.size and given.shape[1] == 3
  if not is_valid or not np.isfinite(given).all():
    raise ValueError(
      f'ns_coeffs must be one of {sorted(NAMED_COEFFICIENTS)}, three finite '
      f'numbers, or a sequence of three for each step, got {ns_coeffs!r}.'
    )
  return tuple((a, b, c) for a, b, c in given.tolist())
