"""The first commands of docs/data.md, on small files."""

import json
from pathlib import Path
import re
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from examples.gpt2 import prepare, train
from examples.gpt2.tokenizer import train_tokenizer

_PAGE = Path(__file__).parents[2] / 'docs' / 'data.md'
_TINY = shlex.split(
  '--num-layers 1 --width 16 --num-heads 2 --context-length 16 --steps 2 '
  '--batch-size 8 --micro-batch-size 1 --eval-every 2 --eval-sequences 8 '
  '--diagnostics-every 0 --unroll 1 --cache-dir cache --out-dir run'
)
_TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(2000)]


def _write_files() -> None:
  for name in ('fineweb', 'code', 'llama3', 'fineweb10B'):
    Path(name).mkdir()
  columns = pa.table({'text': _TEXTS[:1000]})
  pa.parquet.write_table(columns, 'fineweb/train-00000-of-00001.parquet')
  for path, field in (('more.jsonl', 'text'), ('code/a.jsonl', 'content')):
    lines = [json.dumps({field: text}) + '\n' for text in _TEXTS[1000:]]
    Path(path).write_text(''.join(lines))
  Path('more.jsonl.zst').write_bytes(
    zstandard.compress(Path('more.jsonl').read_bytes())
  )
  Path('wiki.txt').write_text(''.join(_TEXTS[::20]))
  tokenizer = train_tokenizer(_TEXTS, 300)
  tokenizer.add_special_tokens(['<|end_of_text|>', '<|begin_of_text|>'])
  tokenizer.save('llama3/tokenizer.json')
  settings = {'eos_token': '<|end_of_text|>'}
  Path('llama3/tokenizer_config.json').write_text(json.dumps(settings))
  for name in ('fineweb_train_000001.bin', 'fineweb_val_000000.bin'):
    header = np.array([20240520, 1, 900, *[0] * 253], np.int32).tobytes()
    tokens = np.arange(900, dtype=np.uint16).tobytes()
    Path('fineweb10B', name).write_bytes(header + tokens)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _write_files()
  block, _ = re.findall(r'```sh\n(.*?)```', _PAGE.read_text(), re.S)
  block = block.replace('\\\n', '')
  lines = [x for x in block.splitlines() if not x.startswith('#')]
  assert len(lines) == 4
  for number, line in enumerate(lines):
    _, _, module, *args = shlex.split(line)
    if module.endswith('prepare'):
      prepare.main([*args, '--validation-share', '0.1', '--cache-dir', 'cache'])
    else:
      train.main([*args, *_TINY[:-1], f'run{number}'])
  metrics = Path('run2/metrics.jsonl').read_text().splitlines()
  assert list(json.loads(metrics[-1])['val_losses']) == ['web', 'code', 'wiki']
