"""Runs notebooks and keeps their outputs: python notebooks/run.py [NAME ...].

Without names it runs all, which takes ten minutes of one core.
"""

import hashlib
import os
from pathlib import Path
import sys
import tempfile
from unittest import mock

from ipykernel.kernelspec import write_kernel_spec
import nbclient
import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
METADATA = {
  'kernelspec': {
    'display_name': 'Python 3',
    'language': 'python',
    'name': 'python3',
  },
  'language_info': {'name': 'python'},
}
_SECONDS_A_CELL = 3000


def execute(notebook: NotebookNode, python: str = sys.executable) -> None:
  """Runs a notebook in a Python, and leaves nothing of the machine in it.

  Kernels, settings and history of the user play no part in it.
  """
  command = [python, '-m', 'ipykernel_launcher', '-f', '{connection_file}']
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_kernel_spec(folder / 'kernels' / 'python3', {'argv': command})
    settings = {
      'JUPYTER_PATH': str(folder),
      'JUPYTER_RUNTIME_DIR': str(folder / 'runtime'),
      'IPYTHONDIR': str(folder / 'ipython'),
    }
    with mock.patch.dict(os.environ, settings):
      os.environ.pop('MPLBACKEND', None)
      nbclient.NotebookClient(
        notebook,
        timeout=_SECONDS_A_CELL,
        kernel_name='python3',
        record_timing=False,
        coalesce_streams=True,
        resources={'metadata': {'path': str(FOLDER)}},
      ).execute()
  notebook.metadata = NotebookNode(METADATA | {'code_sha256': digest(notebook)})
  for cell in notebook.cells:
    cell.metadata = NotebookNode()


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
  """Returns the cells that are run."""
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def digest(notebook: NotebookNode) -> str:
  """Returns a hash of the code, by which outputs of other code are seen."""
  code = '\0'.join(cell.source for cell in code_cells(notebook))
  return hashlib.sha256(code.encode()).hexdigest()


def main(names: list[str]) -> None:
  """Runs some notebooks, or all."""
  known = [path.stem for path in sorted(FOLDER.glob('*.ipynb'))]
  if unknown := set(names) - set(known):
    raise SystemExit(
      f'No notebook named {", ".join(sorted(unknown))}: there are '
      f'{", ".join(known)}.'
    )
  for name in names or known:
    path = FOLDER / f'{name}.ipynb'
    print(path.name, flush=True)
    notebook = nbformat.read(path, as_version=4)
    execute(notebook)
    nbformat.write(notebook, path)


if __name__ == '__main__':
  main(sys.argv[1:])
