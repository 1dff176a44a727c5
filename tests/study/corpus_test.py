"""Token files of source text."""

import json
import tarfile
import zipfile

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.gpt2.token_files import PARTS, open_part
from examples.study import corpus


@pytest.fixture
def settings(tmp_path):
  """Four small packages, one of them held out."""
  wheels = tmp_path / 'wheels'
  wheels.mkdir()
  long = ''.join(f'value_{i} = {i} ** 2  # ü\n' for i in range(60))
  packages = {
    'a_b': {'a/one.py': long, 'a/two.py': '# other\n' + long},
    'c': {'c/copy.py': long, 'c/readme.txt': 'no ' + long, 'c/x.py': 'x = 1'},
    'd': {f'd/{i}.py': f'# {i}\n{long}' for i in range(9)},
    corpus.HELD_OUT[0]: {'val.py': '# held out\n' + long},
  }
  for name, files in packages.items():
    with zipfile.ZipFile(wheels / f'{name}-1.0-py3-none-any.whl', 'w') as wheel:
      for path, text in files.items():
        wheel.writestr(path, text)
  # Not listed: another version, and another package.
  for name in ('c-2.0', 'e-1.0'):
    with zipfile.ZipFile(wheels / f'{name}-py3-none-any.whl', 'w') as wheel:
      wheel.writestr('e/no.py', '# not listed\n' + long)
  names = tmp_path / 'packages.txt'
  names.write_text(
    ''.join(f'{name.replace("_", "-")}==1.0\n' for name in packages)
  )
  return corpus.Settings(
    out=tmp_path / 'out',
    wheels=wheels,
    packages=names,
    package_bytes=5 * len(long.encode()),
    vocab_size=300,
  )


def test_tokens_are_the_text_of_whole_packages(settings):
  corpus.build(settings)
  tokenizer = Tokenizer.from_file(str(settings.out / 'tokenizer.json'))
  texts = []
  for name in PARTS:
    (tokens,) = open_part(settings.out, name, 300)
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    *files, rest = text.split('<|endoftext|>')
    assert not rest
    facts = json.loads((settings.out / 'corpus.json').read_text())[name]
    assert facts['files'] == len(files)
    assert facts['bytes'] == len(''.join(files).encode())
    assert facts['tokens'] == len(tokens)
    texts.append(files)
  train, val = texts
  assert len(set(train)) == len(train)
  # Two of the first package, no copy, and four of the third one, by its size.
  assert len(train) == 2 + 0 + 4
  assert [text[:10] for text in val] == ['# held out']
  unwanted = 'x = 1', 'no ', '# not listed'
  assert not any(text.startswith(unwanted) for text in train)


def test_the_archive_holds_the_folder(settings, tmp_path):
  corpus.build(settings)
  with tarfile.open(f'{settings.out}.tar.xz') as archive:
    archive.extractall(tmp_path / 'copy', filter='data')
  for path in settings.out.iterdir():
    assert (tmp_path / 'copy' / path.name).read_bytes() == path.read_bytes()
  tokens = np.fromfile(tmp_path / 'copy' / 'train.bin', np.uint16)
  assert tokens.max() < 300


def test_packages_to_validate_on_are_needed(settings):
  held_out = next(settings.wheels.glob(f'{corpus.HELD_OUT[0]}-*'))
  held_out.unlink()
  lines = settings.packages.read_text().splitlines(True)
  settings.packages.write_text(''.join(lines[:-1]))
  with pytest.raises(ValueError, match='must hold packages to train on and'):
    corpus.build(settings)


def test_packages_are_named_once_with_their_version():
  names = corpus.Settings().packages.read_text().split()
  packages = [name.partition('==')[0] for name in names]
  assert len(set(packages)) == len(packages) > 100
  assert set(corpus.HELD_OUT) < set(packages)
  assert all('==' in name for name in names)
