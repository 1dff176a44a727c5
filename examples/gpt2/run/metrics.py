"""The file of a run's metrics, a line of JSON for each step."""

from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import json
import os
from pathlib import Path
import time
from typing import Any
import warnings

import jax

from examples.gpt2.storage import is_remote, os_errors, read_bytes, write_whole

UPLOAD_SECONDS = 60.0
"""How often the metrics of a run in a store go there, at the most."""


def metrics_file(path: Path) -> 'MetricsFile | MetricsObject':
  """Returns what writes a file of metrics, on a disk or in a store."""
  return MetricsObject(path) if is_remote(path) else MetricsFile(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Returns the lines of a file of metrics, but for torn ones."""
  content = read_bytes(path).decode(errors='replace')
  lines = []
  for text in content.splitlines(keepends=True):
    if text.endswith('\n'):
      with contextlib.suppress(ValueError):
        lines.append(json.loads(text))
  return [x for x in lines if isinstance(x, dict) and 'step' in x]


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns each number of a step by its path, such as 'layers/clipped/1'."""
  found = {}
  for path, value in jax.tree.leaves_with_path(metrics):
    # Layers count from 1.
    keys = [x.key if hasattr(x, 'key') else str(x.idx + 1) for x in path]
    found['/'.join(keys)] = float(value)
  return found


class MetricsFile:
  """A file on a disk, to which each line is appended at once."""

  def __init__(self, path: Path):
    self._path = path
    self._unwritten: list[str] = []

  def replace(self, lines: list[str]) -> None:
    """Makes these the lines of the file."""
    write_whole(self._path, ''.join(lines).encode())

  def add(self, line: str) -> None:
    """Adds a line, or later if the disk is full; raises nothing."""
    self._unwritten.append(line)
    try:
      self.flush()
    except OSError as error:
      if len(self._unwritten) == 1:
        _warn(self._path, error)

  def flush(self) -> None:
    """Makes sure that all lines are on the disk, or raises ``OSError``."""
    if not self._unwritten:
      return
    # Without a buffer, which would be written as the file is closed.
    with self._path.open('ab', buffering=0) as file:
      size = file.tell()
      left = ''.join(self._unwritten).encode()
      try:
        while left:
          left = left[file.write(left) :]
        os.fsync(file.fileno())
      except OSError:
        os.ftruncate(file.fileno(), size)
        raise
    self._unwritten = []


class MetricsObject:
  """An object in a store, which is written whole, from time to time.

  Its lines are kept in memory, for a store does not append.
  """

  def __init__(self, path: Path):
    self._path = path
    self._content = bytearray()
    self._thread = ThreadPoolExecutor(1)
    self._upload: Future[None] | None = None
    self._due = time.monotonic() + UPLOAD_SECONDS

  def replace(self, lines: list[str]) -> None:
    """Makes these the lines of the object."""
    self._content[:] = ''.join(lines).encode()
    self._write(bytes(self._content))

  def add(self, line: str) -> None:
    """Adds a line, which goes up with the next ones; waits for no store."""
    self._content += line.encode()
    if time.monotonic() < self._due or not self._is_idle():
      return
    self._due = time.monotonic() + UPLOAD_SECONDS
    self._upload = self._thread.submit(self._write, bytes(self._content))

  def _is_idle(self) -> bool:
    """Returns whether the upload before is over; warns if it failed."""
    if self._upload is None:
      return True
    if not self._upload.done():
      return False
    if error := self._upload.exception():
      _warn(self._path, error)
    self._upload = None
    return True

  def _write(self, content: bytes) -> None:
    with os_errors():
      write_whole(self._path, content)

  def flush(self) -> None:
    """Makes sure that all lines are in the store, or raises ``OSError``."""
    # After an upload under way, lest that replaces this one.
    self._thread.submit(self._write, bytes(self._content)).result()


def _warn(path: Path, error: BaseException) -> None:
  warnings.warn(
    f'{path} cannot be written ({error}): its lines wait in memory.',
    stacklevel=4,
  )
