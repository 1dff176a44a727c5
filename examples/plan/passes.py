"""What a matrix product costs: how many of its size in bfloat16 take as long.

TPUs multiply bfloat16. Of a float32 operand the default precision takes one
part in bfloat16, 'high' two and 'highest' three, and the products of parts are
made that are not below the last part: of two such operands 1, 3 and 6, as
``jax.lax.Precision`` documents, of one 1, 2 and 3. For matrices of 8192 x 8192
the compilers for v5e, v5p and v6e estimate 1.4 to 1.8, 2.6 to 2.8, and 5.0 to
5.8 times the cycles of bfloat16, of one such operand 1.2 to 1.3, 1.8 to 1.9 and
2.5 to 2.8, some of which is for reading float32.

GPUs multiply float32 as TF32, also with 'high', and with 'highest' in float32
(``jax.lax.Precision``). In the data sheets of those that can be compiled for,
TF32 has half the rate of bfloat16, float32 a 15th (H100) to a 30th (B200).

Types of 8 bits count as bfloat16, although most chips multiply them at twice
the rate.
"""

from collections.abc import Sequence
import re

from examples.gpt2.hardware import Chip
from examples.plan import gpus
from examples.plan.flops import Product

_PARTS = {'default': 1, 'high': 2, 'highest': 3}
_TF32 = 2.0


def bfloat16_flops(found: Sequence[Product], chip: Chip, kind: str) -> float:
  """Returns the FLOPs in bfloat16 that take as long as some products.

  ``kind`` is the chip's, as jax names it.
  """
  return sum(x.flops * x.executions * passes(x, chip, kind) for x in found)


def passes(product: Product, chip: Chip, kind: str) -> float:
  """Returns the cost of a product, relative to one in bfloat16."""
  float32_flops = gpus.float32_flops(kind)
  if float32_flops is None:
    return _passes_of_tpu(product)
  return _passes_of_gpu(product, float32=chip.flops / float32_flops)


def _passes_of_tpu(product: Product) -> float:
  fewest, most = sorted(
    _PARTS[precision] if dtype == 'f32' else 1
    for dtype, precision in zip(product.dtypes, product.precision, strict=True)
  )
  # Parts 0, 1 and 2, each smaller than the one before; pairs up to the last.
  return float(sum(most - part for part in range(fewest)))


def _passes_of_gpu(product: Product, float32: float) -> float:
  if product.algorithm:
    dtype, times = re.match(
      r'dot_([^_]+).*?(?:_x(\d))?$', product.algorithm
    ).groups()
    return {'f32': float32, 'tf32': _TF32}.get(dtype, 1.0) * int(times or 1)
  if 'f32' not in product.dtypes:
    return 1.0
  return float32 if 'highest' in product.precision else _TF32
