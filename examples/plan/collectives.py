"""What devices send to each other, from a compiled program's HLO."""

from collections.abc import Iterator
import itertools
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
Groups = tuple[tuple[int, ...], ...]

_OPCODE = re.compile(f'(?:ragged-)?({"|".join(KINDS)})(-start)?$')
_LIST = re.compile(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}')
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
    arrays: Shapes of the whole arrays that a group shares: of the results of
      all-reduce, all-gather, all-to-all and collective-permute, of the operand
      of reduce-scatter.
    bytes: Bytes of these arrays.
    executions: How often a run of the program executes it.
    groups: Numbers of the devices that take part together; for a
      collective-permute empty.
  """

  kind: str
  arrays: tuple[tuple[int, ...], ...]
  bytes: int
  executions: int
  groups: Groups

  @property
  def sent_bytes(self) -> float:
    """Bytes that a device sends in all executions, by the ring algorithm."""
    if self.kind == 'collective-permute':
      return float(self.executions * self.bytes)
    others = 1 - 1 / len(self.groups[0])
    passes = 2 if self.kind == 'all-reduce' else 1
    return self.executions * passes * others * self.bytes


def collectives(text: str | Program) -> list[Collective]:
  """Returns the collectives that a run of a program executes.

  A collective that the TPU compiler spreads over several fusions, to compute
  meanwhile, counts once. Its fusion of an all-reduce with a slice of the result
  counts as a reduce-scatter. Those of groups of one device are left out.

  Args:
    text: What ``compiled.as_text()`` returns, or a program that was read.
  """
  program = hlo.parse(text) if isinstance(text, str) else text
  found = []
  for _, instruction, times in hlo.walk(program):
    for kind, inner in _parts(program, instruction):
      one = _collective(kind, inner, times, program.num_devices)
      if one.kind == 'collective-permute' or len(one.groups[0]) > 1:
        found.append(one)
  return found


def by_kind(found: list[Collective]) -> dict[str, dict[str, float]]:
  """Returns executions and bytes sent of each kind that occurs."""
  return {
    kind: {
      'executions': sum(x.executions for x in found if x.kind == kind),
      'bytes': sum(x.sent_bytes for x in found if x.kind == kind),
    }
    for kind in KINDS
    if any(x.kind == kind for x in found)
  }


def _parts(
  program: Program, instruction: Instruction
) -> Iterator[tuple[str | None, Instruction]]:
  """Yields an instruction, or what is in its fusion; a kind if it has one."""
  if instruction.opcode != 'fusion':
    if _OPCODE.match(instruction.opcode):
      yield None, instruction
    return
  (name,) = instruction.called['calls']
  inside = program.computations[name].values()
  # The start of an asynchronous collective stands for all fusions of it.
  if name.startswith('async_collective_fusion') or any(
    '"AsyncCollectiveDone"' in x.attributes for x in inside
  ):
    return
  kind = 'reduce-scatter' if name.startswith('all-reduce-scatter') else None
  for inner in inside:
    if _OPCODE.match(inner.opcode):
      yield kind, inner


def _collective(
  kind: str | None, instruction: Instruction, times: int, num_devices: int
) -> Collective:
  opcode, is_start = _OPCODE.match(instruction.opcode).groups()
  groups = replica_groups(instruction.attributes, num_devices)
  arrays = instruction.arrays
  if is_start and opcode != 'all-reduce':
    # Operands, results and, of a permute, two more.
    count = len(instruction.operands)
    arrays = arrays[count : 2 * count]
  scale = 1
  if opcode == 'reduce-scatter':
    scale = len(groups[0])
  return Collective(
    kind or opcode,
    tuple(x.shape for x in arrays),
    scale * sum(x.bytes for x in arrays),
    times,
    groups,
  )


def replica_groups(attributes: str, num_devices: int) -> Groups:
  """Returns the devices that take part together.

  Args:
    attributes: Attributes of a collective, in any of the forms of XLA:
      ``{{0,1},{2,3}}``, ``[2,2]<=[2,2]T(1,0)`` and
      ``mesh['a'=2,'b'=2] {'a'}``.
    num_devices: Number of devices that run the program.
  """
  if 'source_target_pairs=' in attributes:
    return ()
  if found := _IOTA.search(attributes):
    return _as_groups(_iota(found[2], found[3]).reshape(_ints(found[1])))
  if found := _MESH.search(attributes):
    return _mesh_groups(*found.groups())
  found = _LIST.search(attributes)
  if not found:
    raise ValueError(f'no replica groups in {attributes[:200]}')
  groups = [_ints(x) for x in re.findall(r'\{([\d,]*)\}', found[1])]
  return tuple(map(tuple, groups)) or (tuple(range(num_devices)),)


def _mesh_groups(
  axes: str, dims: str | None, order: str | None, chosen: str
) -> Groups:
  """Returns the groups along some axes, or parts of them, of a mesh."""
  sizes = {k: int(n) for k, n in re.findall(r"'([^']+)'=(\d+)", axes)}
  ranges: dict[str, list[range]] = {name: [] for name in sizes}
  for name, before, size in re.findall(
    r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen
  ):
    start = int(before or 1)
    ranges[name].append(range(start, start * int(size or sizes[name])))
  shape, is_inside = [], []
  for name, size in sizes.items():
    ends = {1, size} | {x for r in ranges[name] for x in (r.start, r.stop)}
    for start, stop in itertools.pairwise(sorted(ends)):
      shape.append(stop // start)
      is_inside.append(any(start in r for r in ranges[name]))
  devices = _iota(dims or str(math.prod(shape)), order).reshape(shape)
  # Groups last, and within a group the order of the mesh.
  devices = devices.transpose(np.argsort(is_inside, kind='stable'))
  members = math.prod(np.array(shape)[is_inside])
  return _as_groups(devices.reshape(-1, members))


def _iota(dims: str, order: str | None) -> np.ndarray:
  """Returns numbers from 0, of a shape and then transposed."""
  shape = _ints(dims)
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return numbers.transpose(_ints(order)) if order else numbers


def _ints(text: str) -> list[int]:
  return [int(x) for x in text.split(',') if x]


def _as_groups(devices: np.ndarray) -> Groups:
  return tuple(map(tuple, devices.tolist()))
