from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2.config import UsageError, change
from examples.gpt2.data import corpus as corpus_module
from examples.gpt2.data.corpus import fill_cache, load_corpus
from examples.gpt2.data.tokens import load_tokens

END = '<|endoftext|>'


@hypothesis.given(
  files=st.lists(
    st.text(st.sampled_from('ab \n\r\té漢😀'), max_size=300), min_size=1
  ),
  block=st.integers(1, 50),
)
def test_all_text_is_in_one_of_the_parts(tmp_path_factory, files, block):
  folder = tmp_path_factory.mktemp('texts')
  for i, text in enumerate(files):
    (folder / f'{i:03}.txt').write_bytes(text.encode())
  size = len(''.join(files).encode())
  hypothesis.assume(size)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(corpus_module, '_BLOCK', block)
    corpus = load_corpus([str(folder)])
    parts = {x: ''.join(corpus.texts(x)) for x in ('train', 'val')}
  assert corpus.num_bytes('train', 'val') == size
  for part, text in parts.items():
    assert corpus.num_bytes(part) == len(text.encode())
  pieces = [
    (x.path, x.start, x.stop) for y in corpus.segments.values() for x in y
  ]
  content = b''.join(p.read_bytes()[a:b] for p, a, b in sorted(pieces))
  assert content.decode() == ''.join(files)


@pytest.mark.parametrize('sizes', [[22000, *[26] * 45], [26] * 500, [100000]])
def test_a_twentieth_is_held_out_whatever_the_files(tmp_path: Path, sizes):
  for i, size in enumerate(sizes):
    lines = ''.join(f'{number}\n' for number in range(size))
    (tmp_path / f'{i}.txt').write_text(lines)
  corpus = load_corpus([str(tmp_path)])
  share = corpus.num_bytes('val') / corpus.num_bytes('train', 'val')
  assert 0.04 < share < 0.06
  # Slices begin and end with a line.
  assert all(text.endswith('\n') for text in corpus.texts('val') if text)


def test_several_texts_are_one_corpus(tiny, tmp_path: Path):
  paths = []
  for name, text in (('a', '1 2 3\n'), ('b', 'uvw xyz\n')):
    path = tmp_path / f'{name}.txt'
    path.write_text(text * 2000)
    paths.append(str(path))
  tokens = load_tokens(change(tiny, data=tuple(paths)))
  text = tokens.tokenizer.decode(tokens.train[:])
  assert '1 2 3' in text and 'uvw xyz' in text
  assert [x.name for x in tokens.evaluations] == ['text']
  weighted = tuple(f'{path}:1' for path in paths)
  with pytest.raises(UsageError, match='a.txt holds no token files, which'):
    load_tokens(change(tiny, data=weighted))


def test_folders_of_runs_and_caches_are_not_read_as_text(tmp_path: Path):
  (tmp_path / 'a.txt').write_text('some text\n' * 99)
  before = load_corpus([str(tmp_path)])
  run = tmp_path / 'run'
  for name in ('config.json', 'checkpoints/1/x', 'hf/1/config.json', 'a.txt'):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text('of the run')
  cache = tmp_path / 'cache'
  (cache / 'x').mkdir(parents=True)
  (cache / 'x' / 'tokenizer.json').write_text('{}')
  (tmp_path / '.git').write_text('hidden')
  after = load_corpus([str(tmp_path)], [cache])
  assert after == before
  (tmp_path / 'config.json').write_text('{}')  # No run without more.
  assert load_corpus([str(tmp_path)], [cache]).sha256 != before.sha256


def test_lines_that_end_documents_become_ends(tiny, tmp_path: Path):
  (tmp_path / 'a.txt').write_text(f'one {END} here\n{END}\ntwo\n' * 500)
  tokens = load_tokens(change(tiny, data=(str(tmp_path),)))
  end = tokens.tokenizer.token_to_id(END)
  text = tokens.tokenizer.decode(tokens.train[:], skip_special_tokens=False)
  assert f' {END} here\n{END}two\n' in text
  count = (tokens.train[:] == end).sum() + (tokens.validation[:] == end).sum()
  # Also where text was held out, and at the end.
  assert 500 <= count <= 521


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.txt', b'x\0y', 'a.txt holds no text'),
    ('a.jsonl', b'{"text": ""}', 'no plain text: .*prepare --data .*a.jsonl'),
  ],
)
def test_other_files_than_text_are_refused(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UsageError, match=message):
    load_corpus([str(tmp_path / name)])


def test_a_text_too_short_to_split_is_refused(tmp_path: Path):
  (tmp_path / 'a.txt').write_text('hi\n')
  corpus = load_corpus([str(tmp_path / 'a.txt')])
  with pytest.raises(UsageError, match=r'a\.txt .*too short'):
    fill_cache(tmp_path / 'cache', corpus, 257)
  assert not (tmp_path / 'cache').exists()


def test_binary_files_are_left_out_of_folders_and_bad_text_is_named(tmp_path):
  (tmp_path / 'a.py').write_text('import this\n' * 99)
  (tmp_path / 'b.png').write_bytes(b'\x89PNG\r\n\0\0')
  (tmp_path / 'package.json').write_text('{}')
  corpus = load_corpus([str(tmp_path)])
  assert '(2 files)' in corpus.source
  (tmp_path / 'c.txt').write_bytes('é'.encode('latin-1') * 9)
  corpus = load_corpus([str(tmp_path)])
  with pytest.raises(UsageError, match=r'c\.txt is no UTF-8 text within bytes'):
    list(corpus.texts('train'))
  with pytest.raises(UsageError, match='/nothing does not exist'):
    load_corpus(['/nothing'])


def test_a_cache_folder_that_cannot_be_used_names_the_flag(tiny):
  tiny.cache_dir.write_text('a file, no folder')
  with pytest.raises(UsageError, match='--cache-dir .*cannot be used.* Name'):
    load_tokens(tiny)
