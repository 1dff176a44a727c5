"""The public names and their signatures change only on purpose.

`python tests/release/public_api_test.py` renews the list of them. A change that
breaks a caller needs a deprecation first: see CONTRIBUTING.md.
"""

import ast
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import merit_optax

_LIST = Path(__file__).parents[1] / 'data/public_api.txt'


def public_api() -> str:
  """Returns all public names, a line for each of their arguments or fields."""
  return '\n'.join(_describe(name) for name in merit_optax.__all__)


class _Written(str):
  """An annotation that is shown as it is written, whatever jax makes of it."""

  def __repr__(self):
    return str(self)


def _describe(name: str) -> str:
  value = getattr(merit_optax, name)
  types = _types(value)
  lines = [
    f'  {p.kind.description}: {p.replace(annotation=types[p.name])}'
    for p in inspect.signature(value).parameters.values()
  ]
  return '\n'.join([f'{name} -> {types.get("return", name)}', *lines, ''])


def _types(value: object) -> dict[str, _Written]:
  """Returns the annotations of a function or of a named tuple."""
  (definition,) = ast.parse(inspect.getsource(value)).body
  if isinstance(definition, ast.ClassDef):
    fields = [x for x in definition.body if isinstance(x, ast.AnnAssign)]
    types = {x.target.id: x.annotation for x in fields}
  else:
    arguments = [x for x in ast.walk(definition.args) if isinstance(x, ast.arg)]
    types = {x.arg: x.annotation for x in arguments}
    types['return'] = definition.returns
  written = {name: _Written(ast.unparse(x)) for name, x in types.items()}
  for decorator in definition.decorator_list:
    # A function that takes the arguments of another one.
    (other,) = decorator.args
    written = _types(getattr(merit_optax, other.id)) | written
  return written


def test_public_names_and_signatures_are_those_of_the_list():
  assert public_api() == _LIST.read_text(), (
    'If this is meant, and breaks no caller without a deprecation first, renew '
    f'the list: python tests/release/{Path(__file__).name}'
  )


def test_nothing_else_is_public():
  rooms = {'diagnostics', 'matrices', 'optimizers', 'transforms'}
  names = {x for x in dir(merit_optax) if not x.startswith('_')}
  assert names - rooms == set(merit_optax.__all__)


def test_the_state_is_that_of_adam_and_nothing_else():
  params = {'kernel': jnp.ones((4, 3))}
  adam, *rest = merit_optax.merit(0.1).init(params)
  assert isinstance(adam, optax.ScaleByAdamState)
  assert len(rest) == 4 and jax.tree.leaves(rest) == []


if __name__ == '__main__':
  _LIST.write_text(public_api())
