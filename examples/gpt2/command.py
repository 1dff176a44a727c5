"""What the commands have in common: errors, tables, and how they end."""

from collections.abc import Iterator, Sequence
import contextlib
import math
import os
import sys
from typing import Any

# Of object stores, whose errors are no ``OSError``.
_LIBRARIES = {'aiobotocore', 'aiohttp', 'botocore', 'gcsfs', 'google'}


class UsageError(ValueError):
  """A mistake in the settings or the data that the user can correct."""


class CommandError(Exception):
  """Ends a command with its message."""

  status = 1  # Exit status.


def flag(name: str) -> str:
  """Returns the command-line flag of a setting."""
  return '--' + name.replace('_', '-')


def check_at_least(least: int, **settings: int | None) -> None:
  """Raises ``UsageError`` for a setting that is given and below a number."""
  for name, value in settings.items():
    if value is not None and value < least:
      raise UsageError(f'{flag(name)} must be at least {least}, got {value}.')


def refuse_repeated(args: Sequence[str] | None, *names: str) -> None:
  """Raises ``UsageError`` for a flag of several values that is given twice.

  Of those, the parser would drop the first.
  """
  given = sys.argv[1:] if args is None else args
  flags = [x.partition('=')[0].replace('_', '-') for x in given]
  for name in map(flag, names):
    if flags.count(name) > 1:
      raise UsageError(
        f'{name} is given {flags.count(name)} times: give all values after '
        f'one, as in {name} FIRST SECOND.'
      )


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
  """Returns which JSON values differ, '' if none does."""
  names = sorted(k for k in old | new if old.get(k) != new.get(k))
  return ', '.join(f'{k}: {old.get(k)} -> {new.get(k)}' for k in names)


def table(rows: dict[str, str]) -> str:
  """Returns names and values in two columns."""
  width = max(map(len, rows))
  return '\n'.join(f'{name:{width}}  {value}' for name, value in rows.items())


def columns(rows: list[dict[str, str]]) -> str:
  """Returns a table with a head, from rows that have the first one's keys."""
  cells = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
    '  '.join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip()
    for line in cells
  )


def format_bytes(size: float) -> str:
  """Returns a number of bytes as text with three digits, such as '1.5 GiB'."""
  unit = min(int(math.log(max(size, 1), 1024)), 4)
  number = size / 1024**unit
  digits = f'{number:.0f}' if number >= 100 else f'{number:.3g}'
  return f'{digits} {("B", "KiB", "MiB", "GiB", "TiB")[unit]}'


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
  """Raises as ``OSError`` what the libraries of stores raise.

  Those have errors of their own for credentials and for a store that is away.
  """
  try:
    yield
  except Exception as error:
    library = type(error).__module__.partition('.')[0]
    if library not in _LIBRARIES or isinstance(error, OSError):
      raise
    raise OSError(f'{type(error).__name__}: {error}') from error


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
  """Has a ``UsageError`` begin with what it is about."""
  try:
    yield
  except UsageError as error:
    raise UsageError(f'{what}: {error}') from error


class _Lasting:
  """A stream that any text can be written to, also when nobody reads it.

  A reader such as ``| head`` closes it, which must not end a run; what the
  encoding lacks is escaped.
  """

  def __init__(self, stream: Any):
    self._stream = stream
    if hasattr(stream, 'reconfigure'):
      stream.reconfigure(errors='backslashreplace')

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    with self._discarding():
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with self._discarding():
      self._stream.flush()

  @contextlib.contextmanager
  def _discarding(self) -> Iterator[None]:
    try:
      yield
    except BrokenPipeError:
      # What is buffered would be written again.
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """Ends the process with a message where the user can correct what is wrong.

  The status is 2 for a mistake in the settings or a file that cannot be read or
  written, that of a :class:`CommandError`, and 130 after control-C.
  """
  with (
    contextlib.redirect_stdout(_Lasting(sys.stdout)),
    contextlib.redirect_stderr(_Lasting(sys.stderr)),
    _exit_on_error(),
  ):
    try:
      yield
    finally:
      sys.stdout.flush()


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
  try:
    with os_errors():
      yield
    return
  except (UsageError, OSError) as error:
    cause: BaseException = error
    status, message = 2, f'error: {error}'
  except CommandError as error:
    status, message, cause = error.status, f'stopped: {error}', error
  except KeyboardInterrupt as error:
    status, message, cause = 130, 'interrupted', error
  print(message, file=sys.stderr)
  raise SystemExit(status) from cause
