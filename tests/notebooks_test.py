"""The notebooks run, and have the outputs of a whole run of their code."""

from pathlib import Path
import re
import subprocess
import sys
import tomllib

import nbformat
import pytest

from notebooks.run import FOLDER, METADATA, code_cells, digest, execute

_ROOT = Path(__file__).parents[1]
_NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
_REPOSITORY = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project'][
  'urls'
]['Repository']
# What a notebook prints if its claims hold.
_CLAIMS = {
  'shapes_and_meshes': ['the same bits: True', 'MERIT: 0 numbers differ']
}

_each_notebook = pytest.mark.parametrize(
  'path', _NOTEBOOKS, ids=lambda path: path.stem
)


def _read(path):
  return nbformat.read(path, as_version=4)


def _sources(notebook):
  return '\n'.join(cell.source for cell in notebook.cells)


def _printed(notebook, name='stdout'):
  """Returns what the cells wrote to a stream, stdout or stderr."""
  return ''.join(
    output.text
    for cell in code_cells(notebook)
    for output in cell.outputs
    if output.output_type == 'stream' and output.name == name
  )


def _kinds(notebook):
  """Returns by cell what kinds of output there are: streams, images."""
  return {
    cell.id: [
      [output.name] if output.output_type == 'stream' else sorted(output.data)
      for output in cell.outputs
    ]
    for cell in code_cells(notebook)
  }


@pytest.mark.slow
@_each_notebook
def test_notebook_runs(path, monkeypatch):
  monkeypatch.setenv('MERIT_NOTEBOOK_FAST', '1')
  kept, notebook = _read(path), _read(path)
  execute(notebook)
  assert _kinds(notebook) == _kinds(kept)
  for text in _CLAIMS.get(path.stem, []):
    assert text in _printed(kept)
    assert text in _printed(notebook)


@_each_notebook
def test_outputs_are_those_of_one_run_of_this_code(path):
  notebook = _read(path)
  hint = f'run: make notebooks ARGS={path.stem}'
  assert path.read_text() == nbformat.writes(notebook) + '\n', hint
  assert notebook.metadata == METADATA | {'code_sha256': digest(notebook)}, hint
  assert all(cell.metadata == {} for cell in notebook.cells)
  cells = code_cells(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, 1 + len(cells))), hint
  # The package was there, so nothing was installed.
  assert cells[0].outputs == []
  assert _printed(notebook, 'stderr') == ''
  if 'pyplot' in _sources(notebook):
    assert 'image/png' in str(_kinds(notebook))


@_each_notebook
def test_bold_numbers_of_the_text_are_in_the_outputs(path):
  notebook = _read(path)
  text = '\n'.join(
    cell.source for cell in notebook.cells if cell.cell_type == 'markdown'
  )
  numbers = re.findall(r'\*\*([\d.,]+)\*\*', text)
  assert numbers or path.stem == 'shapes_and_meshes'
  printed = set(re.findall(r'[\d.,]*\d', _printed(notebook)))
  assert [x for x in numbers if x not in printed] == []


@_each_notebook
def test_first_cell_installs_the_package_from_its_repository(path):
  # Before anything imports an older jax than the package needs.
  first = code_cells(_read(path))[0]
  assert len(first.source.splitlines()) <= 5
  assert f'"merit_optax[examples] @ git+{_REPOSITORY}"' in first.source


@pytest.fixture(scope='module')
def fresh_python(tmp_path_factory):
  """The Python of an environment in which the kernel has nothing else."""
  folder = tmp_path_factory.mktemp('fresh')
  created = subprocess.run(
    [sys.executable, '-m', 'venv', folder], check=False, capture_output=True
  )
  python = str(folder / 'bin/python')
  kernel = [python, '-m', 'pip', 'install', '--quiet', 'ipykernel']
  if created.returncode or subprocess.run(kernel, check=False).returncode:
    pytest.skip('makes an environment with pip, which needs a network')
  return python


@pytest.mark.slow
def test_notebooks_run_with_what_the_first_cell_installs(
  fresh_python, monkeypatch
):
  monkeypatch.setenv('MERIT_NOTEBOOK_FAST', '1')
  monkeypatch.setenv('PIP_CONSTRAINT', str(_ROOT / 'constraints.txt'))
  monkeypatch.delenv('PYTHONPATH', raising=False)
  for path in _NOTEBOOKS:
    notebook = _read(path)
    install = code_cells(notebook)[0]
    install.source = install.source.replace(
      f'git+{_REPOSITORY}', _ROOT.as_uri()
    )
    execute(notebook, fresh_python)


@_each_notebook
def test_links_into_the_repository_lead_somewhere(path):
  name = _REPOSITORY.removeprefix('https://github.com/')
  text = _sources(_read(path))
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
  text = _sources(notebook) + _printed(notebook)
  assert re.findall(absolute, text) == []
