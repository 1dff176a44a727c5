import ast
import graphlib
from pathlib import Path
import re

from examples import gpt2


def test_the_core_imports_no_tool_and_there_is_no_circle():
  core, tools = (
    {*re.findall(r'\w+', re.search(rf'{kind}: ([^.]*)\.', gpt2.__doc__)[1])}
    for kind in ('Core', 'Tools')
  )
  imports = {}
  for path in Path(gpt2.__file__).parent.glob('[!_]*.py'):
    # Also imports for types alone, and those within functions.
    names = [
      f'{getattr(node, "module", "")}.{name.name}'
      for node in ast.walk(ast.parse(path.read_text()))
      if isinstance(node, (ast.Import, ast.ImportFrom))
      for name in node.names
    ]
    found = re.findall(r'examples\.gpt2\.(\w+)', ' '.join(names))
    imports[path.stem] = {*found} & (core | tools | {'train'})
  assert imports.keys() == core | tools | {'train'}
  assert {
    x: y - core for x, y in imports.items() if x in core and y - core
  } == {}
  graphlib.TopologicalSorter(imports).prepare()
