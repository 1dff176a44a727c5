"""The folder of a run: its settings, metrics and results."""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
import shutil
from typing import IO, Any
import warnings

from examples.gpt2.config import UsageError

_CONFIG = 'config.json'
_METRICS = 'metrics.jsonl'
_SAMPLE = 'sample.txt'
_PICTURE = 'curves.png'
_RESULTS = (
  _METRICS, 'model.json', 'weights.safetensors', _PICTURE, _SAMPLE,
)  # fmt: skip
# Tokens that were prepared elsewhere may come without.
_OPTIONAL = ('tokenizer.json',)
_FOLDERS = ('checkpoints', 'damaged-checkpoints', 'tensorboard', 'profile')


class RunFolder:
  """Reads and writes the files of a run.

  As a context, it lets other runs into the folder at its end.

  A run is finished once all its files are there; the sample is written last.

  Attributes:
    path: The folder.
    checkpoints: Folder of the checkpoints.
    picture: File of the picture.
  """

  def __init__(self, path: Path, *, is_writer: bool = True):
    """Names a folder.

    Args:
      path: The folder.
      is_writer: Whether this process writes; of several, one does.
    """
    self.path = path
    self.checkpoints = path / 'checkpoints'
    self.picture = path / _PICTURE
    self._is_writer = is_writer
    self._lock: IO[bytes] | None = None
    self._unwritten: list[str] = []

  def __enter__(self) -> 'RunFolder':
    return self

  def __exit__(self, *_: object) -> None:
    if self._lock is not None:
      self._lock.close()

  @property
  def finished(self) -> bool:
    """Whether a run ended here."""
    return all((self.path / f).is_file() for f in (_CONFIG, *_RESULTS))

  def start(self, settings: dict[str, Any], *, fresh: bool = False) -> None:
    """Makes the folder and writes its settings.

    Args:
      settings: JSON values; the entry ``'config'`` is what a run is known by.
      fresh: Whether to delete what a run of the same settings left here.

    Raises:
      UsageError: If the folder cannot be written, if it holds another run or
        other files of the names that a run writes, or if a run is going on in
        it.
    """
    if not self._is_writer:
      return
    self._open()
    self._refuse_other_files(settings)
    if fresh:
      self._clear()
    if not self.finished:
      write_whole(self.path / _CONFIG, json.dumps(settings, indent=2).encode())

  def _clear(self) -> None:
    """Deletes the files of a run, its settings last."""
    for name in _FOLDERS:
      shutil.rmtree(self.path / name, ignore_errors=True)
    for name in reversed((_CONFIG, *_OPTIONAL, *_RESULTS)):
      (self.path / name).unlink(missing_ok=True)

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
      names = _OPTIONAL + _RESULTS
      found = [name for name in names if (self.path / name).exists()]
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
        'wrote, or a damaged one: restore or delete the folder, or choose '
        'another.'
      ) from error

  def keep_metrics(self, step: int) -> None:
    """Cuts off the lines of metrics.jsonl after a step, also torn ones.

    Args:
      step: Steps that are done, each of which should have a line.

    Warns:
      UserWarning: If lines of those steps are lost.
    """
    if not self._is_writer:
      return
    path = self.path / _METRICS
    lines = self.read_metrics() if path.is_file() else []
    kept = {line['step']: line for line in lines if line['step'] <= step}
    if len(kept) < step:
      warnings.warn(
        f'{path} has lost {step - len(kept)} of the lines up to step {step}.',
        stacklevel=2,
      )
    text = ''.join(map(_line, kept.values()))
    write_whole(path, text.encode())

  def log(self, metrics: dict[str, Any]) -> None:
    """Appends a line to metrics.jsonl, or later if the disk is full."""
    if self._is_writer:
      self._unwritten.append(_line(metrics))
      self._try_to_write()

  def flush(self) -> None:
    """Makes sure that metrics.jsonl is on the disk.

    Raises:
      OSError: If it cannot be written.
    """
    if self._is_writer:
      self._write_lines()

  def _try_to_write(self) -> None:
    try:
      self._write_lines()
    except OSError as error:
      if len(self._unwritten) == 1:
        warnings.warn(
          f'{self.path / _METRICS} cannot be written ({error}): its lines wait '
          'in memory.',
          stacklevel=4,
        )

  def _write_lines(self) -> None:
    if not self._unwritten:
      return
    # Without a buffer, which would be written as the file is closed.
    with (self.path / _METRICS).open('ab', buffering=0) as file:
      size = file.seek(0, os.SEEK_END)
      left = ''.join(self._unwritten).encode()
      try:
        while left:
          left = left[file.write(left) :]
        os.fsync(file.fileno())
      except OSError:
        os.ftruncate(file.fileno(), size)
        raise
    self._unwritten = []

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, without those that are torn."""
    content = (self.path / _METRICS).read_text(errors='replace')
    lines = []
    for text in content.splitlines(keepends=True):
      if text.endswith('\n'):
        with contextlib.suppress(ValueError):
          lines.append(json.loads(text))
    return [x for x in lines if isinstance(x, dict) and 'step' in x]

  def read_settings(self) -> dict[str, Any]:
    """Returns what ``start`` was given."""
    return json.loads((self.path / _CONFIG).read_text())

  def write_sample(self, text: str) -> None:
    """Writes the sample, which marks the run as finished."""
    write_whole(self.path / _SAMPLE, text.encode())


def _line(metrics: dict[str, Any]) -> str:
  return json.dumps(_without_nan(metrics), allow_nan=False) + '\n'


def _without_nan(value: Any) -> Any:
  """Returns None for numbers that are not finite: JSON has none."""
  if isinstance(value, dict):
    return {name: _without_nan(x) for name, x in value.items()}
  if isinstance(value, list):
    return [_without_nan(x) for x in value]
  is_lost = isinstance(value, float) and not math.isfinite(value)
  return None if is_lost else value


def write_whole(path: Path, content: bytes) -> None:
  """Writes a file that is whole or not there, even if the machine stops."""
  with whole_file(path) as scratch:
    scratch.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
  """Gives a scratch file, which takes its place if all goes well."""
  scratch = path.with_name(f'.{path.name}.partial')
  yield scratch
  with scratch.open('rb') as file:
    os.fsync(file.fileno())
  os.replace(scratch, path)
