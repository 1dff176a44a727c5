"""The notebooks run, and are committed without outputs, in one form."""

import importlib
import os
from pathlib import Path
import re
import sys
import tomllib

from ipykernel.kernelspec import write_kernel_spec
import nbclient
import nbformat
import pytest

_ROOT = Path(__file__).parents[1]
_NOTEBOOKS = sorted(_ROOT.glob('notebooks/*.ipynb'))
_SECONDS_A_CELL = 300
_METADATA = {
  'kernelspec': {
    'display_name': 'Python 3',
    'language': 'python',
    'name': 'python3',
  },
  'language_info': {'name': 'python'},
}
# What a notebook prints if its claims hold.
_CLAIMS = {
  'shapes_and_meshes': ['the same bits: True', 'MERIT: 0 numbers differ'],
}

_each_notebook = pytest.mark.parametrize(
  'path', _NOTEBOOKS, ids=lambda path: path.stem
)


def _read(path):
  return nbformat.read(path, as_version=4)


def _code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def _sources(notebook):
  return '\n'.join(cell.source for cell in notebook.cells)


def _repository():
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  return project['urls']['Repository'].removesuffix('/')


@pytest.fixture
def run(tmp_path, monkeypatch):
  """A function that runs a notebook in this Python, in the notebooks' folder.

  Kernels, settings and history of the user play no part in it.
  """
  write_kernel_spec(tmp_path / 'kernels' / 'python3')
  monkeypatch.setenv('JUPYTER_PATH', str(tmp_path))
  monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(tmp_path / 'runtime'))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  monkeypatch.setenv('MERIT_NOTEBOOK_FAST', '1')
  monkeypatch.delenv('MPLBACKEND', raising=False)

  def run_notebook(notebook):
    return nbclient.NotebookClient(
      notebook,
      timeout=_SECONDS_A_CELL,
      kernel_name='python3',
      resources={'metadata': {'path': str(_ROOT / 'notebooks')}},
    ).execute()

  return run_notebook


def _printed(notebook, name):
  """Returns what the cells wrote to a stream, stdout or stderr."""
  return ''.join(
    output.text
    for cell in _code_cells(notebook)
    for output in cell.outputs
    if output.output_type == 'stream' and output.name == name
  )


def _pictures(notebook):
  return [
    output.data['image/png']
    for cell in _code_cells(notebook)
    for output in cell.outputs
    if 'image/png' in output.get('data', {})
  ]


def test_kernels_run_this_python(run):
  cell = nbformat.v4.new_code_cell('import sys\nprint(sys.executable)')
  notebook = run(nbformat.v4.new_notebook(cells=[cell]))
  assert _printed(notebook, 'stdout').strip() == sys.executable


def _executed(path, run):
  """Returns a notebook that has run: here, or for MERIT_BUILT_DOCS."""
  notebook = _read(path)
  built = os.environ.get('MERIT_BUILT_DOCS')
  if built is None:
    return run(notebook)
  # Of the extra docs, which other tests do without.
  jupyter_cache = importlib.import_module('jupyter_cache')
  cache = jupyter_cache.get_cache(Path(built) / 'notebooks-fast')
  return cache.get_cache_bundle(cache.match_cache_notebook(notebook).pk).nb


@pytest.mark.slow
@_each_notebook
def test_notebook_runs(path, run):
  notebook = _executed(path, run)
  # All packages are there, so that nothing was installed.
  assert _code_cells(notebook)[0].outputs == []
  assert 'Traceback' not in _printed(notebook, 'stderr')
  if 'pyplot' in _sources(notebook):
    assert _pictures(notebook)
  for text in _CLAIMS.get(path.stem, []):
    assert text in _printed(notebook, 'stdout')


@_each_notebook
def test_notebook_is_stripped(path):
  notebook = _read(path)
  assert notebook.metadata == _METADATA
  for cell in notebook.cells:
    assert cell.metadata == {}, cell.id
  for cell in _code_cells(notebook):
    assert cell.outputs == [], cell.id
    assert cell.execution_count is None, cell.id


@_each_notebook
def test_notebook_has_the_form_that_nbformat_writes(path):
  notebook = _read(path)
  nbformat.validate(notebook)
  assert path.read_text() == nbformat.writes(notebook) + '\n'


@_each_notebook
def test_notebook_starts_with_a_title_and_installs_first(path):
  notebook = _read(path)
  assert notebook.cells[0].source.startswith('# ')
  assert '%pip install' in _code_cells(notebook)[0].source


@_each_notebook
def test_links_into_the_repository_lead_somewhere(path):
  repository, text = _repository(), _sources(_read(path))
  name = repository.removeprefix('https://github.com/')
  colab = 'https://colab.research.google.com/github'
  assert f'({colab}/{name}/blob/main/notebooks/{path.name})' in text
  # No other repository is linked to, so that an old address of ours is seen.
  linked = re.findall(
    r'github(?:usercontent)?(?:\.com)?/([\w.-]+/[\w.-]+)', text
  )
  assert set(linked) == {name}
  files = re.findall(rf'{name}/(?:blob|tree|raw)/main/([^\s)#"\']+)', text)
  assert [file for file in files if not (_ROOT / file).exists()] == []


@_each_notebook
def test_notebook_names_no_folder_of_a_machine(path):
  # A slash, a name, a slash, and nothing of an address or a relative path.
  absolute = r'(?<![\w:/.~<)}])/[A-Za-z]\w*/'
  assert re.findall(absolute, _sources(_read(path))) == []
