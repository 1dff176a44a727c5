"""What the commands have in common: tables, and how they end."""

from collections.abc import Iterator
import contextlib
import math
import sys

from examples.gpt2.config import UsageError
from examples.gpt2.storage import os_errors


class CommandError(Exception):
  """Ends a command with its message."""

  status = 1  # Exit status.


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
def exit_on_error() -> Iterator[None]:
  """Ends the process with a message where the user can correct what is wrong.

  The status is 2 for a mistake in the settings or a file that cannot be read or
  written, that of a :class:`CommandError`, and 130 after control-C.
  """
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
