"""Plans for TPUs, each in a process of its own: it keeps jax to the CPU."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="the TPU compiler is missing: pip install -e '.[pod]'",
)
_TINY = (
  '--num-layers', '2', '--width', '256', '--num-heads', '4',
  '--context-length', '128', '--vocab-size', '512', '--batch-size', '16',
  '--unroll', '1',
)  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('v5e', 'v5e:16x16'),
    ('v5e:3x5', 'v5e:16x16'),
    ('gpu:2x2', 'v5e:16x16'),
    ('TPU7x:2x2x1', 'not known'),
  ],
)
def test_a_topology_without_a_plan_is_explained(run, name: str, words: str):
  done = run('-m', 'examples.plan', '--topology', name)
  assert done.returncode == 2
  assert f'error: --topology {name}: ' in done.stderr
  assert words in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_plan_of_a_small_slice(results_of):
  results = results_of(
    'examples.plan', *_TINY, '--topology', 'v5e:2x2', '--mesh', 'fsdp=4',
    '--optimizer', 'merit',
  )  # fmt: skip
  assert results['device_kind'] == 'TPU v5 lite'
  assert results['fits']
  memory, update = results['memory'], results['update']
  moments = pytest.approx(2 * memory['parameters'], rel=1e-3)
  assert memory['optimizer_state'] == moments
  # Norms, and nothing of the size of a matrix.
  assert set(update['collectives']) == {'all-reduce'}
  assert 0 < update['sent_bytes'] < 0.1 * memory['parameters']
  assert 0 < results['update_share'] < 1


def test_the_compiler_says_that_a_step_does_not_fit(run):
  done = run(
    '-m', 'examples.plan', *_TINY, '--topology', 'v5e:2x2',
    '--mesh', 'tensor=4', '--num-layers', '1', '--width', '16384',
    '--context-length', '8192', '--micro-batch-size', '4', '--quick',
  )  # fmt: skip
  assert done.returncode == 4, done.stderr
  assert 'out of memory: RESOURCE_EXHAUSTED' in done.stderr
  assert '--remat dots' in done.stderr


def test_merit_moves_less_than_lamb(results_of):
  results = results_of(
    'benchmarks.pod_update', '--topologies', 'v5e:4x4', '--rows', '8192',
    '--columns', '4096',
  )  # fmt: skip
  rows = {row['optimizer']: row for row in results['rows']}
  moved = {name: row['bytes moved per parameter'] for name, row in rows.items()}
  assert moved['adamw'] <= 28.1
  assert moved['merit'] <= 40.1
  assert moved['merit'] <= moved['lamb'] <= 48.1
  assert rows['merit']['collectives'] == 'all-reduce'
  numbers = 2 * (8192 + 4096) + 2
  assert rows['merit']['numbers reduced'] <= numbers


_STACKED = 4, 512, 2048


@pytest.fixture
def updates_of_stacked_matrices(results_of):
  """Compiles updates of a stack of matrices on two of four devices."""

  def compile_updates(*optimizers: str):
    return results_of(
      'benchmarks.pod_update', '--topologies', 'v5e:2x2', '--shape',
      *map(str, _STACKED), '--mesh', 'fsdp=2', '--optimizers', *optimizers,
    )  # fmt: skip

  return compile_updates


def test_stacked_matrices_are_split_as_fsdp_splits_them(
  updates_of_stacked_matrices,
):
  results = updates_of_stacked_matrices('merit', 'muon')
  assert results['shape'] == list(_STACKED)
  found = {row['optimizer']: row for row in results['rows']}
  assert {row['mesh'] for row in found.values()} == {'data=2,fsdp=2,tensor=1'}
  merit, muon = found['merit'], found['muon']
  assert merit['FLOPs per parameter'] == 0
  # Only maxima pass between devices.
  assert 0 < merit['bytes sent per parameter'] < 0.1
  rows, columns = _STACKED[1:]
  # Five iterations. The four devices share them, or each computes all; a
  # device holds half of the parameters.
  whole = 5 * (4 * rows**2 * columns + 2 * rows**3) / (rows * columns)
  assert whole / 2 <= muon['FLOPs per parameter'] <= 2 * whole
  assert muon['in bfloat16'] == muon['FLOPs per parameter']
  assert muon['bytes sent per parameter'] > 1


# The compiler takes a minute for products in float32.
@pytest.mark.slow
def test_whole_matrices_take_fewer_flops_and_bytes(updates_of_stacked_matrices):
  names = 'muon', 'muon-hyperball', 'adam-hyperball'
  muon, hyperball, adam = updates_of_stacked_matrices(*names)['rows']
  assert adam['FLOPs per parameter'] == 0
  assert adam['bytes sent per parameter'] < 0.001
  assert hyperball['collectives'] == 'all-reduce, all-to-all'
  assert 0 < hyperball['FLOPs per parameter'] < muon['FLOPs per parameter']
  sent = [row['bytes sent per parameter'] for row in (hyperball, muon)]
  assert 0 < sent[0] < sent[1] / 5


def test_a_mesh_that_does_not_divide_the_rows_is_refused(run):
  done = run(
    '-m', 'benchmarks.pod_update', '--topologies', 'v5e:2x2', '--shape',
    '4', '6', '8', '--mesh', 'fsdp=4',
  )  # fmt: skip
  assert done.returncode == 2
  assert 'fsdp = 4 must divide the rows, 6' in done.stderr
