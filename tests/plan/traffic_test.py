import jax

from examples.plan import hlo
from examples.plan.traffic import hbm_bytes

_LOOP = """
HloModule step

%slice (p: f32[10,64], i: s32[]) -> f32[1,64] {
  %p = f32[10,64] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[10,64] bitcast(%p)
  ROOT %s = f32[1,64] dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,64}
}

%update (p: f32[10,64], u: f32[1,64], i: s32[]) -> f32[10,64] {
  %p = f32[10,64] parameter(0)
  %u = f32[1,64] parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[10,64] dynamic-update-slice(%p, %u, %i, %i)
}

%less (p: (s32[], f32[10,64])) -> pred[] {
  ROOT %n = s32[] constant(10)
}

%body (p: (s32[], f32[10,64])) -> (s32[], f32[10,64]) {
  %p = (s32[], f32[10,64]) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%p), index=0
  %x = f32[10,64] get-tuple-element(%p), index=1
  %y = f32[1,64] fusion(%x, %i), kind=kLoop, calls=%slice
  %c = (f32[1,64]{1,0:S(1)}, f32[1,64], u32[]{:S(2)}) copy-start(%y)
  %on-chip = f32[1,64]{1,0:S(1)} copy-done(%c)
  %z = f32[1,64]{1,0:S(1)} add(%on-chip, %on-chip)
  %x2 = f32[10,64] fusion(%x, %z, %i), kind=kLoop, calls=%update
  ROOT %t = (s32[], f32[10,64]) tuple(%i, %x2)
}

ENTRY %main (x: f32[10,64]) -> (s32[], f32[10,64]) {
  %x = f32[10,64] parameter(0)
  %zero = s32[]{:S(6)} constant(0)
  %t = (s32[], f32[10,64]) tuple(%zero, %x)
  ROOT %w = (s32[], f32[10,64]) while(%t), condition=%less, body=%body
}
"""


def test_slices_count_and_memory_on_chip_does_not():
  # The slice is read and written, copied to the chip, added there, and written
  # in place of another.
  assert hbm_bytes(hlo.parse(_LOOP)) == 10 * (2 + 1 + 0 + 1) * 4 * 64


def test_without_loops_it_is_what_xla_says():
  x = jax.ShapeDtypeStruct((256, 256), 'float32')
  compiled = jax.jit(lambda x, y: x * 2 + y).lower(x, x).compile()
  expected = compiled.cost_analysis()['bytes accessed']
  assert hbm_bytes(hlo.parse(compiled.as_text())) == expected == 3 * 4 * 256**2
