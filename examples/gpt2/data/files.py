"""The files that --data names: found, and told apart by their names."""

from collections.abc import Sequence
import os
from pathlib import Path, PurePath
import sysconfig

from examples.gpt2.config import UsageError
from examples.gpt2.storage import as_path, file_system, is_remote

KINDS = {
  '.jsonl': 'json', '.ndjson': 'json', '.jsonlines': 'json', '.json': 'json',
  '.parquet': 'parquet',
}  # fmt: skip
"""Builders of Hugging Face Datasets by suffix; all other files are text."""

COMPRESSED = ('.gz', '.zst', '.bz2', '.xz')

_HEAD = 1 << 16  # Bytes that tell whether a file is binary.
_NOT_STDLIB = {
  'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test',
}  # fmt: skip
# A folder with the first and one of the others is that of a run.
_RUN = 'config.json', ('checkpoints', 'metrics.jsonl', 'model.json')
# Beside the Parquet files of a data set.
_BESIDE = {'readme.md', 'license', 'dataset_info.json', 'dataset_infos.json'}


def kind(path: PurePath) -> str:
  """Returns ``'json'``, ``'parquet'`` or ``'text'``, by the name of a file."""
  name = path.name.lower()
  for suffix in COMPRESSED:
    name = name.removesuffix(suffix)
  return KINDS.get(PurePath(name).suffix, 'text')


def find_files(
  data: Sequence[str | Path], leave_out: Sequence[Path] = ()
) -> list[Path]:
  """Returns files, and those of folders with subfolders, each once, in order.

  Of folders it leaves out hidden files, binary ones, folders of runs, those of
  ``leave_out`` (absolute), and what a cache of Hugging Face keeps beside
  ``snapshots``.
  ``'stdlib'`` is the source of Python's standard library.

  Raises:
    UsageError: If a path does not exist, or there are no files.
  """
  found: dict[Path, Path] = {}
  for name in data:
    for path in _find(str(name), leave_out):
      found.setdefault(path if is_remote(path) else path.resolve(), path)
  if not found:
    raise UsageError(f'{" ".join(map(str, data))} has no files.')
  return list(found.values())


def _find(name: str, leave_out: Sequence[Path]) -> list[Path]:
  is_stdlib = name == 'stdlib'
  root = Path(sysconfig.get_path('stdlib')) if is_stdlib else as_path(name)
  if root.is_file():
    if _is_binary(root):
      raise UsageError(f'{root} holds no text: it has zero bytes.')
    return [root]
  if not root.is_dir():
    raise UsageError(
      f'{name} does not exist: expected a file or a folder of files.'
    )
  paths = []
  for path in sorted(_walk(root)):
    parents = [x for x in path.parents if x.is_relative_to(root)]
    parts = path.relative_to(root).parts
    if is_stdlib:
      is_wanted = path.suffix == '.py' and not _NOT_STDLIB & {*parts}
    else:
      is_wanted = not any(x.startswith('.') for x in parts)
    whole = path if is_remote(path) else path.absolute()
    is_left_out = any(whole.is_relative_to(x) for x in leave_out)
    if is_wanted and not is_left_out and not any(map(_is_no_data, parents)):
      paths.append(path)
  paths = [path for path in paths if not _is_binary(path)]
  if any(kind(path) == 'parquet' for path in paths):
    paths = [path for path in paths if path.name.lower() not in _BESIDE]
  return paths


def _is_binary(path: Path) -> bool:
  """Whether a file, of no kind that is known, holds no text."""
  if kind(path) != 'text' or path.suffix.lower() in COMPRESSED:
    return False
  with path.open('rb') as file:
    return b'\0' in file.read(_HEAD)


def _walk(folder: Path) -> list[Path]:
  if not is_remote(folder):
    return [path for path in folder.rglob('*') if path.is_file()]
  # One request for a thousand files, where a glob would ask for each folder.
  root = os.fspath(folder).partition('://')[2].rstrip('/') + '/'
  names = file_system(folder).find(root)
  return [folder / name.removeprefix(root) for name in names if name != root]


def _is_no_data(folder: Path) -> bool:
  """Whether it is the folder of a run, or blobs of a cache's snapshots."""
  if folder.name in ('blobs', 'refs'):
    return (folder.parent / 'snapshots').is_dir()
  if is_remote(folder):  # Each question would be a request.
    return False
  config, others = _RUN
  has_config = (folder / config).is_file()
  return has_config and any((folder / name).exists() for name in others)
