"""Keeps a second run out of a folder while one goes on in it."""

import contextlib
import fcntl
import json
import os
from pathlib import Path
import socket
import sys
import threading
import time
import warnings

from examples.gpt2.config import UsageError
from examples.gpt2.storage import (
  create,
  is_remote,
  os_errors,
  read_bytes,
  write_whole,
)

BEAT_SECONDS = 15.0
"""How often a run in a store shows that it goes on."""
SILENT_SECONDS = 60.0
"""After how long without such a sign a run counts as killed."""

LOCK = '.lock'
"""File of a folder on a disk that is locked."""
_CLAIM = '.claim-'  # Begins the names of objects in a store.


def claim(folder: Path) -> 'FileLock | Lease':
  """Claims a folder; raises ``UsageError`` if a run that goes on has it."""
  return Lease(folder) if is_remote(folder) else FileLock(folder)


def is_claim(path: Path) -> bool:
  """Returns whether a file only says that its folder is, or was, claimed."""
  return path.name == LOCK or path.name.startswith(_CLAIM)


def _refusal(folder: Path, owner: str = '') -> UsageError:
  return UsageError(
    f'--out-dir {folder} is in use by a run that goes on now{owner}.'
  )


class FileLock:
  """A lock of the operating system, which ends with its process."""

  def __init__(self, folder: Path):
    self._file = (folder / LOCK).open('wb')
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise _refusal(folder) from error
    except OSError as error:  # Such as of Lustre, mounted without flock.
      warnings.warn(
        f'{folder} cannot be locked ({error}): a second run in it would not be '
        'refused.',
        stacklevel=2,
      )

  def check(self) -> None:
    """Does nothing: nobody takes a lock away."""

  def close(self) -> None:
    """Lets other runs into the folder."""
    self._file.close()


class Lease:
  """An object in a store, which changes as long as its run goes on.

  Of several runs, one can create the object of the next number; it has the
  folder if the run of the last number has ended or is silent. No clocks of
  different machines are compared: whoever waits watches the object.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    self._owner = f' on {socket.gethostname()}, process {os.getpid()}'
    former = sorted(folder.glob(f'{_CLAIM}*'), key=_number)
    if former:
      _wait_until_silent(folder, former[-1])
    self._number = _number(former[-1]) + 1 if former else 1
    self._beats = 0
    try:
      create(self._path(self._number), self._content(self._owner))
    except FileExistsError as error:
      raise _refusal(folder) from error
    for path in former:
      with contextlib.suppress(OSError):
        path.unlink()
    self._is_lost = False
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)
    self._thread.start()

  def _path(self, number: int) -> Path:
    return self._folder / f'{_CLAIM}{number}'

  def _content(self, owner: str | None) -> bytes:
    self._beats += 1
    return json.dumps({'owner': owner, 'beats': self._beats}).encode()

  def _beat(self) -> None:
    num_failures = 0  # In a row.
    while not self._ended.wait(BEAT_SECONDS):
      try:
        self._look()
        if self._is_lost:
          return
        write_whole(self._path(self._number), self._content(self._owner))
        num_failures = 0
      except Exception as error:  # Whatever failed, the next may succeed.
        num_failures += 1
        if num_failures == 2:
          print(
            f'warning: {self._folder} cannot be written ({error}). After '
            f'{SILENT_SECONDS:.0f} s without a sign of this run another one '
            'may take the folder.',
            file=sys.stderr,
            flush=True,
          )

  def _look(self) -> None:
    """Looks whether another run has the folder, the next or a later one."""
    with os_errors():
      numbers = map(_number, self._folder.glob(f'{_CLAIM}*'))
      self._is_lost |= any(number > self._number for number in numbers)

  def check(self) -> None:
    """Raises ``UsageError`` if another run has the folder by now."""
    # If the store is away, a save fails too.
    with contextlib.suppress(OSError):
      self._look()
    if self._is_lost:
      raise UsageError(
        f'--out-dir {self._folder}: another run has taken the folder over, '
        f'since this one gave no sign for {SILENT_SECONDS:.0f} s.'
      )

  def close(self) -> None:
    """Lets other runs into the folder."""
    self._ended.set()
    self._thread.join()
    if not self._is_lost:
      with contextlib.suppress(OSError):  # Then others wait.
        write_whole(self._path(self._number), self._content(None))


def _number(path: Path) -> int:
  return int(path.name.rpartition('-')[2])


def _wait_until_silent(folder: Path, path: Path) -> None:
  """Raises ``UsageError`` if the run of a claim gives a sign."""
  before = read_bytes(path)
  owner = json.loads(before)['owner']
  if owner is None:
    return
  print(
    f'{folder} has a run{owner} that has not said that it ended: waiting '
    f'{SILENT_SECONDS:.0f} s for a sign that it goes on.',
    flush=True,
  )
  end = time.monotonic() + SILENT_SECONDS
  while time.monotonic() < end:
    time.sleep(min(1.0, SILENT_SECONDS / 20))
    if not path.exists():
      raise _refusal(folder, owner)
    now = read_bytes(path)
    if json.loads(now)['owner'] is None:
      return
    if now != before:
      raise _refusal(folder, owner)
