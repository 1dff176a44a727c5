"""Bytes that a compiled program moves to and from main memory.

XLA's own ``cost_analysis`` counts the body of a loop once and on-chip memory
like any other. Here loops count by their turns, and arrays that the TPU
compiler placed on chip do not count, but the copies to them do.
"""

from collections import Counter
from collections.abc import Sequence

from examples.plan import hlo
from examples.plan.hlo import Array, Computation, Instruction

# These, and all '-done', name, group or wait for arrays.
_NO_TRAFFIC = {
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while',
  'conditional', 'call', 'after-all', 'partition-id', 'replica-id', 'iota',
  'async-update', 'optimization-barrier',
}  # fmt: skip
_RENAMES = ('bitcast', 'reshape')
_SLICES = ('dynamic-slice', 'slice', 'gather', 'slice-start', 'async-start')
# In a fusion, the start and the end of a collective that runs asynchronously.
_ASYNCHRONOUS = ('all-gather', 'all-reduce', 'custom-call', 'tuple')


def hbm_bytes(program: Computation) -> int:
  """Returns the bytes that a device reads from and writes to main memory.

  Each instruction reads its operands and writes its results once, elements
  without padding. Of an operand that is only sliced the slice counts, and of
  one that is updated in place the update.
  """
  return sum(times * _traffic(x) for x, times in hlo.walk(program))


def _traffic(x: Instruction) -> int:
  """Returns the bytes that one execution of an instruction moves."""
  if x.opcode in _NO_TRAFFIC or x.opcode.endswith('-done'):
    return 0
  if x.opcode == 'fusion':
    return _fusion_traffic(x)
  if x.opcode == 'dynamic-update-slice':
    return 2 * _hbm(x.operands[1].arrays)
  read = [array for operand in x.operands for array in operand.arrays]
  results = x.arrays
  if x.opcode.endswith('-start') and x.opcode != 'all-reduce-start':
    # The results hold the operands too.
    results = list((Counter(results) - Counter(read)).elements())
  if x.opcode in _SLICES:
    sliced = _size(results) if read[0].in_hbm else 0
    return sliced + _hbm(results)
  return _hbm(results) + _hbm(read)


def _fusion_traffic(fusion: Instruction) -> int:
  """Returns the bytes that a fusion moves; within it, nothing is stored."""
  (inside,) = fusion.called
  attributes = ''.join(x.attributes for x in inside)
  if '"AsyncCollectiveDone"' in attributes:
    return 0
  if '"AsyncCollectiveStart"' in attributes:
    return _hbm(fusion.arrays)  # The operand is among the results.
  read = sum(
    _read(inside, x)
    for x in inside
    if x.opcode == 'parameter'
    and _hbm(fusion.operands[int(x.arguments)].arrays)
  )
  (root,) = (x for x in inside if x.is_root)
  makers = root.operands if root.opcode == 'tuple' else [root]
  # The results that have no maker are contexts of asynchronous operations.
  results = zip(makers, fusion.arrays, strict=False)
  return read + sum(_written(x, array) for x, array in results if array.in_hbm)


def _read(inside: Computation, source: Instruction) -> int:
  """Returns the bytes that a fusion reads of a parameter."""
  total, size = 0, _size(source.arrays)
  for user in inside:
    if source not in user.operands or user.opcode in _ASYNCHRONOUS:
      continue
    if user.opcode in _RENAMES:
      total += _read(inside, user)
    elif user.opcode in _SLICES:
      total += _size(user.arrays)
    elif user.opcode != 'dynamic-update-slice' or user.operands[0] != source:
      return size
  return min(total, size)


def _written(maker: Instruction, array: Array) -> int:
  """Returns the bytes that a fusion writes of a result."""
  while maker.opcode in _RENAMES:
    maker = maker.operands[0]
  if maker.opcode == 'dynamic-update-slice':
    return _size(maker.operands[1].arrays)
  if maker.opcode in ('parameter', *_ASYNCHRONOUS):
    return 0
  return array.bytes


def _size(arrays: Sequence[Array]) -> int:
  return sum(x.bytes for x in arrays)


def _hbm(arrays: Sequence[Array]) -> int:
  return sum(x.bytes for x in arrays if x.in_hbm)
