import json
import re

import jax
import pytest

from examples.gpt2 import processes
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config


def _initialize(monkeypatch, function):
  monkeypatch.setattr(jax.distributed, 'initialize', function)


def test_without_a_cluster_a_process_is_alone_unless_told_otherwise():
  processes.connect(Config())
  with pytest.raises(UsageError, match='--distributed on: .*--coordinator'):
    processes.connect(Config(distributed='on'))


@pytest.mark.parametrize(
  ('environment', 'visible'),
  [
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x4)'}, 'all'),
    ({'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, 'all'),
    ({'SLURM_STEP_TASKS_PER_NODE': '8(x4)'}, '0'),
    ({'SLURM_STEP_TASKS_PER_NODE': '1,2'}, '0'),
    ({'SLURM_STEP_TASKS_PER_NODE': '1', 'JAX_LOCAL_DEVICE_IDS': '0'}, '0'),
  ],
)
def test_one_process_of_a_node_takes_all_its_gpus(
  environment: dict[str, str], visible: str, monkeypatch
):
  def initialize(*_, **__):  # What jax does for a task of Slurm.
    jax.config.update('jax_cuda_visible_devices', '0')

  _initialize(monkeypatch, initialize)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  try:
    processes.connect(Config())
    assert jax.config.values['jax_cuda_visible_devices'] == visible
  finally:
    jax.config.update('jax_cuda_visible_devices', 'all')


_PROGRAM = """
import json
import pathlib
import sys
import time

from examples.gpt2.config import Config, UsageError
from examples.gpt2 import processes

coordinator, process = sys.argv[1], int(sys.argv[2])
processes.connect(
  Config(coordinator=coordinator, num_processes=2, process_id=process)
)
calls = []


def call(result):
  calls.append(result)
  if isinstance(result, Exception):
    raise result
  return result


def outcome(value):
  try:
    return processes.on_process_0(call, value)
  except Exception as error:
    return [type(error).__name__, str(error)]


try:
  processes.check_same({'seed': 'same', 'width': str(process), 'mesh': ''})
except UsageError as error:
  differ = str(error)
file = pathlib.Path(sys.argv[3])
if process == 1:
  time.sleep(1)
  file.touch()
processes.wait_for_all('file')
waited = file.exists()
values = [None, 'x' * 3000, {'a': [1.5, True]}]
errors = [UsageError('a flag'), FileNotFoundError('a file'), KeyError('a key')]
print(json.dumps({
  'outcomes': [outcome(value) for value in values + errors],
  'calls': len(calls),
  'differ': differ,
  'waited': waited,
}))
processes.print_once('only once')
"""


@pytest.mark.slow
def test_process_0_works_for_all(run_pair, tmp_path):
  outputs = run_pair(_PROGRAM, tmp_path / 'file')
  first, second = (
    json.loads(re.search(r'^{.*}$', x, re.M)[0]) for x in outputs
  )
  assert first['outcomes'][:3] == [None, 'x' * 3000, {'a': [1.5, True]}]
  assert second['outcomes'][:3] == first['outcomes'][:3]
  assert first['outcomes'][3:] == [
    ['UsageError', 'a flag'],
    ['FileNotFoundError', 'a file'],
    ['KeyError', "'a key'"],
  ]
  assert second['outcomes'][3:] == [
    ['UsageError', 'a flag'],
    ['UsageError', 'a file'],
    ['RuntimeError', "KeyError('a key')"],
  ]
  assert (first['calls'], second['calls']) == (6, 0)
  for process, outcome in enumerate((first, second)):
    assert outcome['waited']
    assert outcome['differ'].endswith(f'differ in width (here: {process}).')
  assert [x.count('only once') for x in outputs] == [1, 0]
