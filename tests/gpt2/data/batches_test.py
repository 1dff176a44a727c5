import functools

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np

from examples.gpt2.config import Config
from examples.gpt2.data import batches
from examples.gpt2.data.batches import (
  batch_shape,
  training_batch,
  validation_batch,
)
from examples.gpt2.data.shards import read_windows
from examples.gpt2.devices.sharding import (
  batch_sharding,
  make_mesh,
  num_batch_shards,
)

TOKENS = np.random.default_rng(0).integers(65536, size=4000).astype(np.uint16)
MESHES = ['', 'fsdp=8', 'fsdp=4,tensor=2', 'tensor=8', 'fsdp=2,tensor=2']


def _config(**settings) -> Config:
  return Config(
    **dict(seed=0, batch_size=48, micro_batch_size=1, context_length=20)
    | settings
  )


def _rows(tokens: np.ndarray, starts: list[int], length: int) -> np.ndarray:
  return np.array([tokens[i : i + length + 1] for i in starts], np.int32)


@hypothesis.given(
  text=st.sampled_from(MESHES),
  micro_batch_size=st.sampled_from([1, 2, 6]),
  seed=st.integers(0, 2**32 - 1),
  step=st.integers(0, 10**6),
)
def test_a_batch_is_the_same_on_any_mesh_and_in_any_micro_batches(
  text: str, micro_batch_size: int, seed: int, step: int
):
  mesh = make_mesh(text)
  config = _config(seed=seed, micro_batch_size=micro_batch_size)
  batch = training_batch(TOKENS, config, step, mesh)
  starts = np.random.default_rng((seed, step)).integers(4000 - 20, size=48)
  expected = _rows(TOKENS, starts, 20)
  np.testing.assert_array_equal(np.concatenate(batch), expected)
  rows = micro_batch_size * num_batch_shards(mesh)
  assert batch.shape == (48 // rows, rows, 21)
  assert batch.dtype == np.int32
  assert batch.sharding == batch_sharding(mesh)


def test_batches_do_not_change_between_versions():
  config = _config(seed=7, batch_size=4, context_length=128)
  mesh = make_mesh('', jax.devices()[:1])
  batch = training_batch(np.arange(1_000_000), config, 3, mesh)
  expected = [727824, 974908, 538129, 884454]
  np.testing.assert_array_equal(batch[:, 0, 0], expected)


def test_a_process_reads_the_windows_of_its_devices_alone(monkeypatch):
  config = _config(batch_size=8, micro_batch_size=2)
  mesh = make_mesh('', jax.devices()[:4])
  whole = training_batch(TOKENS, config, 1, mesh)
  read = []

  def record(tokens, starts, length):
    read.extend(starts)
    return read_windows(tokens, starts, length)

  def of_own(sharding, shape):
    # As in a process with the first and the last of four devices.
    own = mesh.devices.ravel()[[0, 3]]
    return {x: sharding.devices_indices_map(shape)[x] for x in own}

  def make_own(shape, sharding, callback):
    return [callback(index) for index in of_own(sharding, shape).values()]

  name = 'addressable_devices_indices_map'
  monkeypatch.setattr(jax.sharding.NamedSharding, name, of_own)
  monkeypatch.setattr(jax, 'make_array_from_callback', make_own)
  monkeypatch.setattr(batches, 'read_windows', record)
  first, last = training_batch(TOKENS, config, 1, mesh)
  np.testing.assert_array_equal(first, whole[:, :2])
  np.testing.assert_array_equal(last, whole[:, 6:])
  assert len(read) == 4


@hypothesis.given(
  num_tokens=st.integers(21, 900),
  max_sequences=st.integers(1, 60),
  micro_batch_size=st.sampled_from([1, 2, 3]),
)
@hypothesis.example(num_tokens=900, max_sequences=16, micro_batch_size=2)
def test_an_evaluation_counts_each_sequence_once(
  num_tokens: int, max_sequences: int, micro_batch_size: int
):
  config = _config(
    eval_sequences=max_sequences, micro_batch_size=micro_batch_size
  )
  mesh = make_mesh('')
  batch, count = validation_batch(TOKENS[:num_tokens], config, mesh)
  assert count == min(max_sequences, (num_tokens - 1) // 20)
  assert batch.shape[1:] == batch_shape(config, mesh).shape[1:]
  rows = np.concatenate(batch)
  assert count <= len(rows) < count + 8 * micro_batch_size
  # The rest repeats what is counted, and what is counted does not overlap.
  assert set(map(bytes, rows)) == set(map(bytes, rows[:count]))
  places = {bytes(row): i for i, row in enumerate(_all_rows(num_tokens))}
  starts = [places[bytes(row)] for row in rows[:count]]
  assert starts[0] == 0
  # They are spread evenly, up to the end.
  end = (num_tokens - 1) // 20 * 20
  distances = np.diff([*starts, end])
  assert distances.min() >= 20
  assert np.ptp(distances) <= 20


@functools.cache
def _all_rows(num_tokens: int) -> np.ndarray:
  return _rows(TOKENS, range(num_tokens - 20), 20)
