"""Plans for GPUs, each in a process of its own: it keeps jax to the CPU."""

from pathlib import Path
import re

import pytest

from examples.gpt2.config import UsageError
from examples.plan import gpus, topology

_needs_compiler = pytest.mark.skipif(
  bool(gpus.missing()),
  reason="the compiler for GPUs is missing: pip install -e '.[plan-cuda]'",
)
_TINY = (
  '--num-layers', '2', '--width', '256', '--num-heads', '4',
  '--context-length', '256', '--vocab-size', '512', '--batch-size', '32',
  '--dtype', 'bfloat16',
)  # fmt: skip


@pytest.mark.parametrize('name', ['h100', 'h100:8', 'a100:0x8', 'h200:2x2x2'])
def test_a_wrong_topology_is_explained(name: str):
  with pytest.raises(UsageError, match=f'--topology {name}: .*h100:1x8'):
    topology.devices(name)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(gpus, 'missing', lambda: ['jax_cuda12_plugin'])
  with pytest.raises(UsageError, match=r'jax_cuda12_plugin.*plan-cuda'):
    topology.devices('h100:1x8')


@_needs_compiler
@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(kind, marks=() if kind == 'h100' else pytest.mark.slow)
    for kind in ('a100', 'h100', 'h200', 'b200')
  ],
)
def test_a_plan_of_two_hosts(kind: str, results_of):
  plan = results_of(
    'examples.plan', *_TINY, '--topology', f'{kind}:2x2', '--mesh',
    'data=2,fsdp=2', '--network', '0.001',
  )  # fmt: skip
  assert kind.upper() in plan['device_kind']
  assert plan['jax-cuda12-plugin']
  assert plan['fits']
  assert {'all-gather', 'all-reduce'} <= set(plan['collectives'])
  # At least the gradients pass between the hosts, half of them on each GPU.
  gradients = plan['memory']['parameters']
  assert plan['network_seconds'] > gradients / 2 / 1e6
  # Norms, and nothing of the size of a matrix.
  assert set(plan['update']['collectives']) == {'all-reduce'}
  assert plan['update']['sent_bytes'] < 0.1 * gradients


_COMPILE = """
import sys

from examples.gpt2.config import Config
from examples.gpt2.devices import sharding
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import Trainer
from examples.plan import gpus, programs

dtype, mesh = sys.argv[1:]
devices = gpus.devices('h100:1x2' if mesh else 'h100:1x1')
config = resolve(Config(
  num_layers=2, num_heads=4, width=256, context_length=384, vocab_size=512,
  batch_size=16, micro_batch_size=4, dtype=dtype, mesh=mesh,
))
mesh = sharding.make_mesh(config.mesh, devices)
trainer = Trainer(config, config.vocab_size, mesh)
print(programs.compile_step(config, trainer).as_text())
"""


@_needs_compiler
def test_kernels_in_bfloat16(run):
  text = run('-c', _COMPILE, 'bfloat16', 'fsdp=2').stdout
  assert '__cudnn$fmhaSoftmax"' in text
  assert '__cudnn$fmhaSoftmaxBackward"' in text
  # No logits of queries and keys in memory.
  assert not re.search(r'\[(\d+,)*384,384\]', text)
  assert _scattered(text) == ['s32'] * 4


@_needs_compiler
def test_in_float32_only_integers_are_added_in_any_order(run, tmp_path: Path):
  flags = f'--xla_dump_to={tmp_path}'
  text = run('-c', _COMPILE, 'float32', '', XLA_FLAGS=flags).stdout
  # The gradients of two embeddings, in two digits.
  assert _scattered(text) == ['s32'] * 4
  kernels = '\n'.join(x.read_text() for x in tmp_path.glob('*.ptx'))
  atomic = set(re.findall(r'\b(?:atom|red)\.\S*', kernels))
  assert atomic
  assert all(x.endswith('add.u32') for x in atomic)


def _scattered(text: str) -> list[str]:
  """Returns the dtypes of what is scattered, with atomic operations."""
  return re.findall(r' = (\w+)\S* scatter\(', text)
