from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np

from examples.gpt2.config import Config, change
from examples.gpt2.data.batches import (
  Mixture,
  batch_shape,
  training_batch,
  validation_batch,
)
from examples.gpt2.data.token_files import open_files
from examples.gpt2.sharding import (
  batch_sharding,
  make_mesh,
  num_batch_shards,
)

TOKENS = np.random.default_rng(0).integers(65536, size=4000).astype(np.uint16)
ONE = make_mesh('', jax.devices()[:1])
MESHES = ['', 'fsdp=8', 'fsdp=4,tensor=2', 'tensor=8', 'fsdp=2,tensor=2']


def _config(**settings) -> Config:
  return change(
    Config(),
    **dict(seed=0, batch_size=48, micro_batch_size=1, context_length=20)
    | settings,
  )


@hypothesis.settings(max_examples=15)
@hypothesis.given(
  text=st.sampled_from(MESHES),
  micro_batch_size=st.sampled_from([1, 2, 6]),
  seed=st.integers(0, 2**32 - 1),
  step=st.integers(1, 10**6),
  sampling=st.sampled_from(['without-replacement', 'with-replacement']),
)
def test_a_batch_is_the_same_on_any_mesh_and_in_any_micro_batches(
  text: str, micro_batch_size: int, seed: int, step: int, sampling: str
):
  mesh = make_mesh(text)
  config = _config(seed=seed, sampling=sampling)
  expected = np.concatenate(training_batch(TOKENS, config, step, ONE))
  changed = change(config, micro_batch_size=micro_batch_size)
  batch = training_batch(TOKENS, changed, step, mesh)
  np.testing.assert_array_equal(np.concatenate(batch), expected)
  rows = micro_batch_size * num_batch_shards(mesh)
  assert batch.shape == (48 // rows, rows, 21)
  assert batch.dtype == np.int32
  assert batch.sharding == batch_sharding(mesh)


def _starts(sources: Mixture | np.ndarray, steps: range, **settings):
  """Returns the first tokens of steps, which are those of a range."""
  config = _config(**settings)
  found = [training_batch(sources, config, x, ONE) for x in steps]
  batch = np.concatenate([row for step in found for row in step])
  np.testing.assert_array_equal(np.diff(batch), 1)
  return batch[:, 0]


@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_an_epoch_has_each_sequence_once(tmp_path_factory, data):
  length = data.draw(st.integers(5, 9))
  # Grain needs milliseconds for each place of a source of few sequences.
  sizes = data.draw(st.lists(st.integers(300, 900), min_size=1, max_size=3))
  weights = [data.draw(st.floats(0.1, 9)) for _ in sizes]
  count = data.draw(st.integers(20, 40))
  mixture = _mixture(tmp_path_factory.mktemp('sources'), sizes, weights)
  steps = range(1, 2 - -400 // count)
  starts = _starts(mixture, steps, batch_size=count, context_length=length)
  bounds = np.cumsum([0, *sizes])
  for first, size in zip(bounds, sizes, strict=False):
    of_source = starts[(first <= starts) & (starts < first + size)] - first
    windows = (size - 1) // length
    expected = np.arange(windows) * length
    epochs = np.split(of_source, range(windows, len(of_source), windows))
    for epoch in epochs[:-1]:
      np.testing.assert_array_equal(np.sort(epoch), expected)
    assert len(set(epochs[-1])) == len(epochs[-1])
    assert set(epochs[-1]) <= set(expected)
    if windows > 10 and len(epochs) > 2:
      assert (epochs[0] != epochs[1]).any()


@hypothesis.settings(max_examples=5)
@hypothesis.given(
  weights=st.lists(st.floats(0.02, 1), min_size=2, max_size=4),
  sampling=st.sampled_from(['without-replacement', 'with-replacement']),
)
def test_sources_have_their_shares(tmp_path_factory, weights, sampling):
  sizes = [90_000] * len(weights)
  mixture = _mixture(tmp_path_factory.mktemp('sources'), sizes, weights)
  settings = dict(batch_size=4096, context_length=10, sampling=sampling)
  starts = _starts(mixture, range(1, 3), **settings)
  shares = np.bincount(starts // 90_000, minlength=len(weights)) / len(starts)
  # Grain rounds to a hundredth of the smallest weight.
  np.testing.assert_allclose(
    shares, np.array(weights) / sum(weights), rtol=0.011, atol=0.001
  )


def _mixture(folder: Path, sizes, weights) -> Mixture:
  """Makes token files, of which each token is its place among all."""
  sources, first = [], 0
  for i, size in enumerate(sizes):
    np.save(folder / f'{i}.npy', np.arange(first, first + size, dtype='u4'))
    sources.append(open_files([folder / f'{i}.npy'], 1 << 24))
    first += size
  return Mixture(sources, weights)


@hypothesis.settings(max_examples=15)
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
  windows = np.lib.stride_tricks.sliding_window_view(TOKENS[:num_tokens], 21)
  places = {bytes(row.astype(np.int32)): i for i, row in enumerate(windows)}
  starts = [places[bytes(row)] for row in rows[:count]]
  assert starts[0] == 0
  # They are spread evenly, up to the end.
  end = (num_tokens - 1) // 20 * 20
  distances = np.diff([*starts, end])
  assert distances.min() >= 20
  assert np.ptp(distances) <= 20
