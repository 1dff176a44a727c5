"""What devices send to each other, from a compiled program's HLO."""

import math
import re
from typing import NamedTuple

import numpy as np

from examples.plan import hlo
from examples.plan.hlo import Computation, Instruction

_OPCODE = re.compile(
  r'(?:ragged-)?(all-reduce|all-gather|reduce-scatter|all-to-all|'
  r'collective-permute)(-start)?$'
)
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

  Its arrays are the whole ones that a group shares: the operands of
  reduce-scatter, the results of others. The first group of devices stands for
  all; for a collective-permute it is empty.
  """

  kind: str  # Its operation, such as 'all-gather'.
  shapes: tuple[tuple[int, ...], ...]
  bytes: int
  executions: int  # How often a run of the program executes it.
  group: tuple[int, ...]

  @property
  def sent_bytes(self) -> float:
    """Bytes that a device sends in all executions, by the ring algorithm."""
    if self.kind == 'collective-permute':
      return float(self.executions * self.bytes)
    passes = 2 if self.kind == 'all-reduce' else 1
    return self.executions * passes * (1 - 1 / len(self.group)) * self.bytes


def collectives(program: Computation) -> list[Collective]:
  """Returns the collectives that a run of a program executes.

  A collective that the TPU compiler spreads over several fusions, to compute
  meanwhile, counts once. Its fusion of an all-reduce with a slice of the result
  counts as a reduce-scatter. Those of groups of one device are left out.
  """
  found = [
    _collective(instruction, inner, times)
    for instruction, times in hlo.walk(program)
    for inner in _executed(instruction)
    if _OPCODE.match(inner.opcode)
  ]
  return [x for x in found if len(x.group) != 1]


def by_kind(found: list[Collective]) -> dict[str, dict[str, float]]:
  """Returns executions and bytes sent of each kind that occurs."""
  totals: dict[str, dict[str, float]] = {}
  for x in found:
    total = totals.setdefault(x.kind, {'executions': 0, 'sent_bytes': 0.0})
    total['executions'] += x.executions
    total['sent_bytes'] += x.sent_bytes
  return totals


def _executed(x: Instruction) -> Computation:
  """Returns what an instruction executes, to be counted."""
  if x.opcode != 'fusion':
    return [x]
  (inside,) = x.called
  # The start of an asynchronous collective stands for all fusions of it.
  is_counted = 'calls=%async_collective_fusion' in x.attributes or any(
    '"AsyncCollectiveDone"' in inner.attributes for inner in inside
  )
  return [] if is_counted else inside


def _collective(outer: Instruction, x: Instruction, times: int) -> Collective:
  """Returns a collective, perhaps in an outer instruction, a fusion."""
  kind, is_start = _OPCODE.match(x.opcode).groups()
  arrays, group = x.arrays, _group(x.attributes)
  if kind == 'reduce-scatter':
    arrays = [array for operand in x.operands for array in operand.arrays]
  elif is_start and kind != 'all-reduce':
    # Operands, results and, of a permute, two more.
    arrays = arrays[len(x.operands) : 2 * len(x.operands)]
  size = sum(array.bytes for array in arrays)
  if 'calls=%all-reduce-scatter' in outer.attributes:
    kind = 'reduce-scatter'
  shapes = tuple(array.shape for array in arrays)
  return Collective(kind, shapes, size, times, group)


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
