"""Bytes that a compiled program moves to and from main memory.

XLA's own ``cost_analysis`` counts the body of a loop once and on-chip memory
like any other. Here loops count by their turns, and arrays that the TPU
compiler placed on chip do not count: what brings them there does.
"""

from collections.abc import Iterable, Iterator

from examples.plan import hlo
from examples.plan.hlo import Array, Instruction, Program

# They name, group or wait for arrays and move nothing themselves.
_STILL = {
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while',
  'conditional', 'call', 'after-all', 'partition-id', 'replica-id', 'iota',
  'copy-done', 'slice-done', 'async-done', 'async-update', 'all-reduce-done',
  'all-gather-done', 'collective-permute-done', 'optimization-barrier',
}  # fmt: skip
_RENAMES = ('bitcast', 'reshape')
# Within a fusion, what starts and awaits a collective that goes on beside it.
_BESIDE = ('all-gather', 'all-reduce', 'custom-call', 'tuple')


def hbm_bytes(text: str | Program) -> int:
  """Returns the bytes that a device reads from and writes to main memory.

  Each instruction reads its operands and writes its results once, elements
  without padding. Of an operand that is only sliced the slice counts, and of
  one that is updated in place the update.

  Args:
    text: What ``compiled.as_text()`` returns, or a program that was read.
  """
  program = hlo.parse(text) if isinstance(text, str) else text
  return sum(
    times * _moved(program, name, instruction)
    for name, instruction, times in hlo.walk(program)
    if times and instruction.opcode not in _STILL
  )


def _moved(program: Program, name: str, instruction: Instruction) -> int:
  """Returns the bytes that one execution of an instruction moves."""
  scope = program.computations[name]
  if instruction.opcode == 'fusion':
    (callee,) = instruction.called['calls']
    return _moved_by_fusion(program.computations[callee], scope, instruction)
  if instruction.opcode.endswith('-start'):
    return _moved_by_start(scope, instruction)
  if instruction.opcode == 'dynamic-update-slice':
    return 2 * _hbm(scope[instruction.operands[1]].arrays)
  written = _hbm(instruction.arrays)
  if instruction.opcode in ('dynamic-slice', 'slice', 'gather'):
    return 2 * written
  return written + sum(_hbm(scope[x].arrays) for x in instruction.operands)


def _moved_by_start(scope: dict[str, Instruction], start: Instruction) -> int:
  """Returns the bytes of a copy, a slice or a collective that goes on alone."""
  # The result holds the operands too, and of a slice all that it slices.
  operands = [x for name in start.operands for x in scope[name].arrays]
  results = list(start.arrays)
  for operand in operands:
    if operand in results:
      results.remove(operand)
  written = _hbm(results)
  if start.opcode in ('slice-start', 'async-start'):
    size = sum(x.bytes for x in results)
    return written + size * any(x.in_hbm for x in operands)
  return written + _hbm(operands)


def _moved_by_fusion(
  inside: dict[str, Instruction],
  scope: dict[str, Instruction],
  fusion: Instruction,
) -> int:
  """Returns the bytes that a fusion moves; within it, nothing is stored."""
  text = ''.join(x.attributes for x in inside.values())
  if '"AsyncCollectiveDone"' in text:
    return 0
  if '"AsyncCollectiveStart"' in text:
    return _hbm(fusion.arrays)  # The operand is among the results.
  given = [scope[name].arrays for name in fusion.operands]
  read = 0
  for instruction in inside.values():
    if instruction.opcode == 'parameter':
      arrays = given[int(instruction.arguments)]
      if _hbm(arrays):
        read += _read(inside, instruction)
  return read + sum(_written(inside, x) for x in _results(inside, fusion))


def _read(inside: dict[str, Instruction], source: Instruction) -> int:
  """Returns the bytes that a fusion reads of a parameter."""
  total = 0
  for user in inside.values():
    if source.name not in user.operands or user.opcode in _BESIDE:
      continue
    if user.opcode in _RENAMES:
      total += _read(inside, user)
    elif user.opcode in ('dynamic-slice', 'slice'):
      total += sum(x.bytes for x in user.arrays)
    elif user.opcode != 'dynamic-update-slice' or (
      user.operands[0] != source.name
    ):
      return sum(x.bytes for x in source.arrays)
  return min(total, sum(x.bytes for x in source.arrays))


def _results(
  inside: dict[str, Instruction], fusion: Instruction
) -> Iterator[tuple[Instruction, Array]]:
  """Yields what makes each result of a fusion, and the result."""
  (root,) = (x for x in inside.values() if x.is_root)
  makers = [root]
  if root.opcode == 'tuple':
    makers = [inside[name] for name in root.operands]
  yield from zip(makers, fusion.arrays, strict=False)


def _written(
  inside: dict[str, Instruction], result: tuple[Instruction, Array]
) -> int:
  """Returns the bytes that a fusion writes of a result."""
  maker, array = result
  while maker.opcode in _RENAMES:
    maker = inside[maker.operands[0]]
  if not array.in_hbm or maker.opcode in ('parameter', *_BESIDE):
    return 0
  if maker.opcode == 'dynamic-update-slice':
    return sum(x.bytes for x in inside[maker.operands[1]].arrays)
  return array.bytes


def _hbm(arrays: Iterable[Array]) -> int:
  return sum(x.bytes for x in arrays if x.in_hbm)
