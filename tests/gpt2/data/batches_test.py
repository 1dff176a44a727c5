import dataclasses
import functools
from pathlib import Path
import threading
import time

import hypothesis
from hypothesis import strategies as st
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.config import Config
from examples.gpt2.data import batches
from examples.gpt2.data.batches import (
  Prefetch,
  make_batch,
  training_batch,
  training_starts,
  validation_batch,
)
from examples.gpt2.devices.sharding import batch_sharding, make_mesh

TOKENS = np.random.default_rng(0).integers(65536, size=4000).astype(np.uint16)
MESHES = ['', 'fsdp=8', 'fsdp=4,tensor=2', 'tensor=8', 'fsdp=2,tensor=2']


def _sharding(mesh: str = '') -> NamedSharding:
  return batch_sharding(make_mesh(mesh))


def _rows(tokens: np.ndarray, starts: list[int], length: int) -> np.ndarray:
  return np.array([tokens[i : i + length + 1] for i in starts], np.int32)


@hypothesis.given(
  mesh=st.sampled_from(MESHES),
  micro_batch_size=st.sampled_from([8, 16, 48]),
  seed=st.integers(0, 2**32 - 1),
  step=st.integers(0, 10**6),
)
def test_a_batch_is_the_same_on_any_mesh_and_in_any_micro_batches(
  mesh: str, micro_batch_size: int, seed: int, step: int
):
  config = Config(
    seed=seed,
    batch_size=48,
    micro_batch_size=micro_batch_size,
    context_length=20,
  )
  sharding = _sharding(mesh)
  batch = training_batch(TOKENS, config, step, sharding)
  starts = np.random.default_rng((seed, step)).integers(4000 - 20, size=48)
  np.testing.assert_array_equal(
    np.concatenate(batch), _rows(TOKENS, starts, 20)
  )
  assert batch.shape == (48 // micro_batch_size, micro_batch_size, 21)
  assert batch.dtype == np.int32
  assert batch.sharding == sharding


def test_batches_do_not_change_between_versions():
  starts = training_starts(1_000_000, 128, batch_size=4, seed=7, step=3)
  np.testing.assert_array_equal(starts, [727824, 974908, 538129, 884454])


def test_batches_reach_both_ends_of_the_text():
  starts = training_starts(40, 16, batch_size=2000, seed=0, step=0)
  assert set(starts) == set(range(24))


@pytest.mark.parametrize('mesh', MESHES)
def test_each_window_is_read_once(monkeypatch, mesh: str):
  read: list[int] = []

  def windows(tokens, starts, *args):
    read.extend(starts.ravel())
    return original(tokens, starts, *args)

  original = batches.windows
  monkeypatch.setattr(batches, 'windows', windows)
  starts = np.arange(32) * 7
  make_batch(TOKENS, starts, 10, 16, _sharding(mesh))
  assert sorted(read) == starts.tolist()


def test_a_process_reads_the_windows_of_its_devices_alone(monkeypatch):
  # What a process with the first and the last of four devices would do.
  def make_array(shape, sharding, callback, dtype):
    indices = sharding.addressable_devices_indices_map(shape)
    devices = sharding.mesh.devices.ravel()[[0, 3]]
    return [callback(indices[device]) for device in devices]

  monkeypatch.setattr(jax, 'make_array_from_callback', make_array)
  sharding = batch_sharding(make_mesh('', jax.devices()[:4]))
  # The tokens of the other devices are not there: reading them would fail.
  tokens = TOKENS[:60]
  starts = np.array([0, 1, 900, 901, 902, 903, 48, 49])
  first, last = make_batch(tokens, starts, 10, 8, sharding)
  np.testing.assert_array_equal(first[0], _rows(tokens, [0, 1], 10))
  np.testing.assert_array_equal(last[0], _rows(tokens, [48, 49], 10))


def test_positions_can_be_split_too():
  sharding = NamedSharding(make_mesh('fsdp=2'), P('fsdp', None, 'data'))
  starts = np.array([3, 1, 4, 15])
  batch = make_batch(TOKENS, starts, 11, 2, sharding)
  np.testing.assert_array_equal(
    np.concatenate(batch), _rows(TOKENS, starts, 11)
  )


def test_a_memory_map_is_read(tmp_path: Path):
  TOKENS.tofile(tmp_path / 'train.bin')
  tokens = np.memmap(tmp_path / 'train.bin', np.uint16, mode='r')
  batch = make_batch(tokens, np.arange(8), 10, 8, _sharding())
  np.testing.assert_array_equal(batch[0], _rows(TOKENS, range(8), 10))


def test_a_micro_batch_that_is_not_full_is_refused():
  with pytest.raises(ValueError, match='reshape'):
    make_batch(TOKENS, np.arange(12), 10, 8, _sharding())


@hypothesis.given(
  num_tokens=st.integers(21, 900),
  max_sequences=st.integers(1, 60),
  micro_batch_size=st.sampled_from([8, 16, 24]),
)
@hypothesis.example(num_tokens=900, max_sequences=16, micro_batch_size=16)
def test_an_evaluation_counts_each_sequence_once(
  num_tokens: int, max_sequences: int, micro_batch_size: int
):
  config = Config(
    context_length=20,
    eval_sequences=max_sequences,
    micro_batch_size=micro_batch_size,
  )
  batch, count = validation_batch(TOKENS[:num_tokens], config, _sharding())
  assert count == min(max_sequences, (num_tokens - 1) // 20)
  assert batch.shape[1:] == (micro_batch_size, 21)
  rows = np.concatenate(batch)
  assert count <= len(rows) < count + micro_batch_size
  # The rest repeats what is counted, and what is counted does not overlap.
  assert set(map(bytes, rows)) == set(map(bytes, rows[:count]))
  places = {bytes(row): i for i, row in enumerate(_all_rows(num_tokens))}
  starts = [places[bytes(row)] for row in rows[:count]]
  assert (np.diff(starts) >= 20).all()
  assert starts[0] == 0


@functools.cache
def _all_rows(num_tokens: int) -> np.ndarray:
  return _rows(TOKENS, range(num_tokens - 20), 20)


def test_an_evaluation_reaches_the_end_of_the_text(tiny: Config):
  batch, count = validation_batch(np.arange(2000), tiny, _sharding())
  assert count == 24
  assert np.concatenate(batch)[count - 1, -1] > 1800


def test_an_evaluation_without_a_seed_is_the_same(tiny: Config):
  other = dataclasses.replace(tiny, seed=1)
  for config in (tiny, other):
    batch, _ = validation_batch(TOKENS, config, _sharding())
    first = _rows(TOKENS, [0], tiny.context_length)
    np.testing.assert_array_equal(batch[0, :1], first)


@hypothesis.given(
  first=st.integers(0, 5),
  count=st.integers(0, 12),
  ahead=st.integers(1, 4),
)
def test_prefetching_gives_what_direct_calls_give(
  first: int, count: int, ahead: int
):
  with Prefetch(str, first, first + count - 1, ahead) as prefetch:
    taken = list(prefetch)
  assert taken == [str(step) for step in range(first, first + count)]


def test_prefetching_batches_on_devices(tiny: Config):
  make = functools.partial(training_batch, TOKENS, tiny)
  sharding = _sharding()
  with Prefetch(functools.partial(make, sharding=sharding), 3, 6) as prefetch:
    for step in range(3, 7):
      np.testing.assert_array_equal(next(prefetch), make(step, sharding))


def test_as_many_batches_as_asked_for_are_made_ahead():
  made: list[int] = []
  with Prefetch(made.append, 1, 100, ahead=2) as prefetch:
    _wait_until(lambda: len(made) == 2)
    next(prefetch)
    _wait_until(lambda: len(made) == 3)
    time.sleep(0.02)
    assert made == [1, 2, 3]


def test_the_time_spent_waiting_is_counted():
  def make(step: int) -> int:
    time.sleep(0.2)
    return step

  with Prefetch(make, 1, 2) as prefetch:
    next(prefetch)
    assert 0.1 < prefetch.waited < 5
    waited = prefetch.waited
    _wait_until(lambda: prefetch._made.qsize() == 2)
    next(prefetch)
    assert waited <= prefetch.waited < waited + 0.1


def test_an_error_arrives_in_its_place_and_again():
  def make(step: int) -> int:
    if step == 3:
      raise OSError('disk is gone')
    return step

  with Prefetch(make, 1, 5) as prefetch:
    assert [next(prefetch), next(prefetch)] == [1, 2]
    for _ in range(2):
      with pytest.raises(OSError, match='disk is gone'):
        next(prefetch)


@pytest.mark.parametrize('taken', [0, 1, 5])
@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_an_exception_stops_the_thread(taken: int, error: type[BaseException]):
  before = threading.active_count()
  start = time.perf_counter()
  prefetch = Prefetch(str, 1, 10**9)
  with pytest.raises(error), prefetch:
    for _ in range(taken):
      next(prefetch)
    raise error
  assert threading.active_count() == before
  assert time.perf_counter() - start < 2
  with pytest.raises(StopIteration):
    next(prefetch)


def test_the_end_comes_again():
  with Prefetch(str, 1, 1) as prefetch:
    assert list(prefetch) == ['1']
    assert list(prefetch) == []


def test_prefetching_outside_of_a_context_is_refused():
  with pytest.raises(RuntimeError, match='with statement'):
    next(Prefetch(str, 1, 2))


def _wait_until(condition) -> None:
  deadline = time.perf_counter() + 10
  while not condition():
    assert time.perf_counter() < deadline
    time.sleep(0.001)
