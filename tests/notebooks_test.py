"""The notebooks run, and have the outputs of a whole run of their code."""

from pathlib import Path
import re
import sys
import tomllib

import nbformat
import pytest

from notebooks.run import FOLDER, METADATA, code_cells, digest, execute

_ROOT = Path(__file__).parents[1]
_NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
# What a notebook prints if its claims hold.
_CLAIMS = {
  'shapes_and_meshes': ['the same bits: True', 'MERIT: 0 numbers differ'],
}

_each_notebook = pytest.mark.parametrize(
  'path', _NOTEBOOKS, ids=lambda path: path.stem
)


def _read(path):
  return nbformat.read(path, as_version=4)


def _sources(notebook):
  return '\n'.join(cell.source for cell in notebook.cells)


def _repository():
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  return project['urls']['Repository'].removesuffix('/')


def _printed(notebook, name):
  """Returns what the cells wrote to a stream, stdout or stderr."""
  return ''.join(
    output.text
    for cell in code_cells(notebook)
    for output in cell.outputs
    if output.output_type == 'stream' and output.name == name
  )


def _kinds(notebook):
  """Returns by cell what kinds of output there are: streams, tables, images."""
  return {
    cell.id: [
      [output.name] if output.output_type == 'stream' else sorted(output.data)
      for output in cell.outputs
    ]
    for cell in code_cells(notebook)
  }


def test_kernels_run_this_python():
  cell = nbformat.v4.new_code_cell('import sys\nprint(sys.executable)')
  notebook = nbformat.v4.new_notebook(cells=[cell])
  execute(notebook)
  assert _printed(notebook, 'stdout').strip() == sys.executable


@pytest.mark.slow
@_each_notebook
def test_notebook_runs(path, monkeypatch):
  monkeypatch.setenv('MERIT_NOTEBOOK_FAST', '1')
  kept, notebook = _read(path), _read(path)
  execute(notebook)
  assert _kinds(notebook) == _kinds(kept)
  for text in _CLAIMS.get(path.stem, []):
    assert text in _printed(kept, 'stdout')
    assert text in _printed(notebook, 'stdout')


@_each_notebook
def test_outputs_are_those_of_one_run_of_this_code(path):
  notebook = _read(path)
  hint = f'run: make notebooks ARGS={path.stem}'
  assert notebook.metadata == METADATA | {'code_sha256': digest(notebook)}, hint
  assert all(cell.metadata == {} for cell in notebook.cells)
  cells = code_cells(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, 1 + len(cells))), hint
  # All packages were there, so nothing was installed.
  assert cells[0].outputs == []
  assert _printed(notebook, 'stderr') == ''
  if 'pyplot' in _sources(notebook):
    assert any(
      'image/png' in x for kinds in _kinds(notebook).values() for x in kinds
    )


@_each_notebook
def test_notebook_has_the_form_that_nbformat_writes(path):
  notebook = _read(path)
  nbformat.validate(notebook)
  assert path.read_text() == nbformat.writes(notebook) + '\n'


@_each_notebook
def test_notebook_starts_with_a_title_and_installs_first(path):
  notebook = _read(path)
  assert notebook.cells[0].source.startswith('# ')
  assert '%pip install' in code_cells(notebook)[0].source


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
  notebook = _read(path)
  text = _sources(notebook) + _printed(notebook, 'stdout')
  assert re.findall(absolute, text) == []
