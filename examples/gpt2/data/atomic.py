"""Files and folders that are whole or not there, even if the machine stops."""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import shutil
import tempfile


def write_whole(path: Path, content: bytes) -> None:
  """Writes a file, in place of one that is there."""
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


@contextlib.contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
  """Gives a scratch folder, which takes its place if all goes well.

  Raises ``OSError`` where the folder holds something that is not to be
  replaced: before the work or, if another process was quicker, after it.
  """
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
