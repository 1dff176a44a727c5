"""Instructions of a compiled program, from the text of its HLO.

A loop runs as often as the text says (``known_trip_count``), else as the
constant that its condition compares with, as in loops of ``jax.lax.scan``.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import math
import re
from typing import NamedTuple

_NAME = re.compile(r'%([\w.-]+)')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?')
_COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.-]+) .*\{$')
_INSTRUCTION = re.compile(
  r'\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(?:, (.*))?$'
)
_CALLED = re.compile(
  r'\b(?:body|condition|calls|to_apply|\w+_computations?)='
  r'\{?((?:%[\w.-]+(?:, )?)+)'
)


class Array(NamedTuple):
  """An array in the text."""

  shape: tuple[int, ...]
  bytes: int  # Of its elements, without padding.
  in_hbm: bool  # Whether it lies in a device's main memory.
  dtype: str  # Of its elements, such as 'bf16'.


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """A line of a computation."""

  opcode: str  # Its operation, such as 'fusion'.
  arrays: list[Array]  # Its results.
  operands: list['Instruction']  # Those whose results it reads.
  called: list['Computation']  # The condition of a loop is the first.
  arguments: str  # Text between the parentheses.
  attributes: str  # Text after them.
  is_root: bool  # Whether the computation returns its results.


Computation = list[Instruction]


def parse(text: str) -> Computation:
  """Returns the entry computation of what ``compiled.as_text()`` returns."""
  computations: dict[str, Computation] = {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      computation = computations.setdefault(head[1], [])
      by_name: dict[str, Instruction] = {}
    elif found := _INSTRUCTION.match(line):
      root, name, types, opcode, arguments, attributes = found.groups('')
      callees = _NAME.findall(''.join(_CALLED.findall(attributes)))
      arrays = [_array(*array) for array in _ARRAY.findall(types)]
      operands = [by_name[operand] for operand in _NAME.findall(arguments)]
      called = [computations[callee] for callee in callees]
      by_name[name] = Instruction(
        opcode, arrays, operands, called, arguments, attributes, bool(root)
      )
      computation.append(by_name[name])
  return computation


def _array(dtype: str, sizes: str, layout: str) -> Array:
  shape = tuple(int(size) for size in sizes.split(',') if size)
  bits = _bits(dtype)
  # Memory spaces other than 0 are on the chip.
  in_hbm = re.search(r'S\([1-9]\d*\)', layout) is None
  return Array(shape, math.prod(shape) * bits // 8, in_hbm, dtype)


def _bits(dtype: str) -> int:
  """Returns the bits of an element; a token has none."""
  if dtype == 'pred':
    return 8
  digits = re.search(r'\d+', dtype)
  return int(digits[0]) if digits else 0


def walk(
  program: Computation, times: int = 1
) -> Iterator[tuple[Instruction, int]]:
  """Yields each instruction that runs of a program execute, and how often.

  A fusion is one instruction. Each branch of a conditional counts as taken.
  Raises ``ValueError`` if the number of turns of a loop is not known.
  """
  for instruction in program:
    yield instruction, times
    if instruction.opcode != 'fusion':
      turns = _turns(instruction) if instruction.opcode == 'while' else 1
      for callee in instruction.called:
        yield from walk(callee, times * turns)


def _turns(loop: Instruction) -> int:
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
  if known:
    return int(known[1])
  condition = loop.called[0]
  fused = itertools.chain.from_iterable(x.called for x in condition)
  bounds = [
    int(x.arguments)
    for x in itertools.chain(condition, *fused)
    if x.opcode == 'constant' and x.arguments.isdecimal()
  ]
  if not bounds:
    raise ValueError(f'a loop has no known trip count: {loop.attributes[:200]}')
  return max(bounds)
