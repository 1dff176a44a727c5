"""Steps compiled for devices that are not there, and what is read of them.

Those for TPUs and GPUs run each in a process of its own: it keeps jax to the
CPU.
"""

from collections.abc import Iterator
import json
import math
import os
from pathlib import Path
import re
import subprocess
import sys
import types

import jax
import pytest

from examples.gpt2 import compile_for, hardware
from examples.gpt2.command import UsageError
from examples.gpt2.compile_for import Collective, collectives
from examples.gpt2.hardware import OutOfMemoryError
from examples.gpt2.train import parse

_ROOT = Path(__file__).parents[2]

# What a compiled program sends.

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
  assert compile_for.sent_by_kind(_program(_FUSED)) == {
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


# The command.

_TINY = (
  '--num-layers', '2', '--width', '256', '--num-heads', '4',
  '--context-length', '128', '--vocab-size', '512', '--batch-size', '16',
  '--unroll', '1',
)  # fmt: skip


@pytest.fixture
def emulated_slice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Takes two CPU devices for a TPU slice, of chips with 64 MiB."""
  monkeypatch.setattr(compile_for, 'devices', lambda _: jax.devices()[:2])
  monkeypatch.setattr(hardware, 'memory_bytes', lambda _: 2**26)
  yield
  jax.config.update('jax_enable_compilation_cache', True)


def _report(text: str) -> dict[str, list[str]]:
  """Returns the cells of a report by the first of each line."""
  rows = [re.split('  +', line) for line in text.splitlines() if line]
  return {name: cells for name, *cells in rows}


def _run(*flags: str) -> None:
  compile_for.run(parse([*_TINY, *flags], 'train'), 'v5e:1x2')


@pytest.mark.usefixtures('emulated_slice')
def test_a_report_is_of_the_step_of_the_trainer(capsys):
  _run('--mesh', 'fsdp=2', '--micro-batch-size', '3')
  found = _report(capsys.readouterr().out)
  assert found['mesh'] == ['data=1,fsdp=2,tensor=1']
  assert found['micro-batch size'] == ['2']
  assert found['available memory'] == ['64 MiB']
  # MERIT sends norms only, a step the parameters too.
  assert found['all-gather'][1] == '0 B'
  step, update = found['all']
  assert step.endswith('MiB')
  assert update.endswith('KiB')
  assert found['a device sends'] == ['step', 'update']


@pytest.mark.usefixtures('emulated_slice')
def test_a_step_that_does_not_fit_is_reported_before_the_advice(capsys):
  with pytest.raises(OutOfMemoryError, match='of a device that has 64 MiB'):
    _run('--micro-batch-size', '8', '--vocab-size', '8192')
  assert _report(capsys.readouterr().out)['available memory'] == ['64 MiB']


@pytest.mark.parametrize(
  ('name', 'extra'), [('v5e:2x2', 'tpu-compiler'), ('h100:1x8', 'gpu-compiler')]
)
def test_a_missing_compiler_is_named(monkeypatch, name: str, extra: str):
  monkeypatch.setattr(compile_for, 'missing', lambda _: ['a-compiler'])
  with pytest.raises(UsageError, match=rf"a-compiler: .*'\.\[{extra}\]'"):
    compile_for.devices(name)


def test_a_topology_that_does_not_exist_is_refused(monkeypatch):
  with pytest.raises(UsageError, match='--compile-for v9: there is no such ch'):
    compile_for.devices('v9')
  monkeypatch.setattr(compile_for, 'missing', lambda _: [])
  for name in ('h100', 'h100:8', 'a100:0x8', 'h200:2x2x2'):
    with pytest.raises(UsageError, match=f'--compile-for {name}: .*h100:1x8'):
      compile_for.devices(name)


# Compilers, of which CI installs one at a time.

_for_tpus = pytest.mark.skipif(
  bool(compile_for.missing('v5e')),
  reason="the TPU compiler is missing: pip install -e '.[tpu-compiler]'",
)
_for_gpus = pytest.mark.skipif(
  bool(compile_for.missing('h100')),
  reason="the GPU compiler is missing: pip install -e '.[gpu-compiler]'",
)


def _python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, *args],
    capture_output=True,
    text=True,
    check=False,
    cwd=_ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'} | environment,
  )


def _train(*flags: str) -> subprocess.CompletedProcess[str]:
  return _python('-m', 'examples.gpt2.train', *_TINY, *flags)


@_for_tpus
@pytest.mark.parametrize('name', ['v5e', 'v5e:3x5'])
def test_a_wrong_topology_of_tpus_is_explained(name: str):
  done = _train('--compile-for', name)
  assert done.returncode == 2
  assert f'error: --compile-for {name}: ' in done.stderr
  assert 'v5e:16x16' in done.stderr
  assert 'Traceback' not in done.stderr


@_for_tpus
def test_a_step_for_a_tpu_slice():
  done = _train('--compile-for', 'v5e:2x2', '--mesh', 'fsdp=4')
  assert done.returncode == 0, done.stderr
  found = _report(done.stdout)
  assert found['devices'] == ['4 x TPU v5 lite']
  assert found['available memory'] == ['15.8 GiB']
  # Norms, and nothing of the size of a matrix.
  assert found['all-reduce'][1].endswith('KiB')
  assert found['all'][1] == found['all-reduce'][1]
  assert found['all'][0].endswith('MiB')


@_for_tpus
def test_the_tpu_compiler_says_that_a_step_does_not_fit():
  done = _train(
    '--compile-for', 'v5e:2x2', '--mesh', 'tensor=4', '--num-layers', '1',
    '--width', '16384', '--context-length', '8192', '--micro-batch-size', '4',
  )  # fmt: skip
  assert done.returncode == 4, done.stderr
  assert 'out of memory: RESOURCE_EXHAUSTED' in done.stderr
  assert '--remat dots' in done.stderr


@_for_gpus
@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(kind, marks=() if kind == 'h100' else pytest.mark.slow)
    for kind in ('a100', 'h100', 'h200', 'b200')
  ],
)
def test_a_step_for_two_hosts_of_gpus(kind: str):
  done = _train(
    '--compile-for', f'{kind}:2x2', '--mesh', 'data=2,fsdp=2',
    '--dtype', 'bfloat16',
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  found = _report(done.stdout)
  assert kind.upper() in found['devices'][0]
  assert found['all-gather'][0].endswith('MiB')
  assert found['all'][1] == found['all-reduce'][1]
  assert found['all'][1].endswith('KiB')


_KERNELS = """
import sys
from examples.gpt2 import compile_for
from examples.gpt2.config import resolve
from examples.gpt2.sharding import fit_to_mesh
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse

mesh = make_mesh('fsdp=2', compile_for.devices('h100:1x2'))
config = fit_to_mesh(resolve(parse(sys.argv[1:])), mesh)
trainer = Trainer(config, config.model.vocab_size, mesh)
print(compile_for.compile_step(config, trainer).as_text())
"""


@_for_gpus
def test_kernels_of_gpus_in_bfloat16():
  done = _python(
    '-c', _KERNELS, *_TINY, '--context-length', '384', '--dtype', 'bfloat16'
  )
  text = done.stdout
  assert '__cudnn$fmhaSoftmax"' in text
  assert '__cudnn$fmhaSoftmaxBackward"' in text
  # No logits of queries and keys in memory.
  assert not re.search(r'\[(\d+,)*384,384\]', text)
  # Gradients of embeddings are added up in float32.
  assert not re.search(r' = bf16\S* scatter\(', text)


# The documentation.

_PAGES = ('*.md', 'docs/*.md', 'examples/*/README.md')
_COMMAND = re.compile(
  r'-m examples\.gpt2\.train((?: +[a-z][\w.-]*)?'
  r'(?:\s+--[\w-]+(?: +(?!-)[^\s`"]+)?)+)'
)
_FIT = """
import json, sys
import jax
from examples.gpt2 import sharding
from examples.gpt2.config import resolve
from examples.gpt2.sharding import fit_to_mesh
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse

for flags, num_devices in json.loads(sys.argv[1]).items():
  config = resolve(parse(flags.split()))
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:num_devices])
  Trainer(fit_to_mesh(config, mesh), config.model.vocab_size, mesh)
"""


def _launches() -> dict[str, int]:
  """Returns the flags in the documentation, and how many devices they take."""
  launches = {}
  for path in (path for page in _PAGES for path in _ROOT.glob(page)):
    for flags in _COMMAND.findall(path.read_text().replace('\\\n', ' ')):
      config = parse(flags.split())
      sizes = (config.compile_for or config.mesh).rpartition(':')[2]
      if config.mesh:
        launches[flags] = math.prod(map(int, re.findall(r'\d+', sizes)))
  return launches


def test_documented_launches_fit_their_meshes():
  launches = _launches()
  assert {8, 16, 256} <= set(launches.values())
  done = _python('-c', _FIT, json.dumps(launches), JAX_NUM_CPU_DEVICES='256')
  assert done.returncode == 0, done.stderr
