import pytest

from examples.gpt2 import hardware
from examples.plan import passes
from examples.plan.flops import Product

_TPU, _H100 = 'TPU v5 lite', 'NVIDIA H100 80GB HBM3'


def _passes(kind: str, *product) -> float:
  return passes.passes(
    Product(1.0, 1, *product), hardware.find_chip(kind), kind
  )


@pytest.mark.parametrize(
  ('dtypes', 'precision', 'expected'),
  [
    (('f32', 'f32'), ('default', 'default'), 1),
    (('f32', 'f32'), ('highest', 'highest'), 6),
    # bfloat16 has one part, whatever is asked for.
    (('bf16', 'bf16'), ('highest', 'highest'), 1),
    (('bf16', 'f32'), ('high', 'high'), 2),
    (('f32', 'f32'), ('highest', 'high'), 5),
    (('s8', 's8'), ('default', 'default'), 1),
  ],
)
def test_a_tpu_multiplies_float32_in_parts(dtypes, precision, expected: int):
  assert _passes(_TPU, dtypes, precision) == expected


@pytest.mark.parametrize(
  ('dtypes', 'precision', 'algorithm', 'expected'),
  [
    ('bf16', 'highest', '', 1),
    ('f32', 'default', '', 2),
    ('f32', 'highest', '', 989 / 67),
    ('f32', 'default', 'dot_bf16_bf16_f32_x6', 6),
    ('f32', 'default', 'dot_tf32_tf32_f32_x3', 6),
    ('f32', 'default', 'dot_f32_f32_f32', 989 / 67),
  ],
)
def test_a_gpu_multiplies_float32_as_tf32_or_slowly(
  dtypes: str, precision: str, algorithm: str, expected: float
):
  found = _passes(_H100, (dtypes,) * 2, (precision,) * 2, algorithm)
  assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
  ('kind', 'teraflops'),
  [('NVIDIA A100-SXM4-80GB', 19.5), (_H100, 67), ('NVIDIA H200', 67),
   ('NVIDIA B200', 75)],
)  # fmt: skip
def test_rates_of_float32_are_those_of_the_data_sheets(kind, teraflops):
  chip = hardware.find_chip(kind)
  times = _passes(kind, ('f32', 'f32'), ('highest', 'highest'))
  assert chip.flops / times == pytest.approx(teraflops * 1e12, rel=0.01)


def test_bfloat16_flops_are_of_all_executions():
  default = ('default', 'default')
  products = [
    Product(10.0, 3, ('bf16', 'bf16'), default),
    Product(5.0, 2, ('f32', 'f32'), default),
  ]
  count = passes.bfloat16_flops(products, hardware.find_chip(_H100), _H100)
  assert count == 10 * 3 + 2 * 5 * 2
