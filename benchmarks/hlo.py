"""What a compiled program sends between devices, from the text of its HLO."""

from collections.abc import Iterator
import math
import re
from typing import NamedTuple

import jax

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) .*\{$', re.MULTILINE)
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\((.*?)\)(?:, (.*))?$', re.MULTILINE
)
_CALLED = re.compile(
  r'\b(?:body|condition|calls|to_apply|\w+_computations?)='
  r'\{?((?:%[\w.-]+(?:, )?)+)'
)
_COLLECTIVE = re.compile(
  r'(?:ragged-)?(all-reduce|all-gather|reduce-scatter|all-to-all|'
  r'collective-permute)(-start)?$'
)


class Collective(NamedTuple):
  """A collective operation of a compiled program.

  Its arrays are the whole ones that a group of devices shares: the operands of
  reduce-scatter, the results of others.
  """

  kind: str  # Its operation, such as 'all-gather'.
  bytes: int  # Of its arrays.
  executions: int  # How often a run of the program executes it.
  group_size: int  # Devices that share the arrays.

  @property
  def sent_bytes(self) -> float:
    """Bytes that a device sends in all executions, by the ring algorithm."""
    if self.kind == 'collective-permute':
      return float(self.executions * self.bytes)
    passes = 2 if self.kind == 'all-reduce' else 1
    return self.executions * passes * (1 - 1 / self.group_size) * self.bytes


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
  """Returns the collectives that a run of a program executes.

  Each branch of a conditional counts as taken. A collective that the TPU
  compiler spreads over several fusions, to compute meanwhile, counts once. Its
  fusion of an all-reduce with a slice of the result counts as a reduce-scatter.
  Raises ``ValueError`` if the number of turns of a loop is not known.
  """
  # Callees come before callers, so the last computation is the entry.
  _, *parts = _COMPUTATION.split(compiled.as_text() or '')
  program = dict(zip(parts[::2], parts[1::2], strict=True))
  return [x for x in _executed(program, parts[-2], 1) if x.group_size > 1]


def sent_by_kind(compiled: jax.stages.Compiled) -> dict[str, float]:
  """Returns the bytes that a device sends, by the kind of collective."""
  sent: dict[str, float] = {}
  for x in collectives(compiled):
    sent[x.kind] = sent.get(x.kind, 0.0) + x.sent_bytes
  return sent


def _executed(
  program: dict[str, str], name: str, times: int
) -> Iterator[Collective]:
  """Yields the collectives of some executions of a computation."""
  for types, opcode, operands, attributes in _INSTRUCTION.findall(
    program[name]
  ):
    if found := _COLLECTIVE.match(opcode):
      sizes, group_size = _sizes(types), _group_size(attributes)
      kind, is_started = found.groups()
      if is_started and kind != 'all-reduce':
        # Operands, results and, of a permute, two more.
        count = operands.count('%')
        sizes = sizes[count : 2 * count]
      size = sum(sizes)
      if kind == 'reduce-scatter':
        size *= group_size
      elif name.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'
      yield Collective(kind, size, times, group_size)
      continue
    turns = _turns(program, attributes) if opcode == 'while' else 1
    for callee in _called(attributes):
      # The fusion that starts a collective stands for the others of it.
      is_counted = (
        callee.startswith('async_collective_fusion')
        or '"AsyncCollectiveDone"' in program[callee]
      )
      if not is_counted:
        yield from _executed(program, callee, times * turns)


def _called(attributes: str) -> list[str]:
  """Returns the computations that an instruction calls."""
  return re.findall(r'%([\w.-]+)', ''.join(_CALLED.findall(attributes)))


def _turns(program: dict[str, str], attributes: str) -> int:
  """Returns the turns of a loop: as the text says, or what it counts up to."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes):
    return int(known[1])
  condition = program[_called(attributes)[0]]
  parts = [condition, *(program[name] for name in _called(condition))]
  bounds = re.findall(r' constant\((\d+)\)', ''.join(parts))
  if not bounds:
    raise ValueError(f'a loop has no known trip count: {attributes[:200]}')
  return max(map(int, bounds))


def _sizes(types: str) -> list[int]:
  """Returns the bytes of arrays, from the text of their types."""
  return [
    math.prod(int(n) for n in shape.split(',') if n) * _bits(dtype) // 8
    for dtype, shape in re.findall(r'([a-z]\w*)\[([\d,]*)\]', types)
  ]


def _bits(dtype: str) -> int:
  """Returns the bits of an element; a token has none."""
  digits = re.search(r'\d+', dtype.replace('pred', 'u8'))
  return int(digits[0]) if digits else 0


def _group_size(attributes: str) -> int:
  """Returns how many devices share the arrays of a collective.

  They stand as {{0,1},{2,3}}, [2,2]<=[2,2]T(1,0), mesh['a'=2,'b'=2] {'a'} or,
  for a part of size 4 of an axis, mesh['a'=8] {'a':(2)4}.
  """
  if 'source_target_pairs=' in attributes:
    return 2
  if found := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
    return found[1].count(',') + 1
  if found := re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes):
    return int(found[1])
  found = re.search(r'replica_groups=mesh\[(.*?)\].*? \{(.*?)\}', attributes)
  if not found:
    raise ValueError(f'no replica groups in {attributes[:200]}')
  sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
  chosen = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
  return math.prod(int(part or sizes[axis]) for axis, part in chosen)
