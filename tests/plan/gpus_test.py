"""Plans for GPUs, each in a process of its own: it keeps jax to the CPU."""

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
from examples.gpt2.config import Config, change
from examples.plan import gpus, programs

config = change(
  Config(),
  num_layers=2, num_heads=4, width=256, context_length=384, vocab_size=512,
  batch_size=16, micro_batch_size=4, dtype='bfloat16', mesh='fsdp=2',
)
trainer = programs.make_trainer(config, gpus.devices('h100:1x2'))
print(programs.compile_step(*trainer).as_text())
"""


@_needs_compiler
def test_kernels_in_bfloat16(run):
  text = run('-c', _COMPILE).stdout
  assert '__cudnn$fmhaSoftmax"' in text
  assert '__cudnn$fmhaSoftmaxBackward"' in text
  # No logits of queries and keys in memory.
  assert not re.search(r'\[(\d+,)*384,384\]', text)
  # Gradients of embeddings are added up in float32.
  assert not re.search(r' = bf16\S* scatter\(', text)
