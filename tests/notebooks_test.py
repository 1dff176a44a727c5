"""The notebooks run, and have the outputs of a whole run of their code."""

import json
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tomllib

import nbformat
from packaging.requirements import Requirement
import pytest

import merit_optax
from notebooks.run import FOLDER, METADATA, code_cells, digest, execute

_ROOT = Path(__file__).parents[1]
_COLAB = _ROOT / 'tests/data/colab.txt'
_NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))
_PROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
_REPOSITORY = _PROJECT['urls']['Repository']
_INSTALL = f"""from importlib.util import find_spec

if not find_spec('merit_optax'):
  %pip install --quiet git+{_REPOSITORY}"""
# What a notebook prints with any jax if its claims hold.
_CLAIMS = {
  'shapes_and_meshes': ['the same bits: True', 'MERIT: 0 numbers differ']
}
# A short form of a notebook has these lines instead.
_SHORT = {
  'STEPS = 150': 'STEPS = 10',
  'TOKENS = 442_368': 'TOKENS = 32_768',
  'STEPS, MEASUREMENTS, BATCHES = 300, 8, 12':
    'STEPS, MEASUREMENTS, BATCHES = 20, 4, 3',
  'for factor in [0.5, 1, 2]:': 'for factor in [1]:',
}  # fmt: skip
_NUMBER = re.compile(r'\d+(?:,\d{3})*(?:\.\d+)?')
_LOSS = re.compile(r'\d\.\d{3}')

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
  """Returns by cell what kinds of output there are: text, images."""
  # The first cell installs. A plugin for GPUs warns where there is none.
  return {
    cell.id: [
      'text' if output.output_type == 'stream' else sorted(output.data)
      for output in cell.outputs
      if output.get('name') != 'stderr'
    ]
    for cell in code_cells(notebook)[1:]
  }


def _run_shortened(path, python):
  """Runs the short form in a Python, and compares kinds of outputs."""
  kept, notebook = _read(path), _read(path)
  for cell in code_cells(notebook):
    cell.source = cell.source.replace(f'git+{_REPOSITORY}', _ROOT.as_uri())
    for line, short in _SHORT.items():
      cell.source = cell.source.replace(line, short)
  execute(notebook, python)
  assert _kinds(notebook) == _kinds(kept)
  for text in _CLAIMS.get(path.stem, []):
    assert text in _printed(notebook)


def _agree(found, expected):
  """Returns whether two printed lines may be of the same program.

  Processors round differently and Pythons have other files to train on. Losses
  (three digits behind the point) hardly show it; the largest logit beside one,
  at a rate that is too high, is another number on another machine.
  """
  # Columns are as wide as their numbers.
  words = [_NUMBER.sub('#', line).split() for line in (found, expected)]
  numbers = [*zip(*map(_NUMBER.findall, (found, expected)), strict=False)]
  has_loss = any(_LOSS.fullmatch(x) for _, x in numbers)
  return words[0] == words[1] and all(
    _close(*both, has_loss=has_loss) for both in numbers
  )


def _close(found, expected, *, has_loss):
  if re.fullmatch(r'\d+', expected) and not has_loss:
    return found == expected
  number, value = (float(x.replace(',', '')) for x in (found, expected))
  if _LOSS.fullmatch(expected):
    return number == pytest.approx(value, rel=0.1)
  return value / 5 <= number <= value * 5


def test_lines_of_another_machine_agree_and_stale_ones_do_not():
  line = 'AdamW  4 x 0.008   2.456    231   0.13'
  assert _agree('AdamW  4 x 0.008   2.501  431   0.21', line)
  assert not _agree('AdamW  4 x 0.008   2.856    231   0.13', line)
  assert not _agree('AdamW  4 x 0.008   2.456    2,310   0.13', line)
  assert not _agree('LAMB  4 x 0.008   2.456    231   0.13', line)
  assert not _agree('kernel (64, 4, 16)', 'kernel (64, 4, 8)')


@pytest.mark.slow
@_each_notebook
def test_another_run_prints_the_same_outputs(path, monkeypatch):
  monkeypatch.delenv('JAX_DISABLE_MOST_OPTIMIZATIONS', raising=False)
  kept, notebook = _read(path), _read(path)
  execute(notebook)
  assert _printed(notebook, 'stderr') == ''
  assert _kinds(notebook) == _kinds(kept)
  for found, expected in zip(
    _printed(notebook).splitlines(), _printed(kept).splitlines(), strict=True
  ):
    assert _agree(found, expected), f'{found!r} is printed, not {expected!r}'


@pytest.fixture(scope='module')
def colab(tmp_path_factory):
  """The Python of an environment with Colab's packages, and nothing else."""
  folder = tmp_path_factory.mktemp('colab')
  for name in ('python3.13', 'python3.12', sys.executable):
    create = ['env', name, '-m', 'venv', '--clear', folder]
    if not subprocess.run(create, check=False, capture_output=True).returncode:
      break
  python = str(folder / 'bin/python')
  install = [python, '-m', 'pip', 'install', '--quiet', '--no-deps', '-r']
  if subprocess.run([*install, _COLAB], check=False).returncode:
    pytest.skip('makes an environment with pip, which needs a network')
  yield python
  shutil.rmtree(folder)  # More than a gigabyte.


def _packages(python):
  """Returns the names of the packages of a Python with their versions."""
  listed = [python, '-m', 'pip', 'list', '--format=json']
  done = subprocess.run(listed, check=True, capture_output=True)
  return {x['name']: x['version'] for x in json.loads(done.stdout)}


@pytest.mark.slow
def test_notebooks_run_on_colab_and_leave_its_packages(colab, monkeypatch):
  monkeypatch.delenv('PYTHONPATH', raising=False)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  before = _packages(colab)
  for path in _NOTEBOOKS:
    _run_shortened(path, colab)
  after = _packages(colab)
  assert after.pop('merit_optax') == merit_optax.__version__
  # With another jaxlib than the plugin's, jax would not find the GPU.
  assert after == before


def test_colab_has_what_the_package_needs():
  lines = _COLAB.read_text().splitlines()
  versions = dict(x.split('==') for x in lines if not x.startswith('#'))
  for needed in map(Requirement, _PROJECT['dependencies']):
    assert versions[needed.name] in needed.specifier


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
  assert code_cells(_read(path))[0].source == _INSTALL


def test_every_shortened_line_is_in_a_notebook():
  text = '\n'.join(_sources(_read(path)) for path in _NOTEBOOKS)
  assert [line for line in _SHORT if line not in text] == []


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
