"""Where files are: on a disk, or in an object store (gs://, s3://).

Paths of stores have the methods of ``pathlib``; fsspec reads and writes them,
and tries again where a store fails for a moment. What a store lacks, folders
and files that appear whole, is here.
"""

from collections.abc import Iterator
import contextlib
import importlib.util
import os
from pathlib import Path
import re
import shutil
import tempfile

from etils import epath
import fsspec

from examples.gpt2.command import UsageError, os_errors

_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}
"""What reads and writes the stores that have these schemes."""

# TensorFlow, where it is installed, would take part with errors of its own.
os.environ['EPATH_USE_TF'] = 'false'

# What other hosts have written would not be seen.
for _scheme in ('gs', 'gcs', 's3'):
  fsspec.config.conf.setdefault(_scheme, {})['use_listings_cache'] = False

if importlib.util.find_spec('gcsfs'):
  import aiohttp

  # By default, gcsfs waits for ever for a store that hangs.
  fsspec.config.conf['gs']['requests_timeout'] = aiohttp.ClientTimeout(
    sock_connect=30, sock_read=60
  )


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
  url = re.fullmatch(r'([A-Za-z][\w+.-]*):/+(.*)', text)
  if not url:
    return Path(text).expanduser()
  scheme, rest = url.groups()
  if scheme not in _PACKAGES or not rest:
    raise UsageError(
      f'{text} cannot be read or written: expected a path on a disk, '
      'gs://BUCKET/PATH or s3://BUCKET/PATH.'
    )
  if not importlib.util.find_spec(_PACKAGES[scheme]):
    raise UsageError(
      f"{text} needs {_PACKAGES[scheme]}: pip install 'merit_optax[cloud]'."
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

  Raises ``OSError``, which names the file, where it cannot be read.
  """
  with _errors_of(path):
    found: bytes = file_system(path).cat_file(
      os.fspath(path), start=start or None, end=stop
    )
  return found


def size(path: Path) -> int:
  """Returns the size of a file in bytes; its errors are those of ``read``."""
  with _errors_of(path):
    return int(file_system(path).size(os.fspath(path)))


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
  """Raises errors of a disk or store as ``OSError`` that names the file."""
  try:
    with os_errors():
      yield
  except (FileNotFoundError, NotADirectoryError) as error:
    raise FileNotFoundError(f'{path} is not there.') from error
  except OSError as error:
    raise OSError(f'{path}: {type(error).__name__}: {error}') from error


def make_folder(path: Path) -> None:
  """Makes a folder on a disk; a store has none, and buckets are not made."""
  if not is_remote(path):
    path.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, content: bytes) -> None:
  """Writes a file, whole or not at all, in place of one that is there."""
  with whole_file(path) as scratch:
    scratch.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
  """Gives a scratch file on a disk, which becomes the file if all goes well."""
  if is_remote(path):
    with tempfile.TemporaryDirectory() as folder:
      scratch = Path(folder, path.name)
      yield scratch
      _upload(scratch, path)
    return
  scratch = path.with_name(f'.{path.name}.partial')
  try:
    yield scratch
    # Whole even if the machine stops.
    with scratch.open('rb') as file:
      os.fsync(file.fileno())
    scratch.replace(path)
  finally:
    scratch.unlink(missing_ok=True)


def _upload(file: Path, path: Path) -> None:
  with _errors_of(path):
    file_system(path).put_file(str(file), os.fspath(path))


@contextlib.contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
  """Gives a scratch folder on a disk, which becomes the one if all goes well.

  In a store, its files come one by one, the largest first: those that say what
  the others are come last. What it replaces are files of the same names.

  Raises ``OSError`` where the folder holds something that is not to be
  replaced: before the work or, on a disk where another process was quicker,
  after it.
  """
  path = resolved(path)
  with os_errors():
    is_taken = path.exists() and (is_remote(path) or any(path.iterdir()))
  if is_taken and not replace:
    raise FileExistsError(
      f'{path} is there and not empty: choose another folder, or delete it.'
    )
  make_folder(path.parent)
  parent = None if is_remote(path) else path.parent
  prefix = f'partial-{path.name}-'
  with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name:
    scratch = Path(name)
    yield scratch
    if is_remote(path):
      files = [file for file in scratch.rglob('*') if file.is_file()]
      for file in sorted(files, key=lambda file: -file.stat().st_size):
        _upload(file, path / file.relative_to(scratch).as_posix())
      return
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
    with _errors_of(path):
      file_system(path).get_file(os.fspath(path), str(copy))
    yield copy
