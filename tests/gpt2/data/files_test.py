import bz2
import codecs
import gzip
import io
import lzma
from pathlib import Path
import tarfile
from types import SimpleNamespace

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.files import (
  OtherFormatError,
  as_utf8,
  find_files,
  open_unpacked,
  zstd,
)

PACK = {
  'gz': gzip.compress,
  'zst': zstd.compress,
  'bz2': bz2.compress,
  'xz': lzma.compress,
}


def _read(content: bytes) -> bytes:
  return as_utf8(io.BytesIO(content)).read()


@hypothesis.given(
  text=st.text(
    st.characters(exclude_categories=['Cs', 'Cc'], exclude_characters='\ufeff'),
    max_size=200,
  ),
  encoding=st.sampled_from(['utf-8', 'utf-16', 'utf-32', 'utf-16-be']),
  is_marked=st.booleans(),
)
def test_text_is_read_without_its_mark(text, encoding, is_marked):
  # Python itself marks utf-16 and utf-32.
  marks = {
    'utf-8': codecs.BOM_UTF8 * is_marked,
    'utf-16-be': codecs.BOM_UTF16_BE,
  }
  content = marks.get(encoding, b'') + text.encode(encoding)
  assert _read(content) == text.encode()


@hypothesis.given(
  text=st.text(st.characters(codec='utf-8', categories=['L']), min_size=40),
  place=st.integers(0, 40),
)
def test_a_zero_byte_does_not_change_the_encoding(text: str, place: int):
  content = f'{text[:place]}\0{text[place:]}'.encode()
  assert _read(content) == content


@pytest.mark.parametrize(
  'text',
  [
    'plain\r\n' * 30_000,
    'السلام عليكم ورحمة الله وبركاته يا أصدقاء\n' * 9,
    'सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता\n' * 9,
    'มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน ในเกียรติศักดิ์\n' * 9,
    'Привет, мир!\n',
    'α β\n',
    '漢字 kanji かな\n',
    '😀 a\n',
  ],
)
def test_utf_16_is_read_without_a_mark(text: str):
  for encoding in ('utf-16-le', 'utf-16-be'):
    assert _read(text.encode(encoding)) == text.encode()


@hypothesis.given(content=st.binary(max_size=100))
def test_no_bytes_are_an_error_of_another_kind(content: bytes):
  try:
    assert isinstance(_read(content), bytes)
  except OtherFormatError as error:
    assert str(error)


def _tar(content: bytes) -> bytes:
  stream = io.BytesIO()
  with tarfile.open(fileobj=stream, mode='w') as file:
    member = tarfile.TarInfo('a.txt')
    member.size = len(content)
    file.addfile(member, io.BytesIO(content))
  return stream.getvalue()


@pytest.mark.parametrize(
  ('content', 'name'),
  [
    (zstd.compress(b'text' * 9), 'Zstandard'),
    (gzip.compress(b'text' * 9, mtime=0), 'gzip'),
    (lzma.compress(b'text' * 9), 'xz'),
    (b'PK\3\4\x14\0\0\0', 'ZIP'),
    (b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR', 'PNG'),
    (b'PAR1' + b'text' * 99, 'Parquet'),
    (b'\xff\xff\xff\xff\x10\0\0\0' + b'text' * 99, 'Arrow'),
    (b'%PDF-1.7\n' + b'text' * 99, 'PDF'),
    (_tar(b'text\n' * 999), 'tar'),
    (bz2.compress(b'text' * 9), 'bzip2'),
    (bytes(range(256)), 'binary'),
    (np.arange(1000, dtype=np.uint16).tobytes(), 'binary'),
  ],
)
def test_other_formats_are_named(content: bytes, name: str):
  with pytest.raises(OtherFormatError, match=name):
    _read(content)


@pytest.mark.parametrize('suffix', PACK)
def test_compressed_files_are_unpacked(tmp_path: Path, suffix: str):
  path = tmp_path / f'a.txt.{suffix.upper()}'
  content = b'some text\n' * 999
  # Two in one file, as pigz and pzstd write.
  path.write_bytes(PACK[suffix](content) * 2)
  with open_unpacked(path) as stream:
    assert stream.read() == content * 2


@pytest.mark.parametrize('suffix', PACK)
@pytest.mark.parametrize('damage', ['not compressed', 'cut off', 'changed'])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, damage: str):
  if (suffix, damage) == ('zst', 'changed'):
    pytest.skip('Zstandard has no checksum unless asked for.')
  path = tmp_path / f'a.txt.{suffix}'
  content = PACK[suffix](bytes(range(256)) * 40)
  changed = bytearray(content)
  changed[len(content) // 2] ^= 255
  written = {
    'not compressed': b'just text', 'cut off': content[:-9], 'changed': changed,
  }  # fmt: skip
  path.write_bytes(written[damage])
  with (
    pytest.raises(UsageError, match=rf'a\.txt\.{suffix} is damaged'),
    open_unpacked(path) as stream,
  ):
    stream.read()


class _Refused(io.BytesIO):
  """A file in a store, once it is open."""

  def __init__(self, error: OSError):
    super().__init__()
    self._error = error

  def read(self, *_):
    raise self._error


@pytest.mark.parametrize('suffix', PACK)
@pytest.mark.parametrize(
  'error',
  # Without numbers: the first two of s3fs, the last of gcsfs.
  [
    PermissionError('Access Denied'),
    TimeoutError('too slow'),
    OSError('Forbidden: bucket/a'),
  ],
  ids=str,
)
def test_an_error_of_a_store_is_not_taken_for_damage(suffix: str, error):
  path = SimpleNamespace(suffix=f'.{suffix}', open=lambda _: _Refused(error))
  with pytest.raises(OSError) as caught, open_unpacked(path) as stream:
    stream.read()
  assert caught.value is error


def test_what_describes_parquet_files_is_left_out(tmp_path: Path):
  others = ['README.md', 'dataset_info.json']
  for name in ['a.parquet', *others]:
    (tmp_path / name).touch()
  assert find_files(tmp_path) == [tmp_path / 'a.parquet']
  (tmp_path / 'a.parquet').unlink()
  assert find_files(tmp_path) == [tmp_path / name for name in others]
