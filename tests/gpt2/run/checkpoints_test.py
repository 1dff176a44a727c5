"""Checkpoints on a disk and in stores, whatever these do."""

from collections.abc import Callable, Iterable
import errno
import os
from pathlib import Path
import re
import shutil
import threading
from typing import Any
from unittest.mock import patch
import warnings

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.run import checkpoints, restore
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.storage import as_path, file_system
from tests.merit_optax.arrays import assert_same_bits

_SPECS = {
  'kernel': P('fsdp', 'tensor'),
  'moment': P('tensor'),
  'bits': P(('fsdp', 'tensor')),
}
# Orbax drops what it was reading when a read of another array fails.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)
# With this in front, a program has the names and the devices of these tests.
_NAMES = f"""
import sys
import jax
jax.config.update('jax_num_cpu_devices', 8)
sys.path.insert(0, {str(Path(__file__).parent)!r})
import checkpoints_test
globals().update(vars(checkpoints_test))
"""


@pytest.fixture
def folder(place: Path) -> Path:
  """Where no checkpoint is yet, on a disk and in each kind of store."""
  return place / 'run' / 'checkpoints'


@pytest.fixture
def stored(bucket: str) -> Path:
  """Such a folder in each kind of store, which ``proxy`` makes fail."""
  return as_path(bucket) / 'run' / 'checkpoints'


def _state(seed: int, mesh: str = 'fsdp=4,tensor=2') -> dict[str, Any]:
  """Returns about 100 kB of numbers that do not compress."""
  rng = np.random.default_rng(seed)
  state = {
    'params': {
      'kernel': rng.standard_normal((64, 32), np.float32),
      'bias': rng.standard_normal(7).astype(jnp.bfloat16),
      'bits': rng.integers(2**32, size=20_000, dtype=np.uint32),
    },
    'moment': rng.standard_normal((16, 3)).astype(jnp.bfloat16),
    'mask': rng.integers(2, size=9).astype(bool),
    'counts': (np.int32(seed), np.arange(seed, seed + 5, dtype=np.int32)),
    'scale': np.float32(seed + 0.1),
  }
  return jax.tree.map(jax.device_put, state, _shardings(state, mesh))


def _shardings(state: Any, mesh: str) -> Any:
  def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
    spec = _SPECS.get(getattr(path[-1], 'key', ''), P())
    return NamedSharding(make_mesh(mesh), spec)

  return jax.tree.map_with_path(sharding, state)


def _like(state: Any, mesh: str = 'fsdp=4,tensor=2') -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    _shardings(state, mesh),
  )


def _save(folder: Path, *steps: int) -> None:
  with Checkpoints(folder, max_to_keep=9) as saved:
    for step in steps:
      assert saved.save(step, _state(step))


def _restore(folder: Path) -> tuple[int, Any] | None:
  with Checkpoints(folder, max_to_keep=9) as saved:
    return saved.restore(_like(_state(0)))


def _steps(folder: Path) -> list[int]:
  return sorted(int(path.name) for path in folder.iterdir())


def _files(folder: Path) -> list[Path]:
  """Returns the files of a checkpoint, the largest first."""
  fs = file_system(folder)
  sizes = fs.find(str(folder), detail=True)
  names = sorted(sizes, key=lambda name: (-sizes[name]['size'], name))
  urls = [fs.unstrip_protocol(name) for name in names]
  return [as_path(url.removeprefix('file://')) for url in urls]


def _flip(file: Path, position: int, bit: int = 5) -> None:
  content = bytearray(file.read_bytes())
  content[position] ^= 1 << bit
  file.write_bytes(content)


def _flip_largest(folder: Path) -> None:
  """Flips a bit of the largest array, which does not compress."""
  file = _files(folder)[0]
  _flip(file, len(file.read_bytes()) // 2)


def _flip_number(folder: Path, numbers: np.ndarray) -> None:
  """Flips a bit of numbers that a checkpoint holds."""
  content = numbers.tobytes()
  (file,) = (f for f in _files(folder) if content in f.read_bytes())
  _flip(file, file.read_bytes().index(content) + len(content) // 2)


def _cut(folder: Path, name: str = '', size: int = 50) -> None:
  """Truncates a file of a checkpoint, by default the largest."""
  file = folder / name if name else _files(folder)[0]
  file.write_bytes(file.read_bytes()[:size])


def test_restores_every_bit_on_any_mesh(folder: Path):
  state = _state(3)
  _save(folder, 3)
  for mesh in ('fsdp=4,tensor=2', 'fsdp=2,tensor=1', ''):
    like = _like(state, mesh)
    with Checkpoints(folder, max_to_keep=1) as saved, warnings.catch_warnings():
      warnings.simplefilter('error')
      step, restored = saved.restore(like)
    assert step == 3
    assert_same_bits(restored, state)
    for x, y in zip(*map(jax.tree.leaves, (restored, like)), strict=True):
      assert x.sharding == y.sharding


def test_a_relative_folder_is_allowed(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _save(Path('c'), 1)
  assert _restore(Path('c'))[0] == 1


def test_no_file_is_a_pickle(tmp_path: Path):
  _save(tmp_path, 1)
  first_bytes = {file.read_bytes()[:1] for file in _files(tmp_path)}
  assert first_bytes and b'\x80' not in first_bytes


def test_the_state_may_be_donated(tmp_path: Path):
  step = jax.jit(
    lambda state: jax.tree.map(lambda x: x + x.astype(bool), state),
    donate_argnums=0,
  )
  state = _state(1)
  before = jax.device_get(jax.tree.map(jnp.copy, state))
  with Checkpoints(tmp_path, max_to_keep=2) as saved:
    assert saved.save(1, state)
    for _ in range(5):
      state = step(state)
    _, restored = saved.restore(_like(state))
  assert_same_bits(restored, before)


def test_keeps_the_last_the_best_and_multiples(folder: Path):
  losses = {1: float('nan'), 2: 1.0, 3: 3.0, 4: 2.0, 5: None, 6: 1.5, 7: 1.0}
  kept = []
  for steps in ((1, 2, 3, 4), (5, 6, 7)):  # What is best outlives a restart.
    with Checkpoints(folder, max_to_keep=2, keep_period=3) as saved:
      for step in steps:
        assert saved.save(step, _state(step), losses[step])
        saved.wait()
        kept.append(_steps(folder))
  # Of equal losses the last is the best.
  assert kept == [
    [1], [1, 2], [2, 3], [2, 3, 4], [2, 3, 4, 5], [2, 3, 5, 6], [3, 6, 7],
  ]  # fmt: skip


def test_a_step_before_the_last_can_be_saved_but_none_twice(tmp_path: Path):
  with Checkpoints(tmp_path, max_to_keep=2) as saved:
    for step in (5, 3):
      assert saved.save(step, _state(step))
    with pytest.warns(RuntimeWarning, match='step 5 is not saved'):
      assert not saved.save(5, _state(6))
  assert _steps(tmp_path) == [3, 5]
  assert_same_bits(_restore(tmp_path)[1], _state(5))


@pytest.mark.parametrize('bad', [np.nan, -np.inf])
def test_a_state_that_is_not_finite_is_refused(tmp_path: Path, bad: float):
  state = _state(2)
  params = state['params']
  params['kernel'] = params['kernel'].at[-1, -1].set(bad)
  with Checkpoints(tmp_path, max_to_keep=1) as saved:
    assert saved.save(1, _state(1))
    with pytest.warns(RuntimeWarning, match='2 .*params.kernel is not finite'):
      assert not saved.save(2, state)
    assert _restore(tmp_path)[0] == 1


def _only(caught: Iterable[warnings.WarningMessage], text: str) -> str:
  """Returns the one warning with a text, next to those of what Orbax drops."""
  (found,) = (str(x.message) for x in caught if text in str(x.message))
  return found


def _assert_falls_back(folder: Path, reason: str = '') -> None:
  """Asserts that checkpoint 2 is set aside, and 1 is used."""
  with Checkpoints(folder, max_to_keep=2) as saved:
    with pytest.warns(RuntimeWarning) as caught:
      step, state = saved.restore(_like(_state(0)))
    moved = folder.parent / f'damaged-{folder.name}' / '2-1'
    for text in (str(folder), str(moved), reason):
      assert text in _only(caught, 'step 2')
    assert step == 1
    assert_same_bits(state, _state(1))
    assert moved.is_dir()
    assert _steps(folder) == [1]
    assert saved.save(2, _state(2))
  assert _restore(folder)[0] == 2


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [(_flip_largest, 'not as it was saved, by its checksum'), (_cut, '')],
)
def test_a_damaged_checkpoint_is_set_aside(
  folder: Path, damage: Callable[[Path], None], reason: str
):
  _save(folder, 1, 2)
  damage(folder / '2')
  _assert_falls_back(folder, reason)


@pytest.mark.parametrize(
  'damage',
  [
    lambda x: _cut(x, size=0),
    lambda x: _cut(x, 'state/manifest.ocdbt', size=0),
    lambda x: _cut(x, 'state/_METADATA'),
    lambda x: _cut(x, 'record/metadata'),
    lambda x: shutil.rmtree(x / 'state'),
    lambda x: shutil.rmtree(x / 'record'),
  ],
)
def test_damage_of_any_part_is_found(tmp_path, damage: Callable[[Path], None]):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  damage(folder / '2')
  _assert_falls_back(folder)


@pytest.mark.slow
@hypothesis.given(
  number=st.integers(0, 99), place=st.floats(0, 1), bit=st.integers(0, 7)
)
@hypothesis.settings(max_examples=100)
def test_no_flipped_bit_is_restored(
  tmp_path_factory: pytest.TempPathFactory, number: int, place: float, bit: int
):
  folder = tmp_path_factory.mktemp('flipped') / 'c'
  _save(folder, 1, 2)
  files = _files(folder / '2')
  file = files[number % len(files)]
  if size := len(file.read_bytes()):
    _flip(file, int(place * (size - 1)), bit)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    step, state = _restore(folder)
  assert step == (1 if any('damaged' in str(w.message) for w in caught) else 2)
  assert_same_bits(state, _state(step))


def test_damaged_checkpoints_of_one_step_are_all_kept(tmp_path: Path):
  folder = tmp_path / 'c'
  _save(folder, 1)
  for _ in range(2):
    _save(folder, 2)
    _cut(folder / '2')
    with pytest.warns(RuntimeWarning, match='damaged'):
      assert _restore(folder)[0] == 1
  names = {path.name for path in (tmp_path / 'damaged-c').iterdir()}
  assert names == {'2-1', '2-2'}


def test_if_all_are_damaged_the_user_decides(tmp_path: Path):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  for step in (1, 2):
    _cut(folder / str(step))
  for _ in range(2):  # A second try does not start over in silence either.
    with pytest.raises(UsageError, match='--from-scratch') as error:
      _restore(folder)
    assert all(s in str(error.value) for s in ('Step 1', 'Step 2', str(folder)))
  assert _steps(folder) == [1, 2]


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    ({'scale': None}, 'scale is float32[], expected nothing'),
    ({'more': np.zeros(3, 'int32')}, 'more is missing, expected int32[3]'),
    ({'moment': np.zeros((16, 3), 'float32')}, 'expected float32[16, 3]'),
  ],
)
def test_a_state_of_another_form_is_refused(
  tmp_path: Path, change: dict[str, Any], reason: str
):
  _save(tmp_path, 1)
  with (
    pytest.raises(UsageError, match=re.escape(reason)),
    Checkpoints(tmp_path, max_to_keep=1) as saved,
  ):
    saved.restore(_like(_state(1) | change))


def _fail(*_: object, **__: object) -> None:
  raise OSError(28, 'No space left on device')


@pytest.mark.parametrize(
  'name', [(ocp.AsyncCheckpointer, 'save'), (os, 'rename')]
)
def test_a_failed_save_does_not_end_the_run(tmp_path, name: tuple[Any, str]):
  with Checkpoints(tmp_path, max_to_keep=1) as saved:
    assert saved.save(1, _state(1), 1.0)
    saved.wait()
    with patch.object(*name, _fail), pytest.warns(RuntimeWarning) as caught:
      assert saved.save(2, _state(2), 0.5) == (name[0] is os)
      saved.wait()
      saved.wait()
    assert 'No space left' in _only(caught, 'step 2')
    assert _steps(tmp_path) == [1]
    assert saved.restore(_like(_state(0)))[0] == 1
    assert saved.save(3, _state(3), 2.0)
  assert _steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(
  ('name', 'begins'),
  [((ocp.AsyncCheckpointer, 'save'), False), ((os, 'rename'), True)],
)
def test_the_third_failure_in_a_row_ends_the_run(tmp_path, name, begins):
  with (
    patch.object(*name, _fail),
    pytest.warns(RuntimeWarning, match='step 3 is not saved'),
    pytest.raises(checkpoints.UnsavedError, match='last 3 chec') as error,
    Checkpoints(tmp_path, max_to_keep=1) as saved,
  ):
    for step in (1, 2, 3):
      assert saved.save(step, _state(step)) == begins
  assert error.value.status == 5
  assert not _steps(tmp_path)


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(tmp_path):
  _save(tmp_path, 1)
  with Checkpoints(tmp_path, max_to_keep=1) as saved:
    assert saved.save(2, _state(2))
    with (
      patch.object(shutil, 'rmtree', _fail),
      pytest.warns(RuntimeWarning, match='not deleted'),
    ):
      saved.wait()
    assert _steps(tmp_path) == [1, 2]
    assert saved.save(3, _state(3))
  assert _steps(tmp_path) == [3]


def test_after_an_error_the_save_under_way_is_finished(tmp_path: Path):
  with (
    pytest.raises(KeyError, match='mine'),
    Checkpoints(tmp_path / 'c', max_to_keep=1) as saved,
  ):
    assert saved.save(1, _state(1))
    raise KeyError('mine')
  assert _restore(tmp_path / 'c')[0] == 1


@pytest.mark.parametrize(
  'name', ['', 'state/manifest.ocdbt', 'record/metadata']
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, name: str):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  file = folder / '2' / name if name else _files(folder / '2')[0]
  file.rename(tmp_path / 'sound')
  file.symlink_to(file.name)  # Opening it fails, as by a server that is away.
  with pytest.raises(OSError, match='symbolic links') as error:
    _restore(folder)
  assert error.value.errno == errno.ELOOP
  os.replace(tmp_path / 'sound', file)
  assert _restore(folder)[0] == 2


@pytest.mark.parametrize(
  'name', [(ocp.Checkpointer, 'restore'), (restore, 'checksums')]
)
def test_an_error_of_a_device_is_not_called_damage(
  tmp_path: Path, name: tuple[Any, str]
):
  error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')
  _save(tmp_path, 1, 2)
  with (
    patch.object(*name, side_effect=error),
    pytest.raises(jax.errors.JaxRuntimeError, match='RESOURCE_EXHAUSTED'),
  ):
    _restore(tmp_path)
  assert _restore(tmp_path)[0] == 2


def test_what_a_killed_save_left_is_no_checkpoint(folder: Path):
  _save(folder, 1, 2)
  if file_system(folder).protocol[0] == 'file':
    (folder / '2').rename(folder / '2.orbax-checkpoint-tmp')
  else:
    (folder / '2' / 'commit_success.txt').unlink()
  with Checkpoints(folder, max_to_keep=2) as saved:
    assert saved.restore(_like(_state(0)))[0] == 1
    assert _steps(folder) == [1]
    assert saved.save(2, _state(2))
  assert _steps(folder) == [1, 2]


def test_a_store_that_refuses_is_not_called_damaged_and_ends_no_run(
  stored: Path, proxy
):
  with Checkpoints(stored, max_to_keep=2) as saved:
    assert saved.save(1, _state(1))
    assert saved.wait()
    proxy.status = 403
    with pytest.warns(RuntimeWarning, match='step 2 is not saved'):
      assert not (saved.save(2, _state(2)) and saved.wait())
    with pytest.raises(OSError):
      saved.restore(_like(_state(0)))
    proxy.heal()
    assert saved.restore(_like(_state(0)))[0] == 1
    assert saved.save(3, _state(3))
  assert _steps(stored) == [1, 3]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_loses_nothing(stored: Path, proxy):
  with Checkpoints(stored, max_to_keep=2) as saved, warnings.catch_warnings():
    warnings.simplefilter('error', RuntimeWarning)
    assert saved.save(1, _state(1))
    saved.wait()
    proxy.status = 503
    threading.Timer(1.5, proxy.heal).start()
    assert saved.save(2, _state(2))
    assert saved.wait()
    assert saved.restore(_like(_state(0)))[0] == 2


@pytest.mark.slow
def test_a_slow_store_keeps_no_step_waiting(stored: Path, proxy):
  with Checkpoints(stored, max_to_keep=2) as saved:
    proxy.delay = 0.1
    assert saved.save(1, _state(1))
    started = proxy.num_requests
    assert saved.wait()
    assert proxy.num_requests > started, 'the save was over before'
    proxy.heal()
    assert saved.restore(_like(_state(0)))[0] == 1


_PROCESSES = """
import contextlib, functools
from tests.gpt2.runs import largest_file
from jax.experimental import multihost_utils
jax.config.update('jax_num_cpu_devices', 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
me = jax.process_index()
folder = Path(sys.argv[3])
sharding = NamedSharding(make_mesh('fsdp=4,tensor=2'), P(('fsdp', 'tensor')))
like = {'bits': jax.ShapeDtypeStruct((80_000,), 'uint32', sharding=sharding)}

def value(step):
  numbers = jax.random.bits(jax.random.key(step), (80_000,))
  return {'bits': jax.device_put(numbers, sharding)}

def restore(saved):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    step, state = saved.restore(like)
  assert step == 2, step
  for x, y in zip(state['bits'].addressable_shards,
                  value(2)['bits'].addressable_shards, strict=True):
    assert np.array_equal(x.data, y.data)
  return ' '.join(str(warning.message) for warning in caught)

with Checkpoints(folder, max_to_keep=3) as saved:
  for step in (1, 2, 3, 4):
    assert saved.save(step, value(step))
if me == 0:
  # Process 1 alone reads this shard of 3, and this one of 4 is not readable.
  shard = np.asarray(jax.random.bits(jax.random.key(3), (80_000,)))[-10_000:]
  _flip_number(folder / '3', shard)
  for file in _files(folder / '4' / 'state' / 'ocdbt.process_1'):
    os.truncate(file, 0)
multihost_utils.sync_global_devices('damaged')
with Checkpoints(folder, max_to_keep=3) as saved:
  texts = restore(saved)
  assert ('another process' in texts) == (me == 0), texts
  assert 'checksum' in texts, texts
  inf = jax.device_put(np.full(80_000, np.inf, np.float32), sharding)
  assert not saved.save(3, {'bits': inf})

# A disk that one process cannot read is no damage, for none of them.
read = ocp.Checkpointer.restore
if me == 1:
  ocp.Checkpointer.restore = _fail
with Checkpoints(folder, max_to_keep=3) as saved:
  try:
    saved.restore(like)
    raise AssertionError('restored')
  except OSError as error:
    assert ('another process' in str(error)) == (me == 0), error
  ocp.Checkpointer.restore = read
  assert not restore(saved)

  # A save that fails in one process fails in all, and the next one does not.
  long = ocp.AsyncCheckpointer
  checkpoints.ocp.AsyncCheckpointer = functools.partial(long, timeout_secs=5)
  full = largest_file(5000) if me == 1 else contextlib.nullcontext()
  with full, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    assert saved.save(5, value(5))
    saved.wait()
  assert 'step 5 is not saved' in str(caught[0].message), caught
  checkpoints.ocp.AsyncCheckpointer = long
  assert saved.save(5, value(5))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path, run_pair):
  run_pair(_NAMES + _PROCESSES, tmp_path / 'c')
  assert _steps(tmp_path / 'c') == [2, 5]
  names = sorted(path.name for path in (tmp_path / 'damaged-c').iterdir())
  assert names == ['3-1', '4-1']
