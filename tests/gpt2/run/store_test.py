"""Checkpoints in object stores: as on a disk, whatever the store does."""

from collections.abc import Callable
from pathlib import Path
import threading
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.storage import as_path, file_system

pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


def _state(seed: int, mesh: str = 'fsdp=4,tensor=2') -> dict[str, Any]:
  rng = np.random.default_rng(seed)
  state = {
    'kernel': rng.standard_normal((64, 32), np.float32),
    'bias': rng.standard_normal(7).astype(jnp.bfloat16),
    'counts': (np.int32(seed), np.arange(seed, seed + 5, dtype=np.int32)),
  }
  split = NamedSharding(make_mesh(mesh), P('fsdp', 'tensor'))
  whole = NamedSharding(make_mesh(mesh), P())
  return jax.tree.map(
    lambda x: jax.device_put(x, split if x.ndim == 2 else whole), state
  )


def _like(mesh: str = 'fsdp=4,tensor=2') -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    _state(0, mesh),
  )


def _assert_same(found: Any, expected: Any) -> None:
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def folder(bucket: str) -> Path:
  return as_path(bucket) / 'run' / 'checkpoints'


def _save(folder: Path, *steps: int) -> None:
  with Checkpoints(folder, max_to_keep=9) as saved:
    for step in steps:
      assert saved.save(step, _state(step))


def _steps(folder: Path) -> list[int]:
  return sorted(int(path.name) for path in folder.iterdir())


def _files(folder: Path) -> list[str]:
  """Returns the objects of a checkpoint, the largest first."""
  sizes = file_system(folder).find(str(folder), detail=True)
  return sorted(sizes, key=lambda x: -sizes[x]['size'])


def test_restores_every_bit_on_any_mesh(folder: Path):
  _save(folder, 3)
  for mesh in ('fsdp=2,tensor=1', ''):
    with Checkpoints(folder, max_to_keep=1) as saved, warnings.catch_warnings():
      warnings.simplefilter('error')
      step, state = saved.restore(_like(mesh))
    assert step == 3
    _assert_same(state, _state(3))


def test_an_empty_folder_restores_nothing(folder: Path):
  with Checkpoints(folder, max_to_keep=1) as saved:
    assert saved.restore(_like()) is None


def test_keeps_the_last_and_the_best(folder: Path):
  with Checkpoints(folder, max_to_keep=2) as saved:
    for step, loss in enumerate([2.0, 1.0, 3.0, None, 4.0]):
      assert saved.save(step, _state(step), loss)
  assert _steps(folder) == [1, 3, 4]


def _flip(fs: Any, file: str) -> None:
  content = bytearray(fs.cat_file(file))
  content[len(content) // 2] ^= 4
  fs.pipe_file(file, bytes(content))


def _truncate(fs: Any, file: str) -> None:
  fs.pipe_file(file, fs.cat_file(file)[:50])


@pytest.mark.parametrize('damage', [_flip, _truncate])
def test_a_damaged_checkpoint_is_set_aside(
  folder: Path, damage: Callable[[Any, str], None]
):
  _save(folder, 1, 2)
  damage(file_system(folder), _files(folder / '2')[0])
  with Checkpoints(folder, max_to_keep=2) as saved:
    with pytest.warns(RuntimeWarning, match='step 2 .*is damaged'):
      step, state = saved.restore(_like())
    assert step == 1
    _assert_same(state, _state(1))
    assert _steps(folder) == [1]
    assert _files(folder.parent / 'damaged-checkpoints' / '2-1')
    assert saved.save(2, _state(2))
  with Checkpoints(folder, max_to_keep=2) as saved:
    assert saved.restore(_like())[0] == 2


def test_if_all_are_damaged_the_user_decides(folder: Path):
  _save(folder, 1)
  _truncate(file_system(folder), _files(folder / '1')[0])
  with (
    Checkpoints(folder, max_to_keep=2) as saved,
    pytest.raises(UsageError, match='--from-scratch'),
  ):
    saved.restore(_like())
  assert _steps(folder) == [1]


def test_what_a_killed_save_left_is_no_checkpoint(folder: Path):
  _save(folder, 1, 2)
  (folder / '2' / 'commit_success.txt').unlink()
  with Checkpoints(folder, max_to_keep=2) as saved:
    assert saved.restore(_like())[0] == 1
    assert _steps(folder) == [1]
    assert saved.save(2, _state(2))
  assert _steps(folder) == [1, 2]


def test_a_store_that_refuses_does_not_end_the_run(folder: Path, proxy):
  with Checkpoints(folder, max_to_keep=2) as saved:
    assert saved.save(1, _state(1))
    assert saved.wait()
    proxy.status = 403
    with pytest.warns(RuntimeWarning, match='step 2 is not saved'):
      assert not (saved.save(2, _state(2)) and saved.wait())
    proxy.heal()
    assert saved.save(3, _state(3))
  assert _steps(folder) == [1, 3]


def test_a_store_that_refuses_to_be_read_is_not_called_damaged(
  folder: Path, proxy
):
  _save(folder, 1)
  with Checkpoints(folder, max_to_keep=2) as saved:
    proxy.status = 403
    with pytest.raises(OSError):
      saved.restore(_like())
    proxy.heal()
    assert saved.restore(_like())[0] == 1


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_loses_nothing(folder: Path, proxy):
  with Checkpoints(folder, max_to_keep=2) as saved, warnings.catch_warnings():
    warnings.simplefilter('error', RuntimeWarning)
    assert saved.save(1, _state(1))
    saved.wait()
    proxy.status = 503
    threading.Timer(1.5, proxy.heal).start()
    assert saved.save(2, _state(2))
    assert saved.wait()
    assert saved.restore(_like())[0] == 2


@pytest.mark.slow
def test_a_slow_store_keeps_no_step_waiting(folder: Path, proxy):
  with Checkpoints(folder, max_to_keep=2) as saved:
    proxy.delay = 0.1
    assert saved.save(1, _state(1))
    started = len(proxy.requests)
    assert saved.wait()
    assert len(proxy.requests) > started, 'the save was over before'
    proxy.heal()
    assert saved.restore(_like())[0] == 1
