"""Runs whose files are in object stores: the same bits as on a disk."""

import dataclasses
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
from examples.gpt2.config import Config, UsageError
from examples.gpt2.convert import export_model, import_model
from examples.gpt2.evaluate import evaluate
from examples.gpt2.generate import generate
from examples.gpt2.plot import plot_runs
from examples.gpt2.run import claim, metrics
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.storage import as_path, file_system, write_whole
from examples.gpt2.train import main, train
from tests.gpt2.runs import as_flags, assert_same_run, contents

_SETTINGS = {'config': {'steps': 3}}


@pytest.fixture
def run(bucket: str) -> Path:
  return as_path(bucket) / 'run'


def test_a_run_in_a_store_is_that_on_a_disk(finished, run, tmp_path):
  config = dataclasses.replace(finished, out_dir=run)
  with train(config) as folder:
    assert folder.path == run
  assert_same_run(run, finished.out_dir)
  assert sorted(x.name for x in (run / 'checkpoints').iterdir()) == ['4', '6']
  assert (run / 'curves.png').read_bytes().startswith(b'\x89PNG')
  before = contents(run)
  train(config)  # It has been done.
  assert contents(run) == before

  local = finished.out_dir
  assert evaluate(run, config.data) == evaluate(local, config.data)
  assert generate(run, 'the', 8) == generate(local, 'the', 8)
  assert plot_runs((run, local), run / 'both.svg') == run / 'both.svg'
  export_model(run, run / 'exported')
  import_model(run / 'exported', run / 'imported')
  export_model(local, tmp_path / 'exported')
  for file in (tmp_path / 'exported').iterdir():
    assert (run / 'exported' / file.name).read_bytes() == file.read_bytes()
  assert generate(run / 'imported', 'the', 8) == generate(local, 'the', 8)
  started = dataclasses.replace(
    config, init_from=run / 'imported', out_dir=run.parent / 'two', steps=2
  )
  train(started)
  assert (run.parent / 'two' / 'sample.txt').exists()


@pytest.mark.slow
def test_tensorboard_and_traces_are_in_the_store(tiny: Config, run: Path):
  config = dataclasses.replace(
    tiny, out_dir=run, tensorboard=True, profile=True, steps=12,
    checkpoint_every=12, eval_every=12, diagnostics_every=0,
  )  # fmt: skip
  train(config)
  for name in ('tensorboard', 'profile'):
    assert file_system(run).find(str(run / name)), name


def _start(config: Config, run: Path, **options: Any) -> subprocess.Popen:
  flags = as_flags(dataclasses.replace(config, out_dir=run))
  return subprocess.Popen(
    [sys.executable, '-m', 'examples.gpt2.train', *flags],
    cwd=Path(__file__).parents[2],
    env=os.environ | {'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '8'},
    text=True,
    **options,
  )


def _claim_again(run: Path) -> None:
  """Starts the run and ends it, once its folder is free."""
  with RunFolder(run) as folder:
    folder.start(json.loads((run / 'config.json').read_text()))


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_bits(tiny, run, monkeypatch):
  monkeypatch.setattr(claim, 'SILENT_SECONDS', 1.0)
  config = dataclasses.replace(tiny, steps=24, checkpoint_every=2)
  train(config)
  for step in (2, 10):
    killed = _start(config, run)
    saved = run / 'checkpoints' / str(step) / '_CHECKPOINT_METADATA'
    while not saved.exists():
      assert killed.poll() is None
      time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    _claim_again(run)  # The claim is still there, and nobody gives a sign.
  train(dataclasses.replace(config, out_dir=run))
  assert_same_run(run, config.out_dir)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_lets_the_next_run_in(tiny, run, number):
  config = dataclasses.replace(tiny, steps=24, checkpoint_every=24)
  train(config)
  stopped = _start(config, run, stderr=subprocess.PIPE)
  while 'step/s' not in stopped.stderr.readline():
    assert stopped.poll() is None
  stopped.send_signal(number)
  stopped.communicate()
  assert stopped.returncode == 128 + number
  assert len(list((run / 'checkpoints').iterdir())) == 1
  start = time.monotonic()
  _claim_again(run)
  assert time.monotonic() - start < claim.SILENT_SECONDS
  train(dataclasses.replace(config, out_dir=run))
  assert_same_run(run, config.out_dir)


@pytest.mark.parametrize('ended', [0, 1])
def test_a_silent_run_is_taken_over_and_ends(run, monkeypatch, ended):
  monkeypatch.setattr(claim, 'SILENT_SECONDS', 0.5)
  monkeypatch.setattr(claim, 'BEAT_SECONDS', 3600.0)
  with RunFolder(run) as silent:
    silent.start(_SETTINGS)
    for _ in range(ended):
      with RunFolder(run) as other:
        other.start(_SETTINGS)
    with RunFolder(run) as last:
      last.start(_SETTINGS)
      with pytest.raises(UsageError, match='another run has taken'):
        silent.flush()
      last.flush()


def test_metrics_go_up_at_intervals_and_before_checkpoints(run, monkeypatch):
  with RunFolder(run) as folder:
    folder.start(_SETTINGS)
    folder.keep_metrics(0)
    folder.log({'step': 1})
    assert folder.read_metrics() == []
    folder.flush()
    assert folder.read_metrics() == [{'step': 1}]
  monkeypatch.setattr(metrics, 'UPLOAD_SECONDS', 0.0)
  with RunFolder(run) as again:
    again.start(_SETTINGS)
    again.keep_metrics(1)
    again.log({'step': 2})
    deadline = time.monotonic() + 20
    while len(again.read_metrics()) < 2:
      assert time.monotonic() < deadline
      time.sleep(0.05)
    again.log({'step': 3})
    again.flush()
    assert [x['step'] for x in again.read_metrics()] == [1, 2, 3]


def test_metrics_wait_for_a_store_that_refuses(run: Path, proxy, monkeypatch):
  monkeypatch.setattr(metrics, 'UPLOAD_SECONDS', 0.0)
  with RunFolder(run) as folder:
    folder.start(_SETTINGS)
    folder.keep_metrics(0)
    proxy.status = 403
    with pytest.warns(UserWarning, match='wait in memory'):
      for step in range(1, 200):
        folder.log({'step': step})
        time.sleep(0.01)
    with pytest.raises(OSError):
      folder.flush()
    proxy.heal()
    folder.flush()
    assert [x['step'] for x in folder.read_metrics()] == [*range(1, 200)]


def test_what_is_not_there_is_named(run: Path, tiny: Config):
  for action in (
    lambda: evaluate(run, tiny.data),
    lambda: generate(run),
    lambda: plot_runs((run,)),
    lambda: import_model(run, run / 'out'),
    lambda: train(dataclasses.replace(tiny, init_from=run)),
  ):
    with pytest.raises(UsageError, match=str(run)):
      action()


@pytest.mark.slow
def test_the_commands_of_the_page_run(tiny, make_bucket, tmp_path, monkeypatch):
  root = Path(__file__).parents[2]
  page, readme = (root / x for x in ('docs/storage.md', 'README.md'))
  (block,) = re.findall(r'```sh\n(.*?)```', page.read_text(), re.S)
  block += re.search(r'^python .* gs://.*$', readme.read_text(), re.M)[0]
  buckets = {'gs://BUCKET': make_bucket('gs'), 's3://OTHER': make_bucket('s3')}
  for name, bucket in buckets.items():
    block = block.replace(name, bucket)
  first, *lines = block.splitlines()
  assert first.startswith("pip install -e '.[cloud]'")
  assert len(lines) == 4
  monkeypatch.chdir(tmp_path)
  gs, s3 = buckets.values()
  texts = Path(tiny.data).read_text().splitlines()
  records = [json.dumps({'text': text}) + '\n' for text in texts]
  Path('text.jsonl').write_text(''.join(records))
  prepare.main(
    ['--data', 'text.jsonl', '--out-dir', f'{gs}/tokens', '--vocab-size=288']
    + ['--validation-share=0.2']
  )
  flags = as_flags(tiny)
  main([*flags, '--data', f'{gs}/tokens', '--out-dir', f'{s3}/runs/two'])
  train_line, evaluate_line, plot_line, readme_line = (
    shlex.split(x)[3:] for x in lines
  )
  main([*flags, *train_line])
  main([*flags, *readme_line])
  evaluate_module.main(evaluate_line)
  plot.main(plot_line)
  assert Path('both.png').exists()


@pytest.mark.slow
def test_the_one_file_trainer_resumes_from_a_store(make_bucket):
  data = as_path(make_bucket('s3')) / 'tokens'
  for name in ('train.bin', 'val.bin'):
    tokens = np.arange(4000, dtype=np.uint16) % 251
    write_whole(data / name, tokens.tobytes())
  arguments = shlex.split(
    '--eval-every 2 --num-layers 1 --width 16 --context-length 16 '
    f'--batch-size 8 --steps 2 --data {data} --out-dir {make_bucket("gs")}/run'
  )
  for done in (0, 2):
    told = subprocess.run(
      [sys.executable, 'examples/pretrain.py', *arguments],
      cwd=Path(__file__).parents[2],
      capture_output=True,
      check=False,
      text=True,
    )
    assert told.returncode == 0, told.stderr
    assert f'step {done} of 2' in told.stdout
