"""Every documented command that trains on several devices starts and ends.

The environment of Slurm is emulated: its variables are those of real machines,
the devices are emulated ones of a CPU, and the hosts are processes that meet
over loopback.
"""

import json
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from examples.gpt2.run_folder import read_metrics
from examples.gpt2.storage import as_path, make_folder, write_whole
from tests.processes import free_port

_ROOT = Path(__file__).parents[2]
_PAGES = (
  _ROOT / 'README.md', _ROOT / 'examples/gpt2/README.md',
  *_ROOT.glob('docs/*.md'),
)  # fmt: skip
_TINY = shlex.split(
  '--num-layers 2 --width 64 --num-heads 4 --context-length 16 --steps 4 '
  '--vocab-size 288 --batch-size 32 --eval-every 4 --eval-sequences 32 '
  '--diagnostics-every 4 --checkpoint-every 2 --unroll 1 --cache-dir cache'
)
_BUCKET = 'gs://BUCKET'
_SLURM_PORTS = 65535 - 2**12 + 1


def _launch_lines() -> list[str]:
  """Returns the commands of all pages that train on several devices."""
  text = '\n'.join(page.read_text() for page in _PAGES).replace('\\\n', ' ')
  blocks = re.findall(r'```(?:sh|bash|console)\n(.*?)```', text, re.S)
  lines = {' '.join(x.split()) for x in '\n'.join(blocks).splitlines()}
  command = re.compile('examples.gpt2.train.*(--mesh|--coordinator)')
  found = sorted(line for line in lines if command.search(line))
  # More devices are too many to emulate here: see compile_for_test.
  return [line for line in found if _devices(line.split()) <= 16]


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
  job = free_port(_SLURM_PORTS) - _SLURM_PORTS
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


def _start(
  command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.Popen:
  """Starts a documented command at a tiny size, in a folder of its own."""
  *_, program = command[: command.index('-m')]
  assert program in ('python', '.venv/bin/python'), command
  arguments = command[command.index('-m') :]
  with (folder / 'log.txt').open('a') as log:
    return subprocess.Popen(
      [sys.executable, *arguments, *_TINY],
      cwd=folder,
      env=os.environ
      | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
      | environment,
      stdout=log,
      stderr=log,
    )


def _environments(line: str) -> tuple[list[str], list[dict[str, str]]]:
  """Returns a line's command and the environment of each of its processes."""
  if line.startswith('gcloud'):
    command = shlex.split(re.search(r'--command="(.*)"', line)[1])
    command = command[command.index('&&') + 1 :]
    # Here a pod is one process: jax itself finds those of a real one.
    return command, [{'JAX_NUM_CPU_DEVICES': str(_devices(command))}]
  if line.startswith('srun'):
    options, _, rest = line.partition('.venv/bin/python')
    command = shlex.split('.venv/bin/python' + rest)
    return command, _slurm(options, command)
  words = shlex.split(line, comments=True)
  environment = dict(x.split('=') for x in words if re.match('[A-Z_]+=', x))
  command, count = words[len(environment) :], 1
  if '--coordinator' in command:
    port = f'localhost:{free_port()}'
    command[command.index('--coordinator') + 1] = port
    count = int(command[command.index('--num-processes') + 1])
  environment.setdefault('JAX_NUM_CPU_DEVICES', str(_devices(command) // count))
  return command, [environment] * count


def _write_tokens(folder: Path) -> None:
  make_folder(folder)
  generator = np.random.default_rng(0)
  for name in ('train.bin', 'val.bin'):
    tokens = generator.integers(288, size=4000, dtype=np.uint16)
    write_whole(folder / name, tokens.tobytes())


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
def test_documented_launch_lines_train(line, tmp_path, request):
  place = str(tmp_path)
  if _BUCKET in line:
    place = request.getfixturevalue('make_bucket')('gs')
    line = line.replace(_BUCKET, place)
  _write_tokens(as_path(place) / 'tokens')
  line = line.replace('/shared', place)
  command, environments = _environments(line)
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


_RESTARTED = [
  *_TINY, '--steps', '60', '--checkpoint-every', '10', '--eval-every', '60',
  '--mesh', 'fsdp=2',
]  # fmt: skip
_SRUN = """
import json, os, pathlib, signal, subprocess, sys
command = sys.argv[sys.argv.index('-m'):]
tasks = [
  subprocess.Popen([sys.executable, *command], env=os.environ | environment)
  for environment in json.loads(pathlib.Path('tasks.json').read_text())
]
def forward(number, _):
  for task in tasks:
    task.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
statuses = [task.wait() for task in tasks]
sys.exit(max(128 - x if x < 0 else x for x in statuses))
"""
# A VM that is there at the second look, and is preempted when the file is. The
# bucket "local" is a folder. The network fails as often as a file says.
_GCLOUD = """
import pathlib, subprocess, sys, time
calls, state = pathlib.Path('calls'), pathlib.Path('state')
away = pathlib.Path('away')
left = int(away.read_text()) if away.exists() else 0
if left:
  away.write_text(str(left - 1))
  sys.exit('ERROR: network is unreachable')
if sys.argv[1] == 'storage':
  if sys.argv[3].startswith('gs://local/'):
    folder = pathlib.Path(sys.argv[3].removeprefix('gs://'))
  else:
    from etils import epath
    folder = epath.Path(sys.argv[3])
  print(*(f'{path}/' for path in folder.iterdir()), sep='\\n')
  sys.exit()
_, _, kind, verb, *rest = sys.argv[1:]
if verb == 'describe':
  if not state.exists():
    sys.exit('ERROR: NOT_FOUND: Resource')
  print(state.read_text())
  if state.read_text() == 'PROVISIONING':
    state.write_text('ACTIVE')
  sys.exit()
with calls.open('a') as file:
  print(kind, verb, file=file)
if verb == 'create':
  state.write_text('FAILED' if pathlib.Path('refused').exists() else
                   'PROVISIONING')
elif verb == 'delete':
  state.unlink()
else:
  (command,) = [x for x in rest if x.startswith('--command=')]
  # Else the training could take the place of the shell.
  command = command.removeprefix('--command=') + '; exit $?'
  vm = subprocess.Popen(['bash', '-c', command])
  while vm.poll() is None and not pathlib.Path('preempted').exists():
    time.sleep(0.05)
  if vm.poll() is None:
    subprocess.run(['pkill', '-TERM', '-P', str(vm.pid)])
    vm.wait()
    pathlib.Path('preempted').unlink()
    state.write_text('SUSPENDED')
  sys.exit(vm.returncode)
"""
_SCONTROL = 'import sys; print(*sys.argv[1:], file=open("queue", "a"))'


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Path:
  """The working folder, with the programs of clusters emulated."""
  python = tmp_path / 'merit_optax/.venv/bin/python'
  (tmp_path / 'bin').mkdir()
  python.parent.mkdir(parents=True)
  for path, program in {
    tmp_path / 'bin/srun': f'{sys.executable}\n{_SRUN}',
    tmp_path / 'bin/gcloud': f'{sys.executable}\n{_GCLOUD}',
    tmp_path / 'bin/scontrol': f'{sys.executable}\n{_SCONTROL}',
    python: f'/bin/sh\nexec {sys.executable} "$@"',
  }.items():
    path.write_text(f'#!{program}')
    path.chmod(0o755)
  for name, value in {
    'PATH': f'{tmp_path / "bin"}:{os.environ["PATH"]}',
    'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '2', 'SLURM_JOB_ID': '7',
    'NAME': 'vm', 'ZONE': 'zone', 'TYPE': 'v5litepod-4', 'VERSION': 'v2',
    'SETUP': 'true', 'PAUSE': '0.02',
  }.items():  # fmt: skip
    monkeypatch.setenv(name, value)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def _launch(script: str, place: str) -> subprocess.Popen:
  """Starts a script as the documentation does, at a tiny size."""
  (text,) = re.findall(
    rf'```sh\n([^`]*examples/launch/{script} [^`]*)```',
    (_ROOT / 'docs/train.md').read_text(),
  )
  words = shlex.split(text.replace('\\\n', ' '))
  documented = [
    word.replace(_BUCKET, place).replace('/shared', place)
    for word in words[words.index(f'examples/launch/{script}') + 1 :]
  ]
  return _run_script(script, *documented, *_RESTARTED)


def _run_script(script: str, *flags: str) -> subprocess.Popen:
  with Path('log.txt').open('a') as log:
    return subprocess.Popen(
      ['bash', str(_ROOT / 'examples/launch' / script), *flags],
      stdout=log,
      stderr=log,
    )


def _wait_for_a_checkpoint(run: Path, process: subprocess.Popen) -> None:
  while not (run / 'checkpoints' / '10').exists():
    assert process.poll() is None, Path('log.txt').read_text()
    time.sleep(0.05)


def _assert_whole(run: Path) -> None:
  log = Path('log.txt').read_text()
  steps = [line['step'] for line in read_metrics(run / 'metrics.jsonl')]
  assert steps == [*range(1, 61)], log
  assert (run / 'sample.txt').is_file(), log
  assert log.count('going on after') == 1, log


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_time_is_up_and_is_queued_again(
  machine: Path, monkeypatch
):
  _write_tokens(machine / 'tokens')
  tasks = _slurm('--nodes=2 --ntasks-per-node=1', _RESTARTED)
  Path('tasks.json').write_text(json.dumps(tasks))
  process = _launch('slurm.sh', '.')
  _wait_for_a_checkpoint(machine / 'run', process)
  process.send_signal(signal.SIGUSR1)  # Slurm's B: only to the shell.
  assert process.wait() == 0
  log = Path('log.txt').read_text()
  assert Path('queue').read_text() == 'requeue 7\n', log
  assert not (machine / 'run/sample.txt').exists()
  assert _launch('slurm.sh', '.').wait() == 0
  _assert_whole(machine / 'run')
  assert Path('queue').read_text() == 'requeue 7\n'


@pytest.mark.parametrize(
  ('status', 'before', 'after', 'is_queued'),
  [
    (138, [], [], False),  # The tokenization took all the time,
    (138, [], ['0'], False),  # or the compilation.
    (138, [], ['0', '10.orbax-checkpoint-tmp'], False),
    (138, ['80', '90'], ['90'], False),
    (138, ['80', '90'], ['90', '100'], True),
    (1, [], ['0', '10'], False),
  ],
)
def test_a_slurm_job_is_queued_again_after_progress_only(
  machine: Path, status, before, after, is_queued
):
  checkpoints = machine / 'run/checkpoints'
  for name in before:
    (checkpoints / name).mkdir(parents=True)
  made = ' '.join(str(checkpoints / name) for name in after)
  (machine / 'bin/srun').write_text(
    f'#!/bin/sh\nrm -rf {checkpoints}; mkdir -p run {made}; exit {status}'
  )
  flags = ['--out-dir=run'] if is_queued else ['--out-dir', 'run']
  returned = _run_script('slurm.sh', *flags).wait()
  assert returned == (0 if is_queued else status)
  assert Path('queue').exists() == is_queued


@pytest.mark.slow
def test_a_preempted_tpu_is_asked_for_again_and_goes_on(
  machine: Path, make_bucket
):
  place = make_bucket('gs')
  _write_tokens(as_path(place) / 'tokens')
  run = as_path(place) / 'run'
  process = _launch('tpu.sh', place)
  _wait_for_a_checkpoint(run, process)
  Path('preempted').touch()
  assert process.wait() == 0, Path('log.txt').read_text()
  _assert_whole(run)
  once = ['queued-resources create', 'tpu-vm ssh', 'queued-resources delete']
  assert Path('calls').read_text().splitlines() == 2 * once


@pytest.mark.parametrize(
  ('setup', 'status', 'num_starts', 'is_given_back'),
  [
    ('exit 2', 1, 3, True),
    # The connection breaks: the VMs may be healthy.
    ('exit 255', 1, 3, False),
    # It breaks again and again, but there is a new checkpoint each time.
    (
      'n=$(ls local/run/checkpoints | wc -l); [ $n -eq 4 ] && exit 0; '
      'mkdir local/run/checkpoints/${n}0; exit 255',
      0, 5, True,
    ),
    # The network is away.
    ('[ -e away ] && exit 0; echo 6 > away; exit 255', 0, 2, True),
  ],
  ids=['command', 'connection', 'progress', 'network'],
)  # fmt: skip
def test_a_tpu_is_given_back_after_three_failures_without_progress(
  machine: Path, monkeypatch, setup, status, num_starts, is_given_back
):
  monkeypatch.setenv('SETUP', setup)
  (machine / 'local/run/checkpoints').mkdir(parents=True)
  returned = _launch('tpu.sh', 'gs://local').wait()
  log = Path('log.txt').read_text()
  assert returned == status, log
  assert ('three failures without a new checkpoint' in log) == (status == 1)
  assert Path('calls').read_text().splitlines() == [
    'queued-resources create',
    *(num_starts * ['tpu-vm ssh']),
    *(is_given_back * ['queued-resources delete']),
  ]


def test_a_tpu_that_is_refused_is_not_asked_for_for_ever(machine: Path):
  Path('refused').touch()
  assert _launch('tpu.sh', 'gs://local').wait() == 1
  calls = Path('calls').read_text().splitlines()
  assert calls == 3 * ['queued-resources create', 'queued-resources delete']


@pytest.mark.parametrize(
  ('script', 'flags'),
  [
    ('slurm.sh', []),
    ('slurm.sh', ['--out-dir', 'gs://bucket/run']),
    ('tpu.sh', ['--out-dir', 'run']),
  ],
)
def test_scripts_need_a_folder_in_which_they_see_progress(
  machine, script, flags
):
  assert _run_script(script, '--steps', '9', *flags).wait() == 2
  assert 'needs an --out-dir' in Path('log.txt').read_text()
  assert not Path('calls').exists()
