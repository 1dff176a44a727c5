import os
from pathlib import Path

import pytest

from examples.gpt2.data.atomic import new_folder, write_whole


def _fail(*_):
  raise OSError('killed before it is in its place')


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch):
  write_whole(tmp_path / 'a', b'old')
  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', _fail)
    with pytest.raises(OSError, match='killed'):
      write_whole(tmp_path / 'a', b'new')
  assert (tmp_path / 'a').read_bytes() == b'old'
  write_whole(tmp_path / 'a', b'newer')
  assert (tmp_path / 'a').read_bytes() == b'newer'
  assert [path.name for path in tmp_path.iterdir()] == ['a']


def test_a_folder_is_whole_or_not_there(tmp_path: Path):
  def write(content: str) -> None:
    with new_folder(tmp_path / 'a' / 'b') as scratch:
      (scratch / 'file').write_text(content)
      if content == 'half':
        _fail()

  with pytest.raises(OSError, match='killed'):
    write('half')
  assert not list((tmp_path / 'a').iterdir())
  write('whole')
  with pytest.raises(OSError, match='not empty'):
    write('more')
  assert (tmp_path / 'a' / 'b' / 'file').read_text() == 'whole'
