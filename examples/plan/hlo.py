"""What a compiled program does, from the text of its HLO.

Loops count as often as they turn: the number stands in the text where the
compiler knows it (``known_trip_count``), else it is the constant that the
condition compares with, as loops of ``jax.lax.scan`` have it.
"""

from collections import Counter
from collections.abc import Iterator
import math
import re
from typing import NamedTuple

_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.-]+) = (.*)')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) .*\{$')
_CALLED = re.compile(
  r'\b(body|condition|calls|to_apply|true_computation|false_computation)='
  r'%?([\w.-]+)|\b(?:branch|called)_computations=\{([^}]*)\}'
)


class Array(NamedTuple):
  """An array in the text.

  Attributes:
    dtype: Data type, as HLO names it.
    shape: Sizes of its axes.
    in_hbm: Whether it lies in a device's main memory.
  """

  dtype: str
  shape: tuple[int, ...]
  in_hbm: bool

  @property
  def bytes(self) -> int:
    """Bytes of its elements, without padding."""
    bits = _BITS.get(self.dtype)
    if bits is None:
      bits = int(re.findall(r'\d+', self.dtype)[0])
    return math.prod(self.shape) * bits // 8


class Instruction(NamedTuple):
  """A line of a computation.

  Attributes:
    name: Its name.
    opcode: What it does, such as ``'fusion'``.
    arrays: Arrays of its result.
    operands: Names of what it reads.
    arguments: Text between the parentheses.
    attributes: Text after them.
    is_root: Whether the computation returns it.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  arguments: str
  attributes: str
  is_root: bool

  @property
  def called(self) -> dict[str, list[str]]:
    """Names of the computations that it calls, by the word before them."""
    found: dict[str, list[str]] = {}
    for word, name, names in _CALLED.findall(self.attributes):
      many = re.findall(r'[\w.-]+', names)
      found.setdefault(word or 'branches', []).extend([name] if name else many)
    return found


class Program(NamedTuple):
  """A compiled program.

  Attributes:
    entry: Name of the computation that starts.
    computations: Instructions of each computation, by name.
    num_devices: Number of devices that run it.
  """

  entry: str
  computations: dict[str, dict[str, Instruction]]
  num_devices: int


def parse(text: str) -> Program:
  """Reads a program.

  Args:
    text: What ``compiled.as_text()`` returns.
  """
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = '', {}
  for line in text.splitlines():
    found = _INSTRUCTION.match(line)
    if found:
      current[found[2]] = _instruction(found[2], found[3], bool(found[1]))
    elif (head := _COMPUTATION.match(line)) and head[2] != 'HloModule':
      current = computations.setdefault(head[2], {})
      entry = head[2] if head[1] else entry
  parts = re.findall(
    r'\b(?:num_partitions|replica_count)=(\d+)', text[:100_000]
  )
  return Program(entry, computations, math.prod(map(int, parts)))


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
  types, rest = _split_type(text)
  opcode, _, rest = rest.partition('(')
  end = _closing(f'({rest}')
  arguments = rest[: end - 1]
  return Instruction(
    name,
    opcode.strip(),
    _arrays(types),
    tuple(re.findall(r'%([\w.-]+)', arguments)),
    arguments,
    rest[end:],
    is_root,
  )


def _split_type(text: str) -> tuple[str, str]:
  """Splits the type of a result from what follows."""
  end = _closing(text) + 1 if text.startswith('(') else text.index(' ')
  return text[:end], text[end:]


def _closing(text: str) -> int:
  """Returns where the parenthesis that opens the text closes."""
  depth = 0
  for found in re.finditer(r'[()]', text):
    depth += 1 if found[0] == '(' else -1
    if depth == 0:
      return found.start()
  raise ValueError(f'a parenthesis is not closed: {text[:80]}')


def _arrays(types: str) -> tuple[Array, ...]:
  return tuple(
    Array(
      dtype,
      tuple(int(size) for size in sizes.split(',') if size),
      re.search(r'S\([1-9]\d*\)', layout) is None,
    )
    for dtype, sizes, layout in _ARRAY.findall(types)
  )


def executions(program: Program) -> Counter[str]:
  """Returns how often a run of the program executes each computation.

  Those inside of a fusion are left out. Each branch of a conditional counts as
  if it were taken.

  Raises:
    ValueError: If it cannot tell how often a loop turns.
  """
  counts: Counter[str] = Counter()

  def visit(name: str, times: int) -> None:
    counts[name] += times
    for instruction in program.computations[name].values():
      if instruction.opcode != 'fusion':
        turns = times * _turns(program, instruction)
        for names in instruction.called.values():
          for callee in names:
            visit(callee, turns)

  visit(program.entry, 1)
  return counts


def walk(program: Program) -> Iterator[tuple[str, Instruction, int]]:
  """Yields each computation's name, instruction, and how often it runs."""
  for name, times in executions(program).items():
    for instruction in program.computations[name].values():
      yield name, instruction, times


def _turns(program: Program, instruction: Instruction) -> int:
  """Returns how often what an instruction calls is executed."""
  if instruction.opcode != 'while':
    return 1
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
  if known:
    return int(known[1])
  (condition,) = instruction.called['condition']
  bounds = list(_constants(program, condition))
  if not bounds:
    raise ValueError(f'the loop {instruction.name} has no known trip count')
  return max(bounds)


def _constants(program: Program, name: str) -> Iterator[int]:
  """Yields the integer constants of a computation and of its fusions."""
  for instruction in program.computations[name].values():
    if instruction.opcode == 'constant' and instruction.arguments.isdecimal():
      yield int(instruction.arguments)
    for callee in instruction.called.get('calls', ()):
      yield from _constants(program, callee)
