"""The folder of a run: settings, metrics and weights as files."""

import fcntl
import json
import os
from pathlib import Path
import platform
from typing import IO, Any

import flax
import jax
import jaxlib
import numpy as np
import optax
import safetensors.numpy
import tokenizers

from examples.gpt2.config import UsageError
import merit_optax

_CONFIG = 'config.json'
_METRICS = 'metrics.jsonl'
_WEIGHTS = 'weights.safetensors'
_SAMPLE = 'sample.txt'
_PICTURE = 'curves.png'
_RESULTS = (_METRICS, _WEIGHTS, _PICTURE, _SAMPLE)


class RunFolder:
  """Reads and writes the files of a run.

  As a context, it lets other runs into the folder at its end.

  A run is finished once all its files are there; the sample is written last.

  Attributes:
    path: The folder.
    picture: File of the picture.
  """

  def __init__(self, path: Path):
    self.path = path
    self.picture = path / _PICTURE
    self._lock: IO[bytes] | None = None

  def __enter__(self) -> 'RunFolder':
    return self

  def __exit__(self, *_: object) -> None:
    if self._lock is not None:
      self._lock.close()

  @property
  def finished(self) -> bool:
    """Whether a run ended here."""
    return all((self.path / f).is_file() for f in (_CONFIG, *_RESULTS))

  def start(self, settings: dict[str, Any]) -> bool:
    """Makes the folder and writes its settings.

    Args:
      settings: JSON values; the entry ``'config'`` is what a run is known by.

    Returns:
      Whether metrics of the same run, killed before its end, were thrown away.

    Raises:
      UsageError: If the folder cannot be written, if it holds another run or
        other files of the names that a run writes, or if a run is going on in
        it.
    """
    self._open()
    self._refuse_other_files(settings)
    if self.finished:
      return False
    metrics = self.path / _METRICS
    was_killed = metrics.is_file() and metrics.stat().st_size > 0
    _write(self.path / _CONFIG, json.dumps(settings, indent=2).encode())
    metrics.write_bytes(b'')
    return was_killed

  def _open(self) -> None:
    """Makes the folder, and keeps a second run out while this one goes on."""
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = (self.path / '.lock').open('wb')
    except OSError as error:
      raise UsageError(
        f'--out-dir {self.path} cannot be written: {error}'
      ) from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UsageError(
        f'--out-dir {self.path} is in use by a run that goes on now.'
      ) from error

  def _refuse_other_files(self, settings: dict[str, Any]) -> None:
    """Raises ``UsageError`` where something of somebody else would be lost."""
    old = self._read_identity()
    new = json.loads(json.dumps(settings['config']))
    if old is None:
      found = [name for name in _RESULTS if (self.path / name).exists()]
      what = f'{", ".join(found)} of something else' if found else ''
    else:
      names = sorted(k for k in old | new if old.get(k) != new.get(k))
      changes = ', '.join(f'{k}: {old.get(k)} -> {new.get(k)}' for k in names)
      what = f'a run with other settings ({changes})' if changes else ''
    if what:
      raise UsageError(
        f'--out-dir {self.path} holds {what}: choose another folder, or delete '
        'this one.'
      )

  def _read_identity(self) -> dict[str, Any] | None:
    """Returns the settings of the run in the folder, None if there is none."""
    if not (self.path / _CONFIG).exists():
      return None
    try:
      return dict(self.read_settings()['config'])
    except (ValueError, TypeError, KeyError) as error:
      raise UsageError(
        f'--out-dir {self.path} holds a {_CONFIG} that no run of this trainer '
        'wrote: choose another folder.'
      ) from error

  def log(self, metrics: dict[str, Any]) -> None:
    """Appends a line to metrics.jsonl."""
    with (self.path / _METRICS).open('a') as file:
      file.write(json.dumps(metrics) + '\n')

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl."""
    lines = (self.path / _METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]

  def read_settings(self) -> dict[str, Any]:
    """Returns what ``start`` was given."""
    return json.loads((self.path / _CONFIG).read_text())

  def write_weights(self, weights: dict[str, np.ndarray]) -> None:
    """Writes the final weights, by the names of the parameters."""
    _write(self.path / _WEIGHTS, safetensors.numpy.save(weights))

  def write_sample(self, text: str) -> None:
    """Writes the sample, which marks the run as finished."""
    _write(self.path / _SAMPLE, text.encode())


def machine() -> dict[str, Any]:
  """Returns versions and devices, as JSON values."""
  return {
    'versions': {
      'python': platform.python_version(),
      'merit_optax': merit_optax.__version__,
      'jax': jax.__version__,
      'jaxlib': jaxlib.__version__,
      'optax': optax.__version__,
      'flax': flax.__version__,
      'tokenizers': tokenizers.__version__,
    },
    'devices': [f'{d.platform}:{d.id} {d.device_kind}' for d in jax.devices()],
    'cpu_cores': os.cpu_count(),
  }


def _write(path: Path, content: bytes) -> None:
  """Writes a file that is whole or not there, even if the run is killed."""
  scratch = path.with_name(f'.{path.name}.partial')
  scratch.write_bytes(content)
  os.replace(scratch, path)
