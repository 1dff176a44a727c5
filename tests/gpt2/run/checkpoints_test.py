from collections.abc import Iterable
import errno
import itertools
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time
from typing import Any
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

_SPECS = {
  'kernel': P('fsdp', 'tensor'),
  'moment': P('tensor'),
  'bits': P(('fsdp', 'tensor')),
}
# Orbax drops what it was reading when a read of another array fails.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)
# With this in front, a program of its own has the devices of these tests.
_DEVICES = "import jax; jax.config.update('jax_num_cpu_devices', 8)\n"


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
  devices = make_mesh(mesh)
  return jax.tree.map_with_path(
    lambda path, _: NamedSharding(
      devices, _SPECS.get(getattr(path[-1], 'key', ''), P())
    ),
    state,
  )


def _like(state: Any, mesh: str = 'fsdp=4,tensor=2') -> Any:
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    state,
    _shardings(state, mesh),
  )


def _assert_same(found: Any, expected: Any) -> None:
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


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
  files = [path for path in folder.rglob('*') if path.is_file()]
  return sorted(files, key=lambda path: (-path.stat().st_size, str(path)))


def _flip(file: Path, position: int, bit: int) -> None:
  content = bytearray(file.read_bytes())
  content[position] ^= 1 << bit
  file.write_bytes(content)


def _flip_number(folder: Path, numbers: np.ndarray, place: float) -> None:
  """Flips a bit of numbers that a checkpoint holds, which do not compress."""
  content = np.asarray(numbers).tobytes()
  (file,) = (f for f in _files(folder) if content in f.read_bytes())
  start = file.read_bytes().index(content)
  _flip(file, start + int(place * (len(content) - 1)), 5)


def _run(program: str, *arguments: object, **options: Any) -> subprocess.Popen:
  """Starts a program with the names of this file."""
  names = (
    f'import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n'
    'import checkpoints_test; globals().update(vars(checkpoints_test))\n'
  )
  return subprocess.Popen(
    [sys.executable, '-W', 'always', '-c',
     _DEVICES + names + program,
     *map(str, arguments)],
    cwd=Path(__file__).parents[3],
    text=True,
    **options,
  )  # fmt: skip


@pytest.mark.parametrize('mesh', ['fsdp=4,tensor=2', 'fsdp=2,tensor=1', ''])
def test_restores_every_bit_on_any_mesh(tmp_path: Path, mesh: str):
  folder = tmp_path / 'run' / 'checkpoints'
  state = _state(3)
  with Checkpoints(folder, max_to_keep=1) as saved:
    assert saved.save(3, state)
  with Checkpoints(folder, max_to_keep=1) as saved, warnings.catch_warnings():
    warnings.simplefilter('error')
    like = _like(state, mesh)
    step, restored = saved.restore(like)
  assert step == 3
  _assert_same(restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
    lambda x: x.sharding, like
  )


def test_an_empty_folder_restores_nothing(tmp_path: Path):
  assert _restore(tmp_path / 'checkpoints') is None


def test_a_relative_folder_is_allowed(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.chdir(tmp_path)
  _save(Path('c'), 1)
  assert _restore(Path('c'))[0] == 1


def test_no_file_is_a_pickle(tmp_path: Path):
  _save(tmp_path / 'c', 1)
  for file in _files(tmp_path / 'c'):
    assert not file.read_bytes().startswith(b'\x80')


def test_the_state_may_be_donated(tmp_path: Path):
  step = jax.jit(
    lambda state: jax.tree.map(lambda x: x + x.astype(bool), state),
    donate_argnums=0,
  )
  state = _state(1)
  before = jax.device_get(jax.tree.map(jnp.copy, state))
  with Checkpoints(tmp_path / 'c', max_to_keep=2) as saved:
    assert saved.save(1, state)
    for _ in range(5):
      state = step(state)
    _, restored = saved.restore(_like(state))
    _assert_same(restored, before)
    for _ in range(5):
      restored = step(restored)
  _assert_same(restored, state)


def test_keeps_the_last_and_the_best(tmp_path: Path):
  folder = tmp_path / 'c'
  losses = {1: float('nan'), 2: 1.0, 3: 3.0, 4: 2.0, 5: None, 6: 1.5, 7: None}
  kept = []
  for steps in ((1, 2, 3, 4), (5, 6, 7)):  # What is best outlives a restart.
    with Checkpoints(folder, max_to_keep=2) as saved:
      for step in steps:
        assert saved.save(step, _state(step), losses[step])
        saved.wait()
        kept.append(_steps(folder))
  assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6],
                  [2, 6, 7]]  # fmt: skip


def test_multiples_of_steps_are_kept_for_good(tmp_path: Path):
  with Checkpoints(tmp_path, max_to_keep=1, keep_period=2) as saved:
    for step in range(1, 6):
      assert saved.save(step, _state(step))
  assert _steps(tmp_path) == [2, 4, 5]


def test_without_losses_only_the_last_are_kept(tmp_path: Path):
  with Checkpoints(tmp_path / 'c', max_to_keep=2) as saved:
    for step in range(5):
      assert saved.save(step, _state(step))
  assert _steps(tmp_path / 'c') == [3, 4]


def test_a_better_checkpoint_takes_the_place_of_the_best(tmp_path: Path):
  with Checkpoints(tmp_path / 'c', max_to_keep=1) as saved:
    for step, loss in enumerate([3.0, 2.0, 2.5, 1.0, 1.0, 4.0]):
      assert saved.save(step, _state(step), loss)
  assert _steps(tmp_path / 'c') == [4, 5]


def test_a_step_is_saved_once(tmp_path: Path):
  with Checkpoints(tmp_path / 'c', max_to_keep=1) as saved:
    assert saved.save(4, _state(4))
    with pytest.warns(RuntimeWarning, match='step 4 is not saved'):
      assert not saved.save(4, _state(5))
  step, state = _restore(tmp_path / 'c')
  assert step == 4
  _assert_same(state, _state(4))


@pytest.mark.parametrize('bad', ['nan', 'inf', '-inf'])
@pytest.mark.parametrize('path', [('params', 'kernel'), ('moment',)])
def test_a_state_that_is_not_finite_is_refused(
  tmp_path: Path, bad: str, path: tuple[str, ...]
):
  state = _state(2)
  inner = state
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = inner[path[-1]].at[-1, -1].set(float(bad))
  with Checkpoints(tmp_path / 'c', max_to_keep=1) as saved:
    assert saved.save(1, _state(1))
    name = '.'.join(path)
    with pytest.warns(RuntimeWarning, match=f'step 2 .*: {name} is not finite'):
      assert not saved.save(2, state)
    assert _restore(tmp_path / 'c')[0] == 1


def _only(
  caught: Iterable[warnings.WarningMessage], text: str
) -> warnings.WarningMessage:
  """Returns the one warning with a text, next to those of what Orbax drops."""
  (warning,) = (x for x in caught if text in str(x.message))
  return warning


def _assert_falls_back(folder: Path, *reasons: str) -> None:
  """Asserts that checkpoint 2 is set aside, and 1 is used."""
  with Checkpoints(folder, max_to_keep=2) as saved:
    with pytest.warns(RuntimeWarning) as caught:
      step, state = saved.restore(_like(_state(0)))
    warning = _only(caught, 'step 2')
    moved = folder.parent / f'damaged-{folder.name}' / '2-1'
    for text in (str(folder), str(moved), *reasons):
      assert text in str(warning.message)
    assert step == 1
    _assert_same(state, _state(1))
    assert moved.is_dir()
    assert _steps(folder) == [1]
    assert saved.save(2, _state(2))
  assert _restore(folder)[0] == 2


@pytest.mark.parametrize('place', [0.0, 0.3, 0.77, 1.0])
def test_a_flipped_bit_of_an_array_is_found(tmp_path: Path, place: float):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  shards = _state(2)['params']['bits'].addressable_shards
  _flip_number(folder / '2', shards[int(place * 7)].data, place)
  _assert_falls_back(folder, 'params.bits is not as it was saved', 'checksum')


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
  if file.stat().st_size:
    _flip(file, int(place * (file.stat().st_size - 1)), bit)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    step, state = _restore(folder)
  assert step == (1 if any('damaged' in str(w.message) for w in caught) else 2)
  _assert_same(state, _state(step))


@pytest.mark.parametrize('size', [0, 50])
@pytest.mark.parametrize(
  'name', ['', 'state/manifest.ocdbt', 'state/_METADATA', 'record/metadata']
)
def test_a_truncated_file_is_found(tmp_path: Path, name: str, size: int):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  largest = _files(folder / '2')[0]
  os.truncate(folder / '2' / name if name else largest, size)
  _assert_falls_back(folder)


@pytest.mark.parametrize('name', ['state', 'record'])
def test_a_missing_part_is_found(tmp_path: Path, name: str):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  for file in _files(folder / '2' / name):
    file.unlink()
  _assert_falls_back(folder)


def test_damaged_checkpoints_of_one_step_are_all_kept(tmp_path: Path):
  folder = tmp_path / 'c'
  _save(folder, 1)
  for _ in range(2):
    _save(folder, 2)
    os.truncate(_files(folder / '2')[0], 0)
    with pytest.warns(RuntimeWarning, match='damaged'):
      assert _restore(folder)[0] == 1
  names = sorted(path.name for path in (tmp_path / 'damaged-c').iterdir())
  assert names == ['2-1', '2-2']


def test_if_all_are_damaged_the_user_decides(tmp_path: Path):
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  for step in (1, 2):
    os.truncate(_files(folder / str(step))[0], 10)
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
    ({'scale': np.zeros(1, 'float32')}, r'float32[], expected float32[1]'),
    ({'moment': np.zeros((16, 3), 'float32')}, 'expected float32[16, 3]'),
  ],
)
def test_a_state_of_another_form_is_refused(
  tmp_path: Path, change: dict[str, Any], reason: str
):
  _save(tmp_path / 'c', 1)
  with (
    Checkpoints(tmp_path / 'c', max_to_keep=1) as saved,
    pytest.raises(UsageError) as error,
  ):
    saved.restore(_like(_state(1) | change))
  assert reason in str(error.value)


# The folder and RLIMIT_FSIZE are of this program only: other tests write too.
_FULL_DISK = """
import resource
folder = Path(sys.argv[1])
saved = Checkpoints(folder, max_to_keep=1)
assert saved.save(1, _state(1), 1.0)
saved.wait()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter('always')
  for step, size in ((2, 5_000), (3, 10)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    saved.save(step, _state(step), 0.5)
    saved.wait()
  resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
texts = [str(warning.message) for warning in caught]
assert len(texts) == 2, texts
for step, text in zip((2, 3), texts):
  assert f'step {step} is not saved' in text, text
assert saved.restore(_like(_state(1)))[0] == 1
assert saved.save(4, _state(4), 2.0)
saved.wait()
assert sorted(path.name for path in folder.iterdir()) == ['1', '4']
assert Checkpoints(folder, max_to_keep=1).restore(_like(_state(1)))[0] == 4
"""


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_run(tmp_path: Path):
  run = _run(_FULL_DISK, tmp_path / 'c', stderr=subprocess.PIPE)
  _, errors = run.communicate(timeout=120)
  assert run.returncode == 0, errors
  assert 'pickle' not in errors


def _fail(*_: object, **__: object) -> None:
  raise OSError(28, 'No space left on device')


@pytest.mark.parametrize(
  'name', [(ocp.AsyncCheckpointer, 'save'), (os, 'rename')]
)
def test_a_failed_save_does_not_end_the_run(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: tuple[Any, str]
):
  folder = tmp_path / 'c'
  with Checkpoints(folder, max_to_keep=1) as saved:
    assert saved.save(1, _state(1), 1.0)
    saved.wait()
    with monkeypatch.context() as patch:
      patch.setattr(*name, _fail)
      with pytest.warns(
        RuntimeWarning, match='step 2.*No space left'
      ) as caught:
        assert saved.save(2, _state(2), 0.5) == (name[0] is os)
        saved.wait()
        saved.wait()
      _only(caught, 'step 2')
    assert [path.name for path in folder.iterdir()] == ['1']
    assert saved.restore(_like(_state(0)))[0] == 1
    assert saved.save(3, _state(3), 2.0)
  assert _steps(folder) == [1, 3]


@pytest.mark.parametrize('last', [True, False])
def test_a_failed_save_is_told_by_what_comes_next(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
):
  with (
    monkeypatch.context() as patch,
    pytest.warns(RuntimeWarning, match='is not saved') as caught,
    Checkpoints(tmp_path / 'c', max_to_keep=2) as saved,
  ):
    patch.setattr(os, 'rename', _fail)
    assert saved.save(1, _state(1))
    if not last:
      assert saved.save(2, _state(2))
  assert 'step 1' in str(caught[0].message)
  assert not list((tmp_path / 'c').iterdir())


def test_the_third_failure_in_a_row_ends_a_run_that_only_waits(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  with (
    pytest.warns(RuntimeWarning, match='is not saved'),
    Checkpoints(tmp_path / 'c', max_to_keep=1) as saved,
  ):
    monkeypatch.setattr(os, 'rename', _fail)
    for step in (1, 2, 3):
      assert saved.save(step, _state(step))
    with pytest.raises(checkpoints.UnsavedError, match='last 3 checkpoints'):
      saved.wait()


@pytest.mark.parametrize('error', [OSError(5, 'EIO'), PermissionError(13, '')])
def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
):
  def fail(*_: object) -> None:
    raise error

  folder = tmp_path / 'c'
  _save(folder, 1)
  with Checkpoints(folder, max_to_keep=1) as saved:
    assert saved.save(2, _state(2))
    with monkeypatch.context() as patch:
      patch.setattr('shutil.rmtree', fail)
      with pytest.warns(RuntimeWarning, match='not deleted'):
        saved.wait()
    assert _steps(folder) == [1, 2]
    assert saved.save(3, _state(3))
  assert _steps(folder) == [3]


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
def test_a_file_that_cannot_be_read_is_not_called_damaged(
  tmp_path: Path, name: str
):
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
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: tuple[Any, str]
):
  def fail(*_: object, **__: object) -> None:
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')

  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  with monkeypatch.context() as patch:
    patch.setattr(*name, fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match='RESOURCE_EXHAUSTED'):
      _restore(folder)
  assert _restore(folder)[0] == 2


def test_what_is_being_saved_is_restored(tmp_path: Path):
  with Checkpoints(tmp_path / 'c', max_to_keep=1) as saved:
    for step in (1, 2, 3):
      assert saved.save(step, _state(step))
      assert saved.restore(_like(_state(0)))[0] == step


def test_a_step_before_the_last_can_be_saved(tmp_path: Path):
  with Checkpoints(tmp_path / 'c', max_to_keep=2) as saved:
    for step in (5, 3):
      assert saved.save(step, _state(step))
  assert _steps(tmp_path / 'c') == [3, 5]


_KILLED = """
saved = Checkpoints(Path(sys.argv[1]), max_to_keep=2)
found = saved.restore(_like(_large(0)))
step = found[0] if found else 0
if found:
  _assert_same(found[1], _large(step))
for step in range(step + 1, 1000):
  saved.save(step, _large(step), loss=-step)
  print(step, flush=True)
"""


def _large(step: int) -> dict[str, Any]:
  """Returns 16 MB, so that a save takes some time."""
  kernel = jnp.arange(2**22, dtype=jnp.float32).reshape(2048, -1) * step
  mesh = make_mesh('fsdp=4,tensor=2')
  sharding = NamedSharding(mesh, _SPECS['kernel'])
  return {'kernel': jax.device_put(kernel, sharding)}


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path):
  folder = tmp_path / 'c'
  rng = np.random.default_rng(0)
  reached = []
  unfinished = 0
  for _ in range(6):
    run = _run(_KILLED, folder, stdout=subprocess.PIPE)
    first = int(run.stdout.readline())
    time.sleep(rng.uniform(0.0, 0.4))
    run.send_signal(signal.SIGKILL)
    last = int((f'{first}\n' + run.communicate()[0]).split()[-1])
    unfinished += any('tmp' in path.name for path in folder.iterdir())
    reached.append((first, last))
  for (_, last), (first, _) in itertools.pairwise(reached):
    assert last - 1 <= first <= last + 2
  assert unfinished, 'no run was killed during a save'
  with Checkpoints(folder, max_to_keep=2) as saved:
    step, state = saved.restore(_like(_large(0)))
    _assert_same(state, _large(step))
    assert saved.save(step + 1, _large(step + 1))
  assert not any('tmp' in path.name for path in folder.iterdir())


_PROCESSES = """
import functools, resource
from jax.experimental import multihost_utils
jax.config.update('jax_num_cpu_devices', 4)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
me = jax.process_index()
folder = Path(sys.argv[1])
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
  _flip_number(folder / '3', shard, 0.5)
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
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  long = ocp.AsyncCheckpointer
  checkpoints.ocp.AsyncCheckpointer = functools.partial(long, timeout_secs=5)
  if me == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    assert saved.save(5, value(5))
    saved.wait()
  assert 'step 5 is not saved' in str(caught[0].message), caught
  checkpoints.ocp.AsyncCheckpointer = long
  resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert saved.save(5, value(5))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path):
  with socket.socket() as server:
    server.bind(('localhost', 0))
    address = f'localhost:{server.getsockname()[1]}'
  runs = [
    _run(_PROCESSES, tmp_path / 'c', address, i, stderr=subprocess.PIPE)
    for i in range(2)
  ]
  try:
    for run in runs:
      _, errors = run.communicate(timeout=240)
      assert run.returncode == 0, errors
  finally:
    for run in runs:
      run.kill()
  assert _steps(tmp_path / 'c') == [2, 5]
  names = sorted(path.name for path in (tmp_path / 'damaged-c').iterdir())
  assert names == ['3-1', '4-1']


def test_orbax_alone_restores_a_flipped_bit(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """The reason for the checksums; if this fails, they may go."""
  folder = tmp_path / 'c'
  _save(folder, 1, 2)
  shards = _state(2)['params']['bits'].addressable_shards
  _flip_number(folder / '2', shards[0].data, 0.5)
  monkeypatch.setattr(checkpoints, 'checksums', lambda _: {})
  monkeypatch.setattr(restore, 'checksums', lambda _: {})
  step, state = _restore(folder)
  assert step == 2
  with pytest.raises(AssertionError):
    _assert_same(state, _state(2))
