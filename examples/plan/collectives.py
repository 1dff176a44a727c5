"""What devices send to each other, from a compiled program's HLO."""

from collections.abc import Iterator
import math
import re
from typing import NamedTuple

import numpy as np

from examples.plan import hlo
from examples.plan.hlo import Instruction, Program

KINDS = (
  'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
  'collective-permute',
)  # fmt: skip

_OPCODE = re.compile(f'(?:ragged-)?({"|".join(KINDS)})(-start)?$')
# The forms {{0,1},{2,3}}, [2,2]<=[2,2]T(1,0) and mesh['a'=2,'b'=2] {'a'}.
_LIST = re.compile(r'replica_groups=\{\{([\d,]+)\}')
_IOTA = re.compile(
  r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?'
)
_MESH = re.compile(
  r'replica_groups=mesh\[(.*?)\]'
  r'(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}'
)


class Collective(NamedTuple):
  """A collective operation of a program.

  Attributes:
    kind: One of ``KINDS``.
    shapes: Shapes of the whole arrays that a group shares: of the operands of
      reduce-scatter, of the results of others.
    bytes: Bytes of these arrays.
    executions: How often a run of the program executes it.
    group: Numbers of the devices of the first group, which stands for all; for
      a collective-permute empty.
  """

  kind: str
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  executions: int
  group: tuple[int, ...]

  @property
  def sent_bytes(self) -> float:
    """Bytes that a device sends in all executions, by the ring algorithm."""
    if self.kind == 'collective-permute':
      return float(self.executions * self.bytes)
    passes = 2 if self.kind == 'all-reduce' else 1
    return self.executions * passes * (1 - 1 / len(self.group)) * self.bytes


def collectives(program: Program) -> list[Collective]:
  """Returns the collectives that a run of a program executes.

  A collective that the TPU compiler spreads over several fusions, to compute
  meanwhile, counts once. Its fusion of an all-reduce with a slice of the result
  counts as a reduce-scatter. Those of groups of one device are left out.
  """
  found = (
    _collective(kind, inner, times)
    for _, instruction, times in hlo.walk(program)
    for kind, inner in _parts(program, instruction)
  )
  return [x for x in found if len(x.group) != 1]


def by_kind(found: list[Collective]) -> dict[str, dict[str, float]]:
  """Returns executions and bytes sent of each kind that occurs."""
  totals: dict[str, dict[str, float]] = {}
  for x in sorted(found, key=lambda x: KINDS.index(x.kind)):
    total = totals.setdefault(x.kind, {'executions': 0, 'sent_bytes': 0.0})
    total['executions'] += x.executions
    total['sent_bytes'] += x.sent_bytes
  return totals


def _parts(
  program: Program, instruction: Instruction
) -> Iterator[tuple[str | None, Instruction]]:
  """Yields the collectives of an instruction, with a kind if it decides it."""
  inside, kind = [instruction], None
  if instruction.opcode == 'fusion':
    (name,) = instruction.called
    inside = list(program[name].values())
    # The start of an asynchronous collective stands for all fusions of it.
    if name.startswith('async_collective_fusion') or any(
      '"AsyncCollectiveDone"' in x.attributes for x in inside
    ):
      return
    if name.startswith('all-reduce-scatter'):
      kind = 'reduce-scatter'
  yield from ((kind, x) for x in inside if _OPCODE.match(x.opcode))


def _collective(kind: str | None, x: Instruction, times: int) -> Collective:
  opcode, is_start = _OPCODE.match(x.opcode).groups()
  group, arrays = _group(x.attributes), x.arrays
  if is_start and opcode != 'all-reduce':
    # Operands, results and, of a permute, two more.
    arrays = arrays[len(x.operands) : 2 * len(x.operands)]
  size = sum(array.bytes for array in arrays)
  if opcode == 'reduce-scatter':
    size *= len(group)
  shapes = tuple(array.shape for array in arrays)
  return Collective(kind or opcode, shapes, size, times, group)


def _group(attributes: str) -> tuple[int, ...]:
  """Returns the first group of devices that takes part."""
  if 'source_target_pairs=' in attributes:
    return ()
  if found := _LIST.search(attributes):
    return tuple(_ints(found[1]))
  if found := _IOTA.search(attributes):
    sizes, *order = found.groups()
    return tuple(_iota(*order).reshape(_ints(sizes))[0].tolist())
  if found := _MESH.search(attributes):
    return _mesh_group(*found.groups())
  raise ValueError(f'no replica groups in {attributes[:200]}')


def _mesh_group(
  axes: str, dims: str | None, order: str | None, chosen: str
) -> tuple[int, ...]:
  """Returns the first group along some axes, or parts of them, of a mesh."""
  sizes = {k: int(n) for k, n in re.findall(r"'([^']+)'=(\d+)", axes)}
  places = {name: np.zeros(1, int) for name in sizes}
  # 'x':(2)4 is the part of size 4 of the axis x = 2 x 4 x rest.
  parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
  for name, before, part in parts:
    size = int(part or sizes[name])
    steps = np.arange(size) * (sizes[name] // (int(before or 1) * size))
    places[name] = np.add.outer(places[name], steps).ravel()
  devices = _iota(dims or str(math.prod(sizes.values())), order)
  grid = devices.reshape(tuple(sizes.values()))
  return tuple(grid[np.ix_(*places.values())].ravel().tolist())


def _iota(dims: str, order: str | None) -> np.ndarray:
  """Returns numbers from 0, of a shape and then transposed."""
  shape = _ints(dims)
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return numbers.transpose(_ints(order)) if order else numbers


def _ints(text: str) -> list[int]:
  return [int(x) for x in text.split(',')]
