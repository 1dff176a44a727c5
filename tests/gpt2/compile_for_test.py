"""Steps compiled for devices that are not there.

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

import jax
import pytest

from examples.gpt2 import compile_for, hardware
from examples.gpt2.command import UsageError
from examples.gpt2.hardware import OutOfMemoryError
from examples.gpt2.train import parse

_ROOT = Path(__file__).parents[2]

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
  compile_for.compile_run(parse([*_TINY, *flags], 'train'), 'v5e:1x2')


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
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse

mesh = make_mesh('fsdp=2', compile_for.devices('h100:1x2'))
config = resolve(parse(sys.argv[1:]), mesh)
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
from examples.gpt2.resolve import resolve
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse

for flags, num_devices in json.loads(sys.argv[1]).items():
  config = resolve(parse(flags.split()))
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:num_devices])
  Trainer(resolve(config, mesh), config.model.vocab_size, mesh)
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


@pytest.mark.parametrize('name', ['v5e:0x4', 'v5e:2x2x2', 'v4:2x2', 'v6e:'])
def test_slices_that_cannot_be_are_refused(name: str, monkeypatch):
  # libtpu, which is not asked, would end the process or take them.
  monkeypatch.setattr(compile_for, 'missing', lambda _: [])
  with pytest.raises(UsageError, match=f'{name}: a slice of .* axes'):
    compile_for.devices(name)
