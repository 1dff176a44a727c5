"""What is read of the text of compiled programs."""

import re
import types

import pytest

from benchmarks.hlo import Collective, collectives, sent_by_kind

_NESTED = """
  HloModule step, is_scheduled=true, num_partitions=8

  %add (a: f32[], b: f32[]) -> f32[] {
    %a = f32[] parameter(0)
    %b = f32[] parameter(1)
    ROOT %sum = f32[] add(%a, %b)
  }

  %less (i: s32[], n: s32[]) -> pred[] {
    %i = s32[] parameter(0)
    %n = s32[]{:T(128)} constant(5)
    ROOT %lt = pred[] compare(%i, %n), direction=LT
  }

  %inner_condition (p: (s32[], bf16[4,6])) -> pred[] {
    %p = (s32[], bf16[4,6]{1,0:T(8,128)(2,1)}) parameter(0)
    %i = s32[] get-tuple-element(%p), index=0
    ROOT %fused = pred[] fusion(%i), kind=kLoop, calls=%less
  }

  %inner (p: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
    %p = (s32[], bf16[4,6]{1,0:T(8,128)(2,1)}) parameter(0)
    %i = s32[] get-tuple-element(%p), index=0
    %x = bf16[4,6]{1,0} get-tuple-element(%p), index=1
    %kernel = bf16[4,6]{1,0} custom-call(%x), custom_call_target="kernel", \
backend_config={"text": "
}
"}
    %all-reduce.1 = bf16[4,6]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), \
channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
    ROOT %t = (s32[], bf16[4,6]) tuple(%i, %all-reduce.1)
  }

  %outer (p: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
    %p = (s32[], bf16[4,6]) parameter(0)
    ROOT %while.1 = (s32[], bf16[4,6]{1,0}) while(%p), \
condition=%inner_condition, body=%inner
  }

  %outer_condition (p: (s32[], bf16[4,6])) -> pred[] {
    ROOT %true = pred[] constant(true)
  }

  ENTRY %main (x: bf16[4,6]) -> (s32[], bf16[4,6]) {
    %x = bf16[4,6]{1,0} parameter(0)
    %zero = s32[] constant(0)
    %t = (s32[], bf16[4,6]) tuple(%zero, %x)
    %gather-start = (bf16[4,6], bf16[8,6]) all-gather-start(%x), \
channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}
    %gather-done = bf16[8,6] all-gather-done(%gather-start)
    ROOT %while.2 = (s32[], bf16[4,6]) while(%t), \
condition=%outer_condition, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  }
"""

_FUSED = """
  HloModule step, num_partitions=4

  %async (p: f32[8]) -> (f32[8], f32[32]) {
    %p = f32[8] parameter(0)
    %g.1 = f32[32] all-gather(%p), channel_id=9, \
replica_groups=[1,4]<=[4], dimensions={0}
    ROOT %c.1 = (f32[8], f32[32]) custom-call(%g.1), \
custom_call_target="AsyncCollectiveStart"
  }

  %async_collective_fusion.1 (p: f32[8]) -> f32[32] {
    %p = f32[8] parameter(0)
    ROOT %g.2 = f32[32] all-gather(%p), channel_id=9, \
replica_groups=[1,4]<=[4], dimensions={0}
  }

  %done (p: f32[8]) -> f32[32] {
    %p = f32[8] parameter(0)
    %g.3 = f32[32] all-gather(%p), channel_id=9, \
replica_groups=[1,4]<=[4], dimensions={0}
    ROOT %c.2 = f32[32] custom-call(%g.3), \
custom_call_target="AsyncCollectiveDone"
  }

  %all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
    %p = f32[8,4] parameter(0)
    %z = s32[] constant(0)
    %r = f32[8,4] all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}
    ROOT %s = f32[2,4] dynamic-slice(%r, %z, %z), dynamic_slice_sizes={2,4}
  }

  ENTRY %main (x: f32[8], y: f32[8,4]) -> f32[2,4] {
    %x = f32[8] parameter(0)
    %y = f32[8,4] parameter(1)
    %start = (f32[8], f32[32]) fusion(%x), kind=kCustom, calls=%async
    %beside = f32[32] fusion(%x), calls=%async_collective_fusion.1
    %end = f32[32] fusion(%x), calls=%done
    %alone = f32[8] all-reduce(%x), replica_groups={{0},{1},{2},{3}}
    %permute = (f32[8], f32[8], u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), channel_id=4, source_target_pairs={{0,1},{1,0}}
    ROOT %out = f32[2,4] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  }
"""


def _program(text: str) -> types.SimpleNamespace:
  """Returns what has the text of a compiled program."""
  text = re.sub('^  ', '', text, flags=re.MULTILINE)
  return types.SimpleNamespace(as_text=lambda: text)


def _instruction(types_and_call: str, attributes: str):
  return _program(f"""
  HloModule step

  ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
    %x = f32[8,4] parameter(0)
    ROOT %y = {types_and_call}(%x), channel_id=1, {attributes}
  }}
""")


def test_collectives_of_nested_loops():
  gather, reduce = collectives(_program(_NESTED))
  assert gather == Collective('all-gather', 96, 1, 2)
  assert gather.sent_bytes == 48
  assert reduce == Collective('all-reduce', 48, 15, 4)
  assert reduce.sent_bytes == 15 * 48 * 2 * 3 / 4


def test_a_loop_of_unknown_length_is_refused():
  text = _NESTED.replace('constant(5)', 'parameter(1)')
  with pytest.raises(ValueError, match='known trip count'):
    collectives(_program(text))


def test_a_reduce_scatter_counts_as_its_operand():
  (found,) = collectives(
    _instruction('f32[2,4] reduce-scatter', 'replica_groups={{0,1,2,3}}')
  )
  assert found == Collective('reduce-scatter', 128, 1, 4)


def test_collectives_in_fusions_of_the_tpu_compiler():
  assert sent_by_kind(_program(_FUSED)) == {
    'all-gather': 4 * 32 * 3 / 4,
    'reduce-scatter': 4 * 32 * 3 / 4,
    'collective-permute': 32,
  }


@pytest.mark.parametrize(
  ('dtype', 'size'),
  [('pred', 8), ('s4', 4), ('f8e4m3fn', 8), ('bf16', 16), ('f64', 64)],
)
def test_bytes_of_data_types(dtype: str, size: int):
  (found,) = collectives(
    _instruction(f'{dtype}[2,4]{{1,0}} all-reduce', 'replica_groups={{0,1}}')
  )
  assert found.bytes == size


@pytest.mark.parametrize(
  ('groups', 'size'),
  [
    ('{{0,1},{2,3}}', 2),
    ('[4,3]<=[4,3]T(1,0)', 3),
    ("mesh['a'=2,'b'=3] {'b'}", 3),
    ("mesh['a'=8] {'a':(2)4}", 4),
    ("mesh['a'=2,'b'=3], device_ids=([2,3]T(1,0)) {'a'}", 2),
    ("mesh['a'=8,'b'=3] {'a':(2)2,'b'}", 6),
  ],
)
def test_devices_of_a_group(groups: str, size: int):
  attributes = f'replica_groups={groups}, use_global_device_ids=true'
  (found,) = collectives(_instruction('f32[8,4] all-reduce', attributes))
  assert found.group_size == size
