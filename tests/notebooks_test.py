"""The notebooks run, and have the outputs of a whole run of their code."""

from collections.abc import Callable
import importlib.metadata
from pathlib import Path
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

from IPython.core.inputtransformer2 import TransformerManager
import jax
import nbclient
import nbformat
import pytest

import merit_optax
from notebooks.run import FOLDER, METADATA, code_cells, digest, execute

_ROOT = Path(__file__).parents[1]
_NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
# What a notebook prints if its claims hold.
_CLAIMS = {
  'shapes_and_meshes': ['the same bits: True', 'MERIT: 0 numbers differ']
}

# From pip-freeze.txt of github.com/googlecolab/backend-info, 2026-08-19, when
# Colab moved from Python 3.12 to 3.13.
_COLAB = (
  'flax==0.11.2', 'ipykernel==6.17.1', 'ipython==7.34.0', 'jax==0.7.2',
  'jaxlib==0.7.2', 'matplotlib==3.10.0', 'numpy==2.1.3', 'optax==0.2.8',
  'orbax-checkpoint==0.12.4', 'safetensors==0.8.0', 'scipy==1.16.3',
  'tensorstore==0.1.85', 'tokenizers==0.22.2', 'tqdm==4.67.3',
)  # fmt: skip

_each_notebook = pytest.mark.parametrize(
  'path', _NOTEBOOKS, ids=lambda path: path.stem
)


def _read(path):
  return nbformat.read(path, as_version=4)


def _sources(notebook):
  return '\n'.join(cell.source for cell in notebook.cells)


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
  assert path.read_text() == nbformat.writes(notebook) + '\n', hint
  assert notebook.metadata == METADATA | {'code_sha256': digest(notebook)}, hint
  assert all(cell.metadata == {} for cell in notebook.cells)
  cells = code_cells(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, 1 + len(cells))), hint
  # All packages were there, so nothing was installed.
  assert cells[0].outputs == []
  assert _printed(notebook, 'stderr') == ''
  if 'pyplot' in _sources(notebook):
    assert 'image/png' in str(_kinds(notebook))


def _run_install_cell(pip: Callable[[], None]) -> list[str]:
  """Runs the first cell with another pip; returns what that was to do."""
  # All notebooks share it.
  (cell,) = {code_cells(_read(path))[0].source for path in _NOTEBOOKS}
  lines = []

  def run_line_magic(name, line, **_):
    lines.append(f'{name} {line}')
    pip()

  shell = SimpleNamespace(run_line_magic=run_line_magic)
  exec(
    TransformerManager().transform_cell(cell), {'get_ipython': lambda: shell}
  )
  return lines


@pytest.fixture
def versions(monkeypatch):
  """Versions that packages seem to have; None for those that are missing."""
  seeming, real = {}, importlib.metadata.distribution

  def distribution(name):
    if name not in seeming:
      return real(name)
    if seeming[name] is None:
      raise importlib.metadata.PackageNotFoundError(name)
    return SimpleNamespace(version=seeming[name], requires=real(name).requires)

  monkeypatch.setattr(importlib.metadata, 'distribution', distribution)
  return seeming


def _do_nothing():
  """As pip without a network: it fails, but IPython goes on."""


def test_nothing_is_installed_where_all_is_there():
  assert _run_install_cell(_do_nothing) == []


@pytest.mark.parametrize(
  ('name', 'version', 'problem'),
  [
    ('merit_optax', None, 'merit_optax is not installed'),
    ('tyro', None, 'tyro is not installed'),
    ('flax', '0.11.2', 'flax 0.11.2 is not >=0.12.7'),
    ('jax', '0.7.2', 'jax 0.7.2 is not >='),
  ],
)
def test_what_is_missing_or_old_is_installed(versions, name, version, problem):
  versions[name] = version
  (line,) = _run_install_cell(versions.clear)
  assert line.startswith('pip install --quiet "merit_optax[examples]" "jax[')
  versions[name] = version
  with pytest.raises(ImportError, match=f'{problem}.*restart the kernel'):
    _run_install_cell(_do_nothing)


def test_an_older_jax_that_is_imported_asks_for_a_restart(monkeypatch):
  message = f'jax 0.7.2 is imported, {jax.__version__} installed.*restart the k'
  monkeypatch.setattr(jax, '__version__', '0.7.2')
  with pytest.raises(ImportError, match=message):
    _run_install_cell(_do_nothing)


def test_a_flax_for_another_jax_is_named(tmp_path, monkeypatch):
  error = "cannot import name 'mutable_array' from 'jax._src.core'"
  (tmp_path / 'flax.py').write_text(f'raise ImportError({error!r})')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'flax', raising=False)
  with pytest.raises(ImportError, match=f'{error}.*--upgrade .* jax flax'):
    _run_install_cell(_do_nothing)


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def colab(request, tmp_path, monkeypatch):
  """The Python of an environment that starts as Colab's does.

  There merit_optax is to be had, but it is not installed.
  """
  version = request.param
  python = tmp_path / 'colab/bin/python'
  wheel = _run(
    sys.executable, '-m', 'pip', 'wheel', '--no-deps', '-w', tmp_path, _ROOT
  )
  created = _run(f'python{version}', '-m', 'venv', tmp_path / 'colab')
  if created.returncode:
    pytest.skip(f'no Python {version}: {created.stderr}')
  installed = _run(python, '-m', 'pip', 'install', '--no-compile', *_COLAB)
  if wheel.returncode or installed.returncode:
    pytest.skip(f'pip needs a network: {wheel.stderr} {installed.stderr}')
  constraints = tmp_path / 'constraints.txt'
  constraints.write_text(f'merit_optax=={merit_optax.__version__}')
  monkeypatch.setenv('PIP_CONSTRAINT', str(constraints))
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
  return str(python)


def _beginning(path: Path, *sources: str) -> nbformat.NotebookNode:
  """Returns a notebook up to its imports, after other code."""
  notebook = _read(path)
  cells = code_cells(notebook)
  (last,) = (i for i, cell in enumerate(cells) if cell.id == 'imports')
  first = [nbformat.v4.new_code_cell(source) for source in sources]
  notebook.cells = first + cells[: last + 1]
  return notebook


@pytest.mark.slow
@pytest.mark.parametrize('colab', ['3.12', '3.13'], indirect=True)
def test_notebooks_begin_where_colab_begins(colab):
  with pytest.raises(
    nbclient.exceptions.CellExecutionError,
    match='jax 0.7.2 is imported, .* installed.*restart the kernel',
  ):
    execute(_beginning(_NOTEBOOKS[0], 'import jax'), colab)
  for path in _NOTEBOOKS:
    execute(_beginning(path), colab)


@_each_notebook
def test_links_into_the_repository_lead_somewhere(path):
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  repository = project['urls']['Repository'].removesuffix('/')
  name = repository.removeprefix('https://github.com/')
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
  text = _sources(notebook) + _printed(notebook, 'stdout')
  assert re.findall(absolute, text) == []
