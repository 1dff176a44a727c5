"""The records of a scale's trials, in one file of JSON lines."""

from collections.abc import Iterator
import contextlib
import fcntl
import json
from pathlib import Path
from typing import Any

from examples.gpt2.config import UsageError
from examples.gpt2.devices import processes
from examples.gpt2.storage import write_whole
from examples.study.trial import Result, Trial, read_result

_SORTED_BY = ('optimizer', 'arm', 'batch_size', 'learning_rate', 'seed')
_NEEDED = {
  'key', *_SORTED_BY, 'loss', 'config', 'corpus_sha256', 'diagnostics',
  'seconds', 'versions',
}  # fmt: skip


class Store:
  """A file with a record, one line of JSON, for each trial that has a result.

  Of several processes, the first reads and writes the file, and tells the
  others what it holds.

  Attributes:
    path: The file.
    records: What it holds, by the keys of the trials.
  """

  def __init__(self, path: Path):
    """Reads the file, if there is one.

    Raises:
      UsageError: If a line is damaged.
    """
    self.path = path
    self.records: dict[str, dict[str, Any]] = processes.on_process_0(
      _read, path
    )

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Keeps other studies from the file.

    Raises:
      UsageError: If another study is using the file, or a line is damaged.
      OSError: If the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
      processes.on_process_0(stack.enter_context, _locked(self.path))
      self.records = processes.on_process_0(_read, self.path)
      yield
      # After an error, the first closes it alone: others may have none.
      processes.on_process_0(stack.close)

  def result(self, trial: Trial) -> Result | None:
    """Returns the result of a trial, None if it has none."""
    record = self.records.get(trial.key)
    return None if record is None else read_result(record)

  def results(self, trials: list[Trial]) -> list[Result]:
    """Returns the results of trials that all have one."""
    return [read_result(self.records[x.key]) for x in trials]

  def add(self, record: dict[str, Any]) -> None:
    """Adds the record of a trial; it is on the disk once this returns.

    Args:
      record: JSON values, those of the label first (see :class:`Trial`). Of
        several processes, that of the first is added.

    Raises:
      OSError: If the file cannot be written.
    """
    record = processes.on_process_0(_add, self.path, self.records, record)
    self.records[record['key']] = record

  def check_text(self, sha256: str) -> None:
    """Checks that all trials were trained on the same text.

    Raises:
      UsageError: If a trial was trained on another.
    """
    for record in self.records.values():
      # Archived trials on images have none.
      if record['corpus_sha256'] not in (None, sha256):
        raise UsageError(
          f'{self.path} holds trials on another text than --data: sha256 '
          f'{record["corpus_sha256"][:16]} and {sha256[:16]}. The text '
          "'stdlib' differs from one Python to the next, and those trials were "
          f'trained with {record["versions"]["python"]}. Give --results '
          'another folder.'
        )


def _read(path: Path) -> dict[str, dict[str, Any]]:
  """Returns the records by key."""
  if not path.is_file():
    return {}
  records: dict[str, dict[str, Any]] = {}
  lines = path.read_text(errors='replace').splitlines()
  for number, line in enumerate(lines, 1):
    try:
      record = json.loads(line)
    except ValueError:
      record = None
    if not isinstance(record, dict) or not record.keys() >= _NEEDED:
      raise UsageError(
        f'{path}, line {number}: damaged, or not the record of a trial. '
        'Restore the line, or delete it to have its trial repeated.'
      )
    if record['key'] in records:
      raise UsageError(
        f'{path}, line {number}: a second record of trial {record["key"]}. '
        'Delete one of them.'
      )
    records[record['key']] = record
  return records


def _line(record: dict[str, Any]) -> bytes:
  text = json.dumps(record, separators=(',', ':'), allow_nan=False)
  return f'{text}\n'.encode()


def _add(
  path: Path, records: dict[str, dict[str, Any]], record: dict[str, Any]
) -> dict[str, Any]:
  """Writes the file anew, in order, so that a diff shows what is new."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = sorted([*records.values(), record], key=_rank)
  write_whole(path, b''.join(map(_line, lines)))
  return record


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.with_name(f'.{path.name}.lock').open('wb') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UsageError(
        f'{path} is in use by another study: wait for it, or give --results '
        'another folder.'
      ) from error
    yield


def _rank(record: dict[str, Any]) -> tuple[Any, ...]:
  others = json.dumps(record['config'], sort_keys=True)
  return *(record[name] for name in _SORTED_BY), others
