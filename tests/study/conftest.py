import pytest


@pytest.fixture(scope='module', autouse=True)
def _compiles_quickly(quick_compilation: None) -> None:
  """Lets all modules of this folder compile quickly."""
