"""Every documented command that trains on several devices starts and ends.

The environments of a TPU pod and of Slurm are emulated: their variables and
metadata are those of real machines, the devices are emulated ones of a CPU, and
the hosts are processes that meet over loopback.
"""

import http.server
import json
import os
from pathlib import Path
import re
import shlex
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from examples.gpt2.storage import as_path, make_folder, write_whole

_ROOT = Path(__file__).parents[2]
_PAGES = ['README.md', 'examples/gpt2/README.md', *(
  str(path.relative_to(_ROOT)) for path in sorted(_ROOT.glob('docs/*.md'))
)]  # fmt: skip
_TINY = shlex.split(
  '--num-layers 2 --width 64 --num-heads 4 --context-length 16 --steps 4 '
  '--vocab-size 288 --batch-size 32 --eval-every 4 --eval-sequences 32 '
  '--watch-every 4 --checkpoint-every 2 --unroll 1 --cache-dir cache'
)
# The machine of a test has no TPU, so jax is told to ask for metadata.
_ON_TPU = """
import os, runpy, sys
import jax
del os.environ['TPU_SKIP_MDS_QUERY']
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""
_BUCKET = 'gs://BUCKET'
_SLURM_PORTS = 65535 - 2**12 + 1


def _launch_lines() -> list[str]:
  """Returns the commands of all pages that train on several devices."""
  found = []
  for page in _PAGES:
    text = (_ROOT / page).read_text()
    for block in re.findall(r'```(?:sh|bash|console)\n(.*?)```', text, re.S):
      lines = block.replace('\\\n', ' ').splitlines()
      found += [
        ' '.join(line.split())
        for line in lines
        if 'examples.gpt2.train' in line
        and ('--mesh' in line or '--coordinator' in line)
      ]
  return sorted(set(found))


def _free_port(first: int = 0) -> int:
  """Returns a port that nobody listens on, from ``first`` on."""
  for port in range(first, 65535) if first else [0]:
    with socket.socket() as listener:
      try:
        listener.bind(('localhost', port))
      except OSError:
        continue
      return listener.getsockname()[1]
  raise AssertionError('no port is free')


class _Metadata(http.server.BaseHTTPRequestHandler):
  """The metadata server of a TPU VM, for one worker of a pod."""

  values: dict[str, str]

  def do_GET(self):
    value = self.values.get(self.path.rsplit('/', 1)[-1])
    self.send_response(404 if value is None else 200)
    self.end_headers()
    self.wfile.write((value or '').encode())

  def log_message(self, *_):
    pass


@pytest.fixture
def metadata():
  """Starts metadata servers; returns the address of that of a worker."""
  servers = []

  def start(worker: int, workers: int) -> str:
    values = {
      'agent-worker-number': str(worker),
      'worker-network-endpoints': ','.join(['127.0.0.1'] * workers),
      'tpu-env': f"WORKER_ID: '{worker}'",
    }
    handler = type('Handler', (_Metadata,), {'values': values})
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    servers.append(server)
    return f'127.0.0.1:{server.server_port}'

  yield start
  for server in servers:
    server.shutdown()
    server.server_close()


def _devices(command: list[str]) -> int:
  """Returns the number of devices that a command's mesh needs."""
  mesh = command[command.index('--mesh') + 1]
  return int(np.prod([int(x) for x in re.findall(r'=(\d+)', mesh)]))


def _slurm(options: str, command: list[str]) -> list[dict[str, str]]:
  """Returns the environment of each task of srun."""
  nodes, per_node = (
    int(re.search(rf'--{name}=(\d+)', options)[1])
    for name in ('nodes', 'ntasks-per-node')
  )
  tasks = nodes * per_node
  job = _free_port(_SLURM_PORTS) - _SLURM_PORTS
  return [
    {
      'SLURM_JOB_ID': str(job),
      'SLURM_STEP_NODELIST': 'localhost',
      'SLURM_NTASKS': str(tasks),
      'SLURM_PROCID': str(task),
      'SLURM_LOCALID': str(task % per_node),
      'SLURM_STEP_NUM_NODES': str(nodes),
      'SLURM_STEP_TASKS_PER_NODE': f'{per_node}(x{nodes})',
      'JAX_NUM_CPU_DEVICES': str(_devices(command) // tasks),
    }
    for task in range(tasks)
  ]


def _tpu_pod(command: list[str], metadata) -> list[dict[str, str]]:
  """Returns the environment of each worker of a pod with four chips a host."""
  workers, port = _devices(command) // 4, _free_port()
  return [
    {
      'GCE_METADATA_IP': metadata(worker, workers),
      'JAX_COORDINATOR_PORT': str(port),
      'JAX_FORCE_TPU_INIT': '1',
      'JAX_NUM_CPU_DEVICES': '4',
    }
    for worker in range(workers)
  ]


def _start(
  command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.Popen:
  """Starts a documented command at a tiny size, in a folder of its own."""
  *_, program = command[: command.index('-m')]
  assert program in ('python', '.venv/bin/python'), command
  arguments = command[command.index('-m') :]
  start = arguments
  if 'GCE_METADATA_IP' in environment:
    start = ['-c', _ON_TPU, *arguments[1:]]
  with (folder / 'log.txt').open('a') as log:
    return subprocess.Popen(
      [sys.executable, *start, *_TINY],
      cwd=folder,
      env=os.environ
      | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
      | environment,
      stdout=log,
      stderr=log,
    )


def _environments(
  line: str, metadata
) -> tuple[list[str], list[dict[str, str]]]:
  """Returns a line's command and the environment of each of its processes."""
  if line.startswith('gcloud'):
    command = shlex.split(re.search(r'--command="(.*)"', line)[1])
    command = command[command.index('&&') + 1 :]
    return command, _tpu_pod(command, metadata)
  if line.startswith('srun'):
    options, _, rest = line.partition('.venv/bin/python')
    command = shlex.split('.venv/bin/python' + rest)
    return command, _slurm(options, command)
  words = shlex.split(line, comments=True)
  environment = dict(x.split('=') for x in words if re.match('[A-Z_]+=', x))
  command = words[len(environment) :]
  if '--coordinator' in command:
    return command, _given_processes(command)
  environment.setdefault('JAX_NUM_CPU_DEVICES', str(_devices(command)))
  return command, [environment]


def _given_processes(command: list[str]) -> list[dict[str, str]]:
  """Sets the port of a command, and returns an environment for each process."""
  place = command.index('--coordinator') + 1
  command[place] = f'localhost:{_free_port()}'
  count = int(command[command.index('--num-processes') + 1])
  each = str(_devices(command) // count)
  return [{'JAX_NUM_CPU_DEVICES': each} for _ in range(count)]


def _out_dir(command: list[str], folder: Path) -> Path:
  """Returns where a command that ran in a folder has written its results."""
  if '--out-dir' in command:
    return as_path(command[command.index('--out-dir') + 1])
  (config,) = folder.rglob('config.json')
  return config.parent


@pytest.mark.slow
@pytest.mark.parametrize(
  'line', _launch_lines(), ids=lambda line: line.split()[0]
)
def test_documented_launch_lines_train(
  line: str, tmp_path: Path, metadata, request
):
  place = str(tmp_path)
  if _BUCKET in line:
    place = request.getfixturevalue('make_bucket')('gs')
    line = line.replace(_BUCKET, place)
  generator = np.random.default_rng(0)
  for name in ('train.bin', 'val.bin'):
    tokens = generator.integers(288, size=4000, dtype=np.uint16)
    make_folder(as_path(place) / 'tokens')
    write_whole(as_path(place) / 'tokens' / name, tokens.tobytes())
  line = line.replace('/shared', place)
  command, environments = _environments(line, metadata)
  running = []
  for number, environment in enumerate(environments):
    if '--process-id' in command:
      command[command.index('--process-id') + 1] = str(number)
    running.append(_start(command, environment, tmp_path))
  try:
    statuses = [process.wait(timeout=400) for process in running]
  finally:
    for process in running:
      process.kill()
  log = (tmp_path / 'log.txt').read_text()
  assert not any(statuses), log
  assert log.count('validation loss  ') == 1, log
  run = _out_dir(command, tmp_path)
  settings = json.loads((run / 'config.json').read_text())
  assert settings['processes'] == len(environments)
  assert np.prod(list(settings['mesh'].values())) == _devices(command)
  assert (run / 'sample.txt').is_file()


def test_launch_lines_of_all_kinds_are_documented():
  lines = _launch_lines()
  for start in ('srun', 'gcloud', 'JAX_NUM_CPU_DEVICES', 'python'):
    assert any(line.startswith(start) for line in lines), start
  assert any('--coordinator' in line for line in lines)
