from pathlib import Path
import shutil
import threading
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.checkpoints import Checkpoints, UnsavedError
from examples.gpt2.command import UsageError


def _state(number: float, mesh: Mesh | None = None):
  state = {
    'params': {'w': number + jnp.arange(4096.0).reshape(8, 512)},
    'opt_state': (jnp.full(3, number, jnp.bfloat16), jnp.int32(number)),
  }
  if mesh is None:
    return state
  return jax.device_put(state, _shardings(mesh))


def _shardings(mesh: Mesh):
  split, whole = NamedSharding(mesh, P('x')), NamedSharding(mesh, P())
  return {'params': {'w': split}, 'opt_state': (whole, whole)}


def _mesh(count: int) -> Mesh:
  return jax.make_mesh((count,), ('x',), devices=jax.devices()[:count])


def _like(mesh: Mesh):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    _state(0.0),
    _shardings(mesh),
  )


def _save(folder: Path, losses: dict[int, float | None], **options) -> None:
  with Checkpoints(folder, **options) as checkpoints:
    for step, loss in losses.items():
      checkpoints.save(step, _state(step, _mesh(4)), loss)


def _damage(folder: Path, change) -> None:
  """Changes every file of a checkpoint that may hold arrays."""
  files = [x for x in folder.rglob('*') if x.is_file() and '/d/' in str(x)]
  assert files
  for file in files:
    change(file)


def _flip(file: Path) -> None:
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


@pytest.mark.parametrize('devices', [1, 8])
def test_a_state_is_restored_on_any_mesh(tmp_path: Path, devices: int):
  _save(tmp_path, {0: None, 3: 2.0})
  like = _like(_mesh(devices))
  with Checkpoints(tmp_path) as checkpoints:
    step, state = checkpoints.restore(like)
  assert step == 3
  jax.tree.map(np.testing.assert_array_equal, state, _state(3.0))
  jax.tree.map(lambda x, y: x.sharding == y.sharding or 1 / 0, state, like)


def test_the_newest_the_best_and_some_in_between_are_kept(tmp_path: Path):
  losses = {0: None, 1: 5.0, 2: 1.0, 3: None, 4: 3.0, 5: 4.0, 6: 2.0, 7: 6.0}
  _save(tmp_path, losses, max_to_keep=2, keep_period=4)
  with Checkpoints(tmp_path, read_only=True) as checkpoints:
    assert checkpoints.steps() == [0, 2, 4, 6, 7]


def _cut(file: Path) -> None:
  file.write_bytes(file.read_bytes()[:-7])


def _empty(file: Path) -> None:
  file.write_bytes(b'')


@pytest.mark.parametrize('change', [_flip, _cut, _empty, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, change):
  _save(tmp_path, {1: 3.0, 2: 1.0, 4: 0.5})
  _damage(tmp_path / '4', change)
  with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
    with pytest.warns(
      RuntimeWarning, match='step 4 .* damaged.* step 2 is us.* deleted'
    ):
      step, state = checkpoints.restore(_like(_mesh(2)))
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, state, _state(2.0))
    # It takes no place of the one that is kept, nor is it the best.
    checkpoints.save(3, state, 2.0)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(4, state)  # Again.
  with Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.restore(_like(_mesh(2)))[0] == 4


@pytest.mark.parametrize('change', [_cut, _empty, Path.unlink])
def test_any_damaged_file_leaves_a_sound_state(tmp_path: Path, change):
  _save(tmp_path / 'whole', {1: 2.0, 2: 1.0})
  files = [x for x in (tmp_path / 'whole/2').rglob('*') if x.is_file()]
  assert len(files) > 3
  for number, file in enumerate(files):
    folder = tmp_path / str(number)
    shutil.copytree(tmp_path / 'whole', folder)
    change(folder / file.relative_to(tmp_path / 'whole'))
    with warnings.catch_warnings(), Checkpoints(folder) as checkpoints:
      warnings.simplefilter('ignore')
      step, state = checkpoints.restore(_like(_mesh(2)))
    jax.tree.map(np.testing.assert_array_equal, state, _state(float(step)))


def test_where_none_is_sound_they_stay(tmp_path: Path):
  _save(tmp_path, {2: None, 4: None})
  for step in ('2', '4'):
    _damage(tmp_path / step, _flip)
  with (
    Checkpoints(tmp_path) as checkpoints,
    pytest.raises(UsageError, match='step 4 .* step 2'),
  ):
    checkpoints.restore(_like(_mesh(2)))
  assert {'2', '4'} <= {x.name for x in tmp_path.iterdir()}


def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path):
  state = _state(1.0)
  state['opt_state'] = (jnp.array([1.0, jnp.nan]), jnp.int32(3))
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, _state(1.0))
    with pytest.raises(UnsavedError, match=r'opt_state\.0 is not finite'):
      checkpoints.save(2, state)
  with Checkpoints(tmp_path, read_only=True) as checkpoints:
    assert checkpoints.steps() == [1]


def test_a_save_that_fails_is_an_error(tmp_path: Path):
  folder = tmp_path / 'checkpoints'
  checkpoints = Checkpoints(folder)
  checkpoints.save(1, _state(1.0))
  checkpoints.wait()
  shutil.rmtree(folder)
  folder.touch()  # Now a file, as if the disk had failed.
  threads = {*threading.enumerate()}
  with pytest.raises(UnsavedError, match='step 2 cannot be saved'):
    checkpoints.save(2, _state(2.0))
    checkpoints.wait()
  # Threads of Orbax would keep the process from its end for five minutes.
  for thread in {*threading.enumerate()} - threads:
    thread.join(60)
    assert not thread.is_alive()
  assert UnsavedError.status == 5
