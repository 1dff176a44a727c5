"""Two processes with four devices each take the steps of one with eight."""

import sys

import numpy as np
import pytest

from tests.processes import free_port, run_all

# What each process runs: its number, how many there are, the port, the file.
_PROGRAM = """
import sys

import jax

process, processes = int(sys.argv[1]), int(sys.argv[2])
port, path = sys.argv[3:]
jax.config.update('jax_num_cpu_devices', 8 // processes)
if processes > 1:
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'localhost:{port}', processes, process)

from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax

import merit_optax
from tests.merit_optax.arrays import step_function

assert jax.process_count() == processes
assert jax.device_count() == 8
mesh = jax.make_mesh(
  (4, 2), ('fsdp', 'tensor'), axis_types=(AxisType.Auto, AxisType.Auto)
)
layouts = {
  'rows': ((16, 24), P('fsdp')),
  'columns': ((16, 24), P(None, ('fsdp', 'tensor'))),
  'both': ((16, 24), P('fsdp', 'tensor')),
  'layers': ((4, 8, 6), P('tensor', 'fsdp')),
  'bias': ((24,), P('tensor')),
}
shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in layouts.items()}


def tree(seed):
  generator = np.random.default_rng(seed)
  arrays = {
    name: generator.normal(size=shape).astype(np.float32)
    for name, (shape, _) in layouts.items()
  }
  # Each process gives the shards of its own devices.
  return {
    name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
    for name, x in arrays.items()
  }


optimizer = merit_optax.merit(
  optax.linear_schedule(0.1, 0.01, 5),
  weight_decay=0.1,
  weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
)
params = tree(0)
places = shardings, merit_optax.state_shardings(optimizer, params)
state = jax.jit(optimizer.init, out_shardings=places[1])(params)
step = jax.jit(step_function(optimizer), out_shardings=places)
for seed in range(1, 6):
  params, state = step(params, state, tree(seed))
whole = multihost_utils.process_allgather(
  {'params': params, 'mu': state[0].mu, 'nu': state[0].nu}, tiled=True
)
if process == 0:
  paths = jax.tree_util.tree_leaves_with_path(whole)
  np.savez(path, **{jax.tree_util.keystr(p): x for p, x in paths})
"""


def _run(num_processes, folder):
  """Returns parameters and moments after some steps."""
  path = folder / f'{num_processes}.npz'
  rest = [str(num_processes), str(free_port()), str(path)]
  start = [sys.executable, '-c', _PROGRAM]
  run_all([[*start, str(i), *rest] for i in range(num_processes)])
  with np.load(path) as archive:
    return dict(archive)


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path):
  expected, actual = _run(1, tmp_path), _run(2, tmp_path)
  assert len(expected) == 3 * 5
  assert actual.keys() == expected.keys()
  for name, x in actual.items():
    assert np.isfinite(x).all() and x.any()
    assert x.tobytes() == expected[name].tobytes(), name
