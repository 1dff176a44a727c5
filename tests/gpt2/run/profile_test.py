from pathlib import Path
from unittest import mock

import jax
import pytest

from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.profile import Profile


@pytest.mark.parametrize('last', [12, 20])
@pytest.mark.parametrize('name', ['start_trace', 'stop_trace'])
def test_a_trace_that_fails_is_told_once_and_hides_no_error(
  tmp_path: Path, monkeypatch, name: str, last: int
):
  for action in ('start_trace', 'stop_trace'):
    error = RuntimeError('no space left') if action == name else None
    monkeypatch.setattr(jax.profiler, action, mock.Mock(side_effect=error))
  with (
    pytest.warns(UserWarning, match='no trace .*no space left') as warned,
    pytest.raises(NotFiniteError, match='mine'),
    Profile(tmp_path, done=0, wait=mock.Mock()) as profile,
  ):
    for step in range(1, last + 1):
      profile.before(step)
    raise NotFiniteError('mine')
  assert sum('trace' in str(x.message) for x in warned) == 1
