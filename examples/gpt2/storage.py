"""Where files are: on a disk, or in an object store (gs://, s3://)."""

from collections.abc import Sequence
import importlib.util
import os
from pathlib import Path
import re

from etils import epath
import fsspec

from examples.gpt2.config import UsageError

_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}
"""What reads and writes the stores that have these schemes."""

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
    UsageError: If the scheme is unknown, its package is not installed, or there
      is no bucket.
  """
  text = os.fspath(path)
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
      f"{text} needs {_PACKAGES[scheme]}: pip install 'merit_optax[cloud]'."
    )
  if not rest:
    raise UsageError(
      f'{text} names no bucket: expected {scheme}://bucket/path.'
    )
  return epath.Path(f'{scheme}://{rest}')


def is_remote(path: Path) -> bool:
  """Returns whether a path of :func:`as_path` is in an object store."""
  return isinstance(path, epath.Path)


def file_system(path: Path) -> fsspec.AbstractFileSystem:
  """Returns fsspec's interface to what holds a path."""
  scheme, is_url, _ = os.fspath(path).partition('://')
  return fsspec.filesystem(scheme if is_url else 'file')


def read_ranges(
  paths: Sequence[Path], offsets: Sequence[int], sizes: Sequence[int]
) -> list[bytes]:
  """Reads parts of files, all at the same time from an object store.

  Args:
    paths: A file for each part, all on disks or all in stores of one scheme.
    offsets: Where each part begins, in bytes.
    sizes: Bytes of each part.

  Returns:
    The parts.

  Raises:
    OSError: If a part cannot be read whole.
  """
  if not paths:
    return []
  ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
  parts = file_system(paths[0]).cat_ranges(
    [os.fspath(path) for path in paths], list(offsets), ends, on_error='raise'
  )
  for path, part, offset, size in zip(
    paths, parts, offsets, sizes, strict=True
  ):
    if len(part) != size:
      raise OSError(
        f'{path} ends within bytes {offset} to {offset + size}: {len(part)} of '
        f'{size} could be read.'
      )
  return parts
