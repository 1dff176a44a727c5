"""Runs whose files are in a bucket: the same bits as on a disk."""

import json
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from examples.gpt2 import evaluate as evaluate_module, plot, prepare
from examples.gpt2.config import Config, change
from examples.gpt2.convert import export_model, import_model
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.plot import plot_runs
from examples.gpt2.storage import as_path
from examples.gpt2.train import main, train
from tests.gpt2.runs import as_flags, assert_same_run, contents, metrics


@pytest.fixture
def run(make_bucket) -> Path:
  return as_path(make_bucket('gs')) / 'run'


def test_a_run_in_a_store_is_that_on_a_disk(finished, run):
  config = change(finished, out_dir=run)
  with train(config) as folder:
    assert folder.path == run
  assert_same_run(run, finished.out_dir)
  assert (run / 'curves.png').read_bytes().startswith(b'\x89PNG')
  before = contents(run)
  train(config)  # It has been done.
  assert contents(run) == before

  local, data = finished.out_dir, config.data[0]
  assert evaluate(run, data) == evaluate(local, data)
  assert generate(run, 'the', 8) == generate(local, 'the', 8)
  assert plot_runs((run, local), run / 'both.svg') == run / 'both.svg'


def test_a_model_goes_through_a_store_to_hugging_face(finished, run, tmp_path):
  pytest.importorskip('transformers', reason='of [convert]')
  local = finished.out_dir
  export_model(local, run / 'exported')
  import_model(run / 'exported', run / 'imported')
  export_model(local, tmp_path / 'exported')
  for file in (tmp_path / 'exported').iterdir():
    assert (run / 'exported' / file.name).read_bytes() == file.read_bytes()
  assert generate(run / 'imported', 'the', 8) == generate(local, 'the', 8)


def _start(config: Config, run: Path, devices: int, **options: Any):
  flags = as_flags(change(config, out_dir=run))
  return subprocess.Popen(
    [sys.executable, '-m', 'examples.gpt2.train', *flags, '--mesh', 'fsdp=4'],
    cwd=Path(__file__).parents[2],
    env=os.environ | {'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': str(devices)},
    text=True,
    **options,
  )


def _wait_for(process: subprocess.Popen, path: Path) -> None:
  while not path.exists():
    assert process.poll() is None
    time.sleep(0.05)


def test_killed_on_eight_devices_it_goes_on_with_four(tiny, run, tmp_path):
  config = change(tiny, steps=20, checkpoint_every=2)
  train(change(config, mesh='fsdp=4', out_dir=tmp_path / 'whole'))
  killed = _start(config, run, 8)
  _wait_for(killed, run / 'checkpoints' / '6' / 'commit_success.txt')
  killed.send_signal(signal.SIGKILL)
  killed.wait()
  assert not (run / 'sample.txt').exists()
  assert _start(config, run, 4).wait() == 0
  for found, expected in zip(
    *map(metrics, (run, tmp_path / 'whole')), strict=True
  ):
    np.testing.assert_allclose(
      found['train_loss'], expected['train_loss'], rtol=1e-5
    )


@pytest.mark.slow
def test_the_commands_of_the_page_run(tiny, make_bucket, tmp_path, monkeypatch):
  page = Path(__file__).parents[2] / 'docs/data.md'
  *_, block = re.findall(r'```sh\n(.*?)```', page.read_text(), re.S)
  gs = make_bucket('gs')
  block = block.replace('gs://BUCKET', gs)
  first, *lines = block.replace('\\\n', '').splitlines()
  assert first.startswith("pip install -e '.[cloud]'")
  assert len(lines) == 3
  monkeypatch.chdir(tmp_path)
  texts = Path(tiny.data[0]).read_text().splitlines()
  records = [json.dumps({'text': text}) + '\n' for text in texts]
  Path('text.jsonl').write_text(''.join(records))
  prepare.main(
    ['--data', 'text.jsonl', '--out-dir', f'{gs}/tokens', '--vocab-size=288']
    + ['--validation-share=0.2']
  )
  flags = as_flags(tiny)[2:]  # Without --data.
  main([*flags, '--data', f'{gs}/tokens', '--out-dir', f'{gs}/runs/two'])
  train_line, evaluate_line, plot_line = (shlex.split(x)[3:] for x in lines)
  main([*flags, *train_line])
  evaluate_module.main(evaluate_line)
  plot.main(plot_line)
  assert Path('both.png').exists()
