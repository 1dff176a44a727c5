"""The results of runs, a JSON file for each."""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import math
from pathlib import Path
from typing import Any

from examples.gpt2.config import UsageError
from examples.gpt2.run.folder import write_whole
from examples.study.plans import Result, Run


class Store:
  """A folder of results.

  Attributes:
    folder: Where they are.
  """

  def __init__(self, folder: Path):
    self.folder = folder

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Makes the folder, and keeps other studies out of it.

    Raises:
      UsageError: If another study is going on there.
      OSError: If the folder cannot be written.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    with (self.folder / '.lock').open('wb') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        raise UsageError(
          f'--results {self.folder} is in use by a study that goes on now.'
        ) from error
      yield

  def read(self, run: Run) -> dict[str, Any] | None:
    """Returns what a run's file holds, None if there is none.

    Raises:
      UsageError: If the file is damaged.
    """
    path = self._path(run)
    return _read(path) if path.is_file() else None

  def result(self, run: Run) -> Result | None:
    """Returns the result of a run, None if it has not been made."""
    found = self.read(run)
    if found is None:
      return None
    loss = math.inf if found['loss'] is None else found['loss']
    return Result(loss, found['watched'])

  def write(self, run: Run, record: dict[str, Any]) -> None:
    """Writes the file of a run."""
    self.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, separators=(',', ':'), allow_nan=False)
    write_whole(self._path(run), (text + '\n').encode())

  def read_all(self) -> list[dict[str, Any]]:
    """Returns what the files of all runs hold."""
    return [_read(x) for x in sorted(self.folder.glob('[0-9a-f]*.json'))]

  def check_text(self, sha256: str) -> None:
    """Checks that all runs were made with the same text.

    Raises:
      UsageError: If a run was made with another.
    """
    for record in self.read_all():
      if record['corpus_sha256'] != sha256:
        raise UsageError(
          f'--results {self.folder} holds runs on another text than --data: '
          f'sha256 {record["corpus_sha256"][:16]} and {sha256[:16]}. The text '
          "'stdlib' differs from one Python to the next; those runs were made "
          f'with {record["versions"]["python"]}. Give --results a folder of '
          'its own.'
        )

  def _path(self, run: Run) -> Path:
    return self.folder / f'{run.key}.json'


def _read(path: Path) -> dict[str, Any]:
  needed = {'config', 'corpus_sha256', 'loss', 'seconds', 'versions', 'watched'}
  try:
    record = json.loads(path.read_text())
  except ValueError:
    record = None
  if not isinstance(record, dict) or not needed <= record.keys():
    raise UsageError(
      f'{path} is damaged, or not of a study: restore it, or delete it to have '
      'the run made again.'
    )
  return record
