"""Where files are: on a disk, or in an object store (gs://, s3://).

Paths of stores have the methods of ``pathlib``. What goes beyond them, because
a store keeps whole objects and has neither folders nor locks, is here.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import os
from pathlib import Path
import re
import shutil
import tempfile
import time
from typing import TypeVar

from etils import epath
import fsspec

from examples.gpt2.command import UsageError, os_errors

_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}
"""What reads and writes the stores that have these schemes."""

# S3 refuses what is not there to those who may not list a bucket.
_RIGHTS = {
  'gs': 'roles/storage.objectViewer',
  's3': 's3:GetObject and s3:ListBucket',
}
_WAITS = (1, 2, 4, 8, 16, 32)
"""Seconds before each further try to read, when a store has failed."""
_TIMEOUT = 60
"""Seconds after which a store is taken to hang."""

_T = TypeVar('_T')

# TensorFlow, where it is installed, would take part with errors of its own.
os.environ['EPATH_USE_TF'] = 'false'

# What other hosts have written would not be seen.
for _scheme in ('gs', 'gcs', 's3'):
  fsspec.config.conf.setdefault(_scheme, {})['use_listings_cache'] = False


def as_path(path: str | os.PathLike[str]) -> Path:
  """Returns the path of a file or folder, on a disk or in an object store.

  Args:
    path: Path on a disk, where ``~`` is the home, or URL such as
      ``'gs://bucket/run'``; also what ``pathlib.Path`` makes of a URL, which is
      ``gs:/bucket/run``.

  Returns:
    A ``pathlib.Path`` on a disk, else an ``etils.epath.Path``, whose methods
    are the same.

  Raises:
    UsageError: If it is empty, the scheme is unknown, its package is not
      installed, or there is no bucket.
  """
  text = os.fspath(path)
  if not text:
    raise UsageError('A path must not be empty.')
  url = re.fullmatch(r'([A-Za-z][\w+.-]*):/(.*)', text)
  if not url:
    return Path(text).expanduser()
  scheme, rest = url[1], url[2].lstrip('/')
  if scheme not in _PACKAGES:
    accepted = ' or '.join(f'{known}://' for known in _PACKAGES)
    raise UsageError(
      f'{text} begins with {scheme}:/, which is not supported: expected a path '
      f'on a disk, or {accepted}.'
    )
  if not importlib.util.find_spec(_PACKAGES[scheme]):
    raise UsageError(
      f'{scheme}://{rest} needs {_PACKAGES[scheme]}: pip install '
      "'merit_optax[cloud]'."
    )
  if not rest:
    raise UsageError(
      f'{text} names no bucket: expected {scheme}://bucket/path.'
    )
  return epath.Path(f'{scheme}://{rest}')


def resolved(path: str | os.PathLike[str]) -> Path:
  """Returns the path of ``as_path``, the same for each way to name a place."""
  found = as_path(path)
  return found if is_remote(found) else found.resolve()


def is_remote(path: Path) -> bool:
  """Returns whether a path is in an object store."""
  return '://' in os.fspath(path)


def file_system(path: Path) -> fsspec.AbstractFileSystem:
  """Returns fsspec's interface to what holds a path."""
  scheme, is_url, _ = os.fspath(path).partition('://')
  return fsspec.filesystem(scheme if is_url else 'file')


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
  """Reads a file, or its bytes from ``start`` to before ``stop``.

  A store that hangs, is overloaded, drops the connection or breaks its reply
  off is asked again, for a minute.

  Raises ``OSError``, which names the file, where it cannot be read.
  """
  if is_remote(path):
    return _patiently(path, lambda: _read(path, start, stop))
  with path.open('rb') as file:
    file.seek(start)
    return file.read(-1 if stop is None else stop - start)


def _read(path: Path, start: int, stop: int | None) -> bytes:
  found: bytes = file_system(path).cat_file(
    os.fspath(path), start=start or None, end=stop, timeout=_TIMEOUT
  )
  if stop is not None and len(found) != stop - start:
    raise OSError(f'{len(found)} of {stop - start} bytes came')
  return found


def size(path: Path) -> int:
  """Returns the size of a file in bytes; its errors are those of ``read``."""
  if not is_remote(path):
    return path.stat().st_size
  info = file_system(path).info
  return _patiently(path, lambda: int(info(os.fspath(path))['size']))


def _patiently(path: Path, call: Callable[[], _T]) -> _T:
  """Calls what asks a store, again where it has failed for a moment."""
  for wait in (*_WAITS, None):
    try:
      with os_errors():
        return call()
    except FileNotFoundError as error:
      raise FileNotFoundError(f'{path} is not there.') from error
    except OSError as error:
      if _is_denied(error):
        right = _RIGHTS[os.fspath(path).partition(':')[0]]
        reason = ' '.join(str(error).split())
        raise PermissionError(
          f'{path} cannot be read ({reason}): the account of this machine '
          f'needs the right to, {right}.'
        ) from error
      if wait is None:
        raise OSError(f'{path} cannot be read: {error}') from error
      time.sleep(wait)
  raise AssertionError('the last wait is None')


def _is_denied(error: OSError) -> bool:
  """Returns whether a store has refused, which does not pass."""
  text = f'{type(error).__name__} {error}'
  return bool(re.search('Permission|Forbidden|Credentials|Anonymous', text))


def make_folder(path: Path) -> None:
  """Makes a folder on a disk; a store has none, and buckets are not made."""
  if not is_remote(path):
    path.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, content: bytes) -> None:
  """Writes a file, whole or not at all, in place of one that is there."""
  if is_remote(path):
    with os_errors():
      file_system(path).pipe_file(os.fspath(path), content)
    return
  with whole_file(path) as scratch:
    scratch.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
  """Gives a scratch file on a disk, which becomes the file if all goes well."""
  if is_remote(path):
    with tempfile.TemporaryDirectory() as folder:
      scratch = Path(folder, path.name)
      yield scratch
      with os_errors():
        file_system(path).put_file(str(scratch), os.fspath(path))
    return
  scratch = path.with_name(f'.{path.name}.partial')
  try:
    yield scratch
    # Whole even if the machine stops.
    with scratch.open('rb') as file:
      os.fsync(file.fileno())
    os.replace(scratch, path)
  except BaseException:
    with contextlib.suppress(OSError):
      scratch.unlink(missing_ok=True)  # The disk may be full.
    raise


@contextlib.contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
  """Gives a scratch folder on a disk, which becomes the one if all goes well.

  In a store, its files come one by one, the largest first: those that say what
  the others are come last. What it replaces are files of the same names.

  Raises ``OSError`` where the folder holds something that is not to be
  replaced: before the work or, on a disk where another process was quicker,
  after it.
  """
  if is_remote(path):
    with os_errors():
      if not replace and path.exists():
        raise FileExistsError(
          f'{path} is there: choose another folder, or delete it.'
        )
    with tempfile.TemporaryDirectory() as name:
      yield Path(name)
      files = [file for file in Path(name).rglob('*') if file.is_file()]
      with os_errors():
        for file in sorted(files, key=lambda file: -file.stat().st_size):
          target = path / file.relative_to(name).as_posix()
          file_system(path).put_file(str(file), os.fspath(target))
    return
  path = path.resolve()
  if not replace and path.exists() and any(path.iterdir()):
    raise FileExistsError(
      f'{path} is there and not empty: choose another folder, or delete it.'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  prefix = f'partial-{path.name}-'
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as name:
    scratch = Path(name)
    yield scratch
    scratch.chmod(0o755)  # tempfile lets nobody else read it.
    if replace and path.exists():
      shutil.rmtree(path)
    scratch.rename(path)


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[Path]:
  """Gives a file on a disk: the file itself, or a copy of one in a store."""
  if not is_remote(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder, path.name)
    with os_errors():
      file_system(path).get_file(os.fspath(path), str(copy))
    yield copy
