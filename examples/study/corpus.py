"""Builds the token files of the large-batch comparison from Python packages.

    python -m examples.study.corpus --out runs/corpus

Downloads the wheels that packages.txt names (about 670 MB), takes at most 2 MB
of source text from each, and writes GPT-2-like byte pairs as uint16 to
train.bin and val.bin, which ``--data`` of the trainer reads too. Beside
the folder it leaves an archive of it, for a machine without a network.
"""

from collections.abc import Iterator
import dataclasses
import hashlib
import json
from pathlib import Path
import shutil
import subprocess
import sys
import zipfile

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
import tqdm
import tyro

# Whole packages, none of which is a part of another one.
HELD_OUT = ('celery', 'flax', 'networkx', 'scrapy', 'sqlglot')
# Shorter files are mostly licences, longer ones mostly tables.
_FILE_BYTES = range(500, 200_000)
# The tokenizer is trained on one file of so many.
_SAMPLE = 10


@dataclasses.dataclass(frozen=True)
class Settings:
  """Builds token files from the source text of Python packages."""

  out: Path = Path('runs/corpus')
  """Folder of train.bin, val.bin, tokenizer.json and corpus.json."""

  wheels: Path = Path('runs/wheels')
  """Folder of the packages. Those that it lacks are downloaded."""

  packages: Path = Path(__file__).parent / 'data' / 'packages.txt'
  """Names and versions of the packages."""

  package_bytes: int = 2_000_000
  """Most bytes of source text from a package."""

  vocab_size: int = 4096
  """Size of the vocabulary, at most 65,536."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  build(tyro.cli(Settings, args=args))


def build(settings: Settings) -> None:
  """Downloads packages and writes the tokens of their source text.

  Args:
    settings: Folders and sizes.

  Raises:
    subprocess.CalledProcessError: If a package cannot be downloaded.
    ValueError: If no package, or none that is held out, is in the folder.
  """
  settings.wheels.mkdir(parents=True, exist_ok=True)
  _download(settings)
  texts: dict[str, list[str]] = {'train': [], 'val': []}
  for package, text in _read(settings):
    texts['val' if package in HELD_OUT else 'train'].append(text)
  if not all(texts.values()):
    raise ValueError(
      f'wheels must hold packages to train on and some of {HELD_OUT}, got '
      f'{settings.wheels}.'
    )
  settings.out.mkdir(parents=True, exist_ok=True)
  tokenizer = _train_tokenizer(texts['train'][::_SAMPLE], settings.vocab_size)
  tokenizer.save(str(settings.out / 'tokenizer.json'))
  facts = {'vocab_size': settings.vocab_size, 'held_out': HELD_OUT}
  for name, files in texts.items():
    tokens = _tokenize(tokenizer, files, name)
    tokens.tofile(settings.out / f'{name}.bin')
    size = sum(len(text.encode()) for text in files)
    facts[name] = {
      'files': len(files),
      'bytes': size,
      'tokens': len(tokens),
      'sha256': hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    print(
      f'{name}: {len(tokens):,} tokens, {size / len(tokens):.2f} bytes each'
    )
  text = json.dumps(facts, indent=2)
  (settings.out / 'corpus.json').write_text(text + '\n')
  archive = shutil.make_archive(str(settings.out), 'xztar', settings.out)
  print(f'{archive}: {Path(archive).stat().st_size / 1e6:.0f} MB')


def _download(settings: Settings) -> None:
  """Downloads the packages that are not in the folder."""
  packages = settings.packages.read_text().split()
  present = {_requirement(path) for path in settings.wheels.glob('*.whl')}
  missing = [x for x in packages if x not in present]
  for package in tqdm.tqdm(missing, 'packages', disable=None):
    # Wheels without compiled code are the same files for every machine.
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
    command += ['--only-binary', ':all:', '--platform', 'any', '--abi', 'none']
    command += ['--implementation', 'py', '--python-version', '3.12']
    subprocess.run(
      [*command, '--dest', str(settings.wheels), package], check=True
    )


def _package(wheel: Path) -> str:
  """Returns the name of a wheel's package, as packages.txt writes it."""
  return wheel.name.split('-')[0].replace('_', '-').lower()


def _requirement(wheel: Path) -> str:
  """Returns the name and version of a wheel's package, as in packages.txt."""
  return f'{_package(wheel)}=={wheel.name.split("-")[1]}'


def _read(settings: Settings) -> Iterator[tuple[str, str]]:
  """Yields package and text of each source file that is taken."""
  seen = set()
  listed = settings.packages.read_text().split()
  for wheel in sorted(settings.wheels.glob('*.whl')):
    # The folder may hold other packages, and other versions.
    if _requirement(wheel) not in listed:
      continue
    left = settings.package_bytes
    with zipfile.ZipFile(wheel) as files:
      for name in _in_mixed_order(files.namelist()):
        content = files.read(name)
        digest = hashlib.sha256(content).digest()
        if len(content) in _FILE_BYTES and digest not in seen:
          left -= len(content)
          if left < 0:
            break
          seen.add(digest)
          yield _package(wheel), content.decode(errors='replace')


def _in_mixed_order(names: list[str]) -> list[str]:
  """Returns the source files, so that any number of the first is a sample."""
  sources = [name for name in names if name.endswith('.py')]
  return sorted(sources, key=lambda x: hashlib.sha256(x.encode()).digest())


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
  """Returns byte pairs, with a token that ends a file."""
  tokenizer = Tokenizer(models.BPE())
  split = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = split
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=['<|endoftext|>'],
    initial_alphabet=split.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def _tokenize(tokenizer: Tokenizer, texts: list[str], name: str) -> np.ndarray:
  """Returns the tokens of all texts, each with an end of file after it."""
  end = [tokenizer.token_to_id('<|endoftext|>')]
  parts = []
  for start in tqdm.trange(0, len(texts), 1000, desc=name, disable=None):
    for encoding in tokenizer.encode_batch(texts[start : start + 1000]):
      parts.append(np.array(encoding.ids + end, np.uint16))
  return np.concatenate(parts)


if __name__ == '__main__':
  main()
