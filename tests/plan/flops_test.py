import math
import textwrap

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import pytest

from examples.plan import flops, hlo
from examples.plan.flops import Product

# Programs of the compilers for v5e and H100, without what does not matter here.
_TPU = """
  HloModule jit_scan, is_scheduled=true

  %bitcast_fusion (bitcast_input: f32[6,256,512]) -> f32[6,256,512] {
    %bitcast_input = f32[6,256,512]{2,1,0:T(8,128)S(1)} parameter(0)
    ROOT %bitcast = f32[6,256,512]{2,1,0:T(8,128)} bitcast(%bitcast_input)
  }

  %fused_computation (p0: f32[6,256,512], p1: bf16[6,512,128]) -> \
f32[6,256,128] {
    %param_0 = f32[6,256,512]{2,1,0:T(8,128)S(1)} parameter(0)
    %fusion.1 = f32[6,256,512]{2,1,0:T(8,128)} fusion(%param_0), kind=kLoop, \
calls=%bitcast_fusion
    %param_1 = bf16[6,512,128]{2,1,0:T(8,128)(2,1)} parameter(1)
    ROOT %convolution-base-dilated.1 = f32[6,256,128]{2,1,0:T(8,128)} \
convolution(%fusion.1, %param_1), window={size=6 stride=5 lhs_dilate=6}, \
dim_labels=0bf_0io->0bf, operand_precision={highest,highest}, \
metadata={op_name="jit(scan)/while/body/dot_general"}
  }

  ENTRY %main (x: f32[6,256,512], w: bf16[6,512,128]) -> f32[6,256,128] {
    %x = f32[6,256,512]{2,1,0:T(8,128)} parameter(0)
    %w = bf16[6,512,128]{2,1,0:T(8,128)(2,1)} parameter(1)
    ROOT %fusion.13 = f32[6,256,128]{2,1,0:T(8,128)S(1)} fusion(%x, %w), \
kind=kOutput, calls=%fused_computation
  }
"""

_TRITON = """
  HloModule jit__lambda, is_scheduled=true

  %gemm_fusion_dot_computation (p0: f32[6,256,4,128], p1: f32[6,4,128,128]) \
-> f32[6,4,256,128] {
    %parameter_0 = f32[6,256,4,128]{3,2,1,0} parameter(0)
    %parameter_1 = f32[6,4,128,128]{3,2,1,0} parameter(1)
    ROOT %dot.1 = f32[6,4,256,128]{3,2,1,0} dot(%parameter_0, %parameter_1), \
lhs_batch_dims={0,2}, lhs_contracting_dims={3}, rhs_batch_dims={0,1}, \
rhs_contracting_dims={2}, algorithm=dot_bf16_bf16_f32_x3, \
backend_config={"sizes":["16"]}
  }

  ENTRY %main.1 (a.1: f32[6,256,512], b.1: f32[6,512,128]) -> \
f32[6,4,256,128] {
    %b.1 = f32[6,512,128]{2,1,0} parameter(1)
    %bitcast.2 = f32[6,4,128,128]{3,2,1,0} bitcast(%b.1)
    %a.1 = f32[6,256,512]{2,1,0} parameter(0)
    %bitcast.1.0 = f32[6,256,4,128]{3,2,1,0} bitcast(%a.1)
    ROOT %gemm_fusion_dot = f32[6,4,256,128]{3,2,1,0} \
fusion(%bitcast.1.0, %bitcast.2), kind=kCustom, \
calls=%gemm_fusion_dot_computation, backend_config={"fusion_backend_config":\
{"kind":"__triton_nested_gemm_fusion"}}
  }
"""

_CUBLAS = """
  HloModule jit__lambda, is_scheduled=true

  ENTRY %main.1 (a.1: f32[6,256,512], b.1: f32[6,512,128]) -> f32[6,256,128] {
    %a.1 = f32[6,256,512]{2,1,0} parameter(0)
    %b.1 = f32[6,512,128]{2,1,0} parameter(1)
    %custom-call.1 = (f32[6,256,128]{2,1,0}, s8[33554432]{0}) \
custom-call(%a.1, %b.1), custom_call_target="__cublas$lt$matmul", \
backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,\
"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],\
"rhs_batch_dimensions":["0"]},"alpha_imag":0,"precision_config":\
{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"},\
"epilogue":"DEFAULT","lhs_stride":"131072","rhs_stride":"65536"}}
    ROOT %y = f32[6,256,128]{2,1,0} get-tuple-element(%custom-call.1), index=0
  }
"""
_BATCHED = 2.0 * 6 * 256 * 512 * 128


def _products(text: str) -> list[Product]:
  return flops.products(hlo.parse(textwrap.dedent(text).lstrip()))


def _compiled(function, *shapes: tuple[int, ...]) -> list[Product]:
  args = [jax.ShapeDtypeStruct(shape, 'float32') for shape in shapes]
  return _products(jax.jit(function).lower(*args).compile().as_text())


def test_products_of_the_tpu_compiler_are_convolutions():
  assert _products(_TPU) == [
    Product(_BATCHED, 1, ('f32', 'bf16'), ('highest', 'highest'))
  ]


def test_products_of_the_gpu_compiler_are_of_triton_or_cublas():
  dtypes, default = ('f32', 'f32'), ('default', 'default')
  assert _products(_TRITON) == [
    Product(_BATCHED, 1, dtypes, default, 'dot_bf16_bf16_f32_x3')
  ]
  assert _products(_CUBLAS) == [
    Product(_BATCHED, 1, dtypes, ('highest', 'highest'))
  ]
  (found,) = _products(_CUBLAS.replace('ALG_UNSET', 'ALG_DOT_TF32_TF32_F32_X3'))
  assert found.algorithm == 'dot_tf32_tf32_f32_x3'


@pytest.mark.parametrize(
  ('inputs', 'weights', 'results', 'attributes', 'products'),
  [
    ('256,512', '512,128', '256,128', 'dim_labels=bf_io->bf', 256 * 512 * 128),
    # Two axes of batches, and one that is summed over beside the features.
    (
      '2,3,256,512', '2,3,128,512', '2,3,256,128',
      'window={size=2x3 stride=1x2 lhs_dilate=2x3}, '
      'dim_labels=01bf_01oi->01bf',
      6 * 256 * 512 * 128,
    ),
    # Of three elements each but the first and last misses one in the padding.
    (
      '4,128,32', '3,32,64', '4,128,64',
      'window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f',
      4 * (3 * 128 - 2) * 32 * 64,
    ),
    (
      '4,128,32', '3,1,32', '4,126,32',
      'window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=32',
      4 * 126 * 3 * 32,
    ),
    (
      '4,128,32', '3,32,64', '4,62,64',
      'window={size=3 stride=2 rhs_dilate=2}, dim_labels=b0f_0io->b0f',
      4 * 62 * 3 * 32 * 64,
    ),
  ],
)  # fmt: skip
def test_windows_count_where_they_meet_an_input(
  inputs: str, weights: str, results: str, attributes: str, products: int
):
  (found,) = _products(f"""
    HloModule step

    ENTRY %main (x: f32[{inputs}], w: f32[{weights}]) -> f32[{results}] {{
      %x = f32[{inputs}] parameter(0)
      %w = f32[{weights}] parameter(1)
      ROOT %y = f32[{results}] convolution(%x, %w), {attributes}
    }}
  """)
  assert found.flops == 2 * products


def test_a_scan_counts_its_products_by_its_turns():
  def run(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  (found,) = _compiled(run, (24, 48), (7, 48, 48))
  assert (found.flops, found.executions) == (2.0 * 24 * 48 * 48, 7)
  assert flops.total_flops([found]) == 7 * found.flops


_SIZES = st.dictionaries(
  st.sampled_from('abijk'), st.integers(2, 9), min_size=5, max_size=5
)


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
  _SIZES,
  # Batches a and b, rows i, columns k, and j is summed over.
  st.permutations('aij'),
  st.permutations('ajk'),
  st.permutations('aik'),
  st.booleans(),
)
def test_an_einsum_has_two_flops_for_each_product(
  sizes, first, second, result, two_batches
):
  operands = [''.join(axes) for axes in (first, second, result)]
  if two_batches:
    operands = [f'b{axes}' for axes in operands]
  left, right, out = operands
  found = _compiled(
    lambda x, y: jnp.einsum(f'{left},{right}->{out}', x, y),
    *(tuple(sizes[axis] for axis in axes) for axes in (left, right)),
  )
  terms = math.prod(sizes[axis] for axis in set(left + right))
  assert flops.total_flops(found) == 2 * terms


def test_sums_and_outer_products_are_none():
  found = _compiled(lambda x, y: jnp.outer(x, y).sum(0), (8,), (9,))
  assert not found
