"""Instructions of a compiled program, from the text of its HLO.

A loop runs as often as the text says (``known_trip_count``), else as the
constant that its condition compares with, as in loops of ``jax.lax.scan``.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?')
_NAME = re.compile(r'%([\w.-]+)')
_INSTRUCTION = re.compile(
  r'\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(?:, (.*))?$'
)
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) .*\{$')
_CALLED = re.compile(
  r'\b(?:body|condition|calls|to_apply|\w+_computations?)='
  r'\{?((?:%[\w.-]+(?:, )?)+)'
)


class Array(NamedTuple):
  """An array in the text.

  Attributes:
    shape: Sizes of its axes.
    bytes: Bytes of its elements, without padding.
    in_hbm: Whether it lies in a device's main memory.
  """

  shape: tuple[int, ...]
  bytes: int
  in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a computation, by its parts.

  Attributes:
    root: Not empty if the computation returns it.
    name: Its name.
    types: Types of its results.
    opcode: Its operation, such as ``'fusion'``.
    arguments: Text between the parentheses.
    attributes: Text after them.
  """

  root: str
  name: str
  types: str
  opcode: str
  arguments: str
  attributes: str

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    """Arrays of its results."""
    return tuple(_array(*found) for found in _ARRAY.findall(self.types))

  @functools.cached_property
  def operands(self) -> list[str]:
    """Names of the instructions whose results it reads."""
    return _NAME.findall(self.arguments)

  @property
  def called(self) -> list[str]:
    """Names of the computations that it calls; a loop's condition is first."""
    return _NAME.findall(''.join(_CALLED.findall(self.attributes)))


Computation = dict[str, Instruction]
"""Instructions by name."""
Program = dict[str, Computation]
"""Computations by name; that which starts is called ``ENTRY``."""


def parse(text: str) -> Program:
  """Reads a program from what ``compiled.as_text()`` returns."""
  sizes = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', text[:100000])
  devices = math.prod(map(int, sizes))
  # All devices, in a form that says so.
  groups = f'replica_groups=[1,{devices}]<=[{devices}]'
  program: Program = {}
  computation: Computation = {}
  for line in text.replace('replica_groups={}', groups).splitlines():
    if found := _INSTRUCTION.match(line):
      computation[found[2]] = Instruction(*found.groups(default=''))
    elif found := _COMPUTATION.match(line):
      computation = program.setdefault('ENTRY' if found[1] else found[2], {})
  return program


def _array(dtype: str, sizes: str, layout: str) -> Array:
  shape = tuple(int(size) for size in sizes.split(',') if size)
  digits = re.search(r'\d+', dtype)
  bits = 8 * (dtype == 'pred') if digits is None else int(digits[0])
  # Memory spaces other than 0 are on the chip.
  in_hbm = re.search(r'S\([1-9]\d*\)', layout) is None
  return Array(shape, math.prod(shape) * bits // 8, in_hbm)


def walk(
  program: Program, name: str = 'ENTRY', times: int = 1
) -> Iterator[tuple[Computation, Instruction, int]]:
  """Yields what a run executes: computation, instruction, and how often.

  A fusion is one instruction. Each branch of a conditional counts as taken.

  Args:
    program: The program.
    name: Computation to start with.
    times: How often that is executed.

  Raises:
    ValueError: If the number of turns of a loop is not known.
  """
  for instruction in program[name].values():
    yield program[name], instruction, times
    if instruction.opcode != 'fusion':
      turns = times * _turns(program, instruction)
      for callee in instruction.called:
        yield from walk(program, callee, turns)


def _turns(program: Program, instruction: Instruction) -> int:
  """Returns how often the computations that an instruction calls run."""
  if instruction.opcode != 'while':
    return 1
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
  if known:
    return int(known[1])
  condition = program[instruction.called[0]].values()
  fused = (program[name].values() for x in condition for name in x.called)
  bounds = [
    int(x.arguments)
    for x in itertools.chain(condition, *fused)
    if x.opcode == 'constant' and x.arguments.isdecimal()
  ]
  if not bounds:
    raise ValueError(f'the loop {instruction.name} has no known trip count')
  return max(bounds)
