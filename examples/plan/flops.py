"""Matrix products of a compiled program, and their FLOPs.

The compilers for CPUs and GPUs write a product as ``dot``, mostly in a fusion,
or call cuBLAS; that for TPUs writes a convolution, whose window holds batches
and further sums. A product of a matrix and a vector may become a sum of
products, which is none. Kernels written by hand are not looked into.
"""

from collections.abc import Iterator, Sequence
import functools
import math
import re
from typing import NamedTuple

import numpy as np

from examples.plan import hlo
from examples.plan.hlo import Computation, Instruction

_CALL = 'custom_call_target="__cublas$'
# The forms lhs_contracting_dims={1} and "lhs_contracting_dimensions":["1"].
_CONTRACTED = re.compile(r'lhs_contracting_dim\w+(?:=\{|":\[)([\d,"]*)')
_PRECISION = re.compile(r'operand_precision(?:=\{|":\[)([\w,"]*)')
_ALGORITHM = re.compile(r'\balgorithm(?:=|":"alg_)(dot_\w+)')
_GROUPS = re.compile(r'(?:feature|batch)_group_count=(\d+)')
_LABELS = re.compile(r'dim_labels=(\w+)_\w+->(\w+)')
_WINDOW = re.compile(r'window=\{(.*?)\}')
_WINDOW_DEFAULTS = {
  'size': '1', 'stride': '1', 'pad': '0_0', 'lhs_dilate': '1',
  'rhs_dilate': '1',
}  # fmt: skip


class Product(NamedTuple):
  """A matrix product, of all batches of it."""

  flops: float  # Of an execution: one for a multiplication, one to add it.
  executions: int  # How often a run of the program executes it.
  dtypes: tuple[str, ...]  # Of its operands, such as 'bf16'.
  precision: tuple[str, ...]  # Of its operands: default, high or highest.
  algorithm: str = ''  # One that was asked for, such as 'dot_tf32_tf32_f32'.


def products(program: Computation) -> list[Product]:
  """Returns the matrix products that a run of a program executes."""
  return [
    _product(x, times)
    for outer, times in hlo.walk(program)
    for x in _executed(outer)
    if x.opcode in ('dot', 'convolution') or _CALL in x.attributes
  ]


def total_flops(found: Sequence[Product]) -> float:
  """Returns the FLOPs of all executions, whatever the precision."""
  return float(sum(x.flops * x.executions for x in found))


def _executed(x: Instruction) -> Iterator[Instruction]:
  """Yields what an instruction executes, a fusion what it holds."""
  if x.opcode != 'fusion':
    yield x
    return
  (inside,) = x.called
  for inner in inside:
    yield from _executed(inner)


def _product(x: Instruction, times: int) -> Product:
  operands = x.operands[:2]
  # Calls of cuBLAS have them in capitals.
  attributes = x.attributes.lower()
  precision = _PRECISION.search(attributes)
  algorithm = _ALGORITHM.search(attributes)
  return Product(
    _convolution_flops(x) if x.opcode == 'convolution' else _dot_flops(x),
    times,
    tuple(operand.arrays[0].dtype for operand in operands),
    tuple(re.findall('[a-z]+', precision[1]))
    if precision
    else ('default',) * len(operands),
    algorithm[1] if algorithm else '',
  )


def _dot_flops(x: Instruction) -> float:
  """Returns two FLOPs for each result and each term that it sums."""
  shape = x.operands[0].arrays[0].shape
  axes = re.findall(r'\d+', _CONTRACTED.search(x.attributes).group(1))
  # A call of cuBLAS returns its workspace too.
  return 2.0 * math.prod([*x.arrays[0].shape, *(shape[int(i)] for i in axes)])


def _convolution_flops(x: Instruction) -> float:
  """Returns two FLOPs for each weight that meets an element of the input."""
  of_input, of_result = _LABELS.search(x.attributes).groups()
  inputs = dict(zip(of_input, x.operands[0].arrays[0].shape, strict=True))
  results = dict(zip(of_result, x.arrays[0].shape, strict=True))
  meetings = [
    _meetings(inputs[str(axis)], results[str(axis)], *window)
    for axis, window in enumerate(_windows(x.attributes))
  ]
  products = inputs['b'] * inputs['f'] * results['f'] * math.prod(meetings)
  groups = math.prod(map(int, _GROUPS.findall(x.attributes)))
  return 2.0 * products / groups


def _windows(attributes: str) -> list[tuple[int, ...]]:
  """Returns size, stride, padding before and dilations, for each axis."""
  found = _WINDOW.search(attributes)
  if not found:
    return []
  given = dict(field.split('=') for field in found[1].split())
  axes = len(given['size'].split('x'))
  fields = [
    given[name].split('x') if name in given else [default] * axes
    for name, default in _WINDOW_DEFAULTS.items()
  ]
  return [
    tuple(int(x.partition('_')[0]) for x in axis)
    for axis in zip(*fields, strict=True)
  ]


@functools.cache
def _meetings(
  inputs: int,
  results: int,
  size: int,
  stride: int,
  padding: int,
  input_dilation: int,
  window_dilation: int,
) -> int:
  """Returns how often a window meets an input along an axis.

  It does not between the elements of a dilated input, which is how batches
  stay apart, and in the padding.
  """
  starts = stride * np.arange(results) - padding
  end = (inputs - 1) * input_dilation + 1
  return sum(
    int(np.sum((at >= 0) & (at < end) & (at % input_dilation == 0)))
    for at in (starts + window_dilation * i for i in range(size))
  )
