"""The library's rooms: imports go down only, and in no circle."""

import ast
import graphlib
from pathlib import Path

import merit_optax

_ROOT = Path(merit_optax.__file__).parent
# From the lowest to the highest.
_FLOORS = ('_internal', 'matrices', 'transforms', 'optimizers', 'diagnostics')


def _imports(path: Path) -> set[str]:
  """Returns the modules of the library that a file imports."""
  modules = {
    '.'.join(x.relative_to(_ROOT.parent).with_suffix('').parts)
    for x in _ROOT.rglob('*.py')
  }
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      names = {f'{node.module}.{alias.name}' for alias in node.names}
      found |= (names | {node.module}) & modules
  return found


def test_imports_go_down_and_in_no_circle():
  graph = {
    f'merit_optax.{floor}.{path.stem}': _imports(path)
    for floor in _FLOORS
    for path in (_ROOT / floor).glob('*.py')
  }
  assert {path.parent.name for path in _ROOT.glob('*/*.py')} == {*_FLOORS}
  for module, imported in graph.items():
    floor = _FLOORS.index(module.split('.')[1])
    for other in imported:
      assert _FLOORS.index(other.split('.')[1]) <= floor, (module, other)
  graphlib.TopologicalSorter(graph).prepare()
