import errno
import importlib.util
import json
import math
from pathlib import Path
import re
from unittest import mock

import jax
from matplotlib import image
import pytest
import safetensors.numpy

from examples import gpt2
from examples.gpt2 import loop, model_files
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, change
from examples.gpt2.evaluate import evaluate
from examples.gpt2.model_files import load_model
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.step import Trainer
from examples.gpt2.train import main, train
from tests.gpt2.runs import as_flags, assert_same_run


def test_without_the_extra_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[examples\]'"):
    importlib.reload(gpt2)


def test_metrics_have_a_line_for_each_step(finished: Config):
  metrics = RunFolder(finished.out_dir).read_metrics()
  assert [m['step'] for m in metrics] == [1, 2, 3, 4, 5, 6]
  assert [m['tokens'] for m in metrics] == [256 * i for i in range(1, 7)]
  always = {'train_loss', 'learning_rate', 'tokens_per_second'}
  for m in metrics:
    assert always <= m.keys()
    evaluated = m['step'] in (4, 6)
    assert ('val_loss' in m) == evaluated
    assert ('max_attention_logit' in m) == ('layers' in m) == evaluated
  assert len(metrics[-1]['max_attention_logit']) == finished.model.num_layers
  assert metrics[-1]['train_loss'] < metrics[0]['train_loss']


def test_a_run_leaves_all_its_files(finished: Config):
  settings = json.loads((finished.out_dir / 'config.json').read_text())
  assert settings['config']['steps'] == 6
  assert {'jax', 'flax', 'optax', 'python'} <= set(settings['versions'])
  assert len(settings['devices']) == jax.device_count()
  assert (Path(settings['data']['folders'][0]) / 'val.bin').is_file()
  picture = image.imread(finished.out_dir / 'curves.png')
  assert picture[..., :3].std() > 0.05
  weights = safetensors.numpy.load_file(
    finished.out_dir / 'weights.safetensors'
  )
  assert weights['blocks.mlp.up.kernel'].shape == (2, 16, 64)
  assert sum(w.size for w in weights.values()) == settings['parameters']
  assert '[continuation]' in (finished.out_dir / 'sample.txt').read_text()


def test_a_full_disk_at_the_end_leaves_a_run_to_read(tiny, monkeypatch):
  full = OSError(errno.ENOSPC, 'No space left on device')
  with monkeypatch.context() as patch:
    patch.setattr(model_files, 'write_arrays', mock.Mock(side_effect=full))
    with pytest.raises(SystemExit, match='2'):
      main(as_flags(tiny))
  load_model(tiny.out_dir)  # Its last checkpoint.


def test_saved_weights_give_the_reported_loss(finished: Config):
  evaluation = evaluate(finished.out_dir, sequences=finished.eval_sequences)
  reported = RunFolder(finished.out_dir).read_metrics()[-1]['val_loss']
  assert evaluation.loss == pytest.approx(reported, abs=1e-5)


@pytest.mark.parametrize(
  ('mistake', 'message'),
  [
    ('--data=x --out-dir=x', '--out-dir x is the folder of --data'),
    ('--data=x:1 --out-dir=y/../x', 'is the folder of --data'),
    ('--data=/no/such/path', 'does not exist'),
    ('--steps=0', '--steps must be at least 1'),
    ('--steps=7', 'steps: 6 -> 7'),  # Its cosine would be another one.
    ('--mesh=fsdp=3', '--mesh'),
    ('--mesh=tensor=8', 'tensor = 8'),
    ('--num-heads=2 --width=20 --mesh=fsdp=8', 'fsdp = 8'),
    ('--out-dir=s3://bucket/run', '--out-dir must be on a disk or in gs'),
    ('--batch-size=12', '--batch-size 12'),
    ('--context-length=100000', 'too few'),
    ('--out-dir=/dev/null/x', '--out-dir'),
    ('--tensorboard --out-dir=gs://b/run', '--tensorboard needs --out-dir on'),
  ],
)
def test_mistakes_are_told_before_compiling(
  finished, monkeypatch, capsys, mistake: str, message: str
):
  monkeypatch.setattr(Trainer, '_init', lambda _: pytest.fail('compiled'))
  with pytest.raises(SystemExit) as stop:
    flags = as_flags(finished)[2 if '--data' in mistake else 0 :]
    main([*flags, *mistake.split()])
  assert stop.value.code == 2
  assert message in capsys.readouterr().err


def test_what_wandb_refuses_is_told_before_compiling(tiny, monkeypatch, capsys):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setattr(loop, '_compile', lambda *_: pytest.fail('compiled'))
  with pytest.raises(SystemExit, match='2'):
    main([*as_flags(tiny), '--wandb=a/b'])
  assert '--wandb a/b: ' in capsys.readouterr().err


def test_a_preset_needs_data(capsys):
  with pytest.raises(SystemExit, match='2'):
    main(['small'])
  assert 'small needs --data' in capsys.readouterr().err


def test_a_source_that_is_named_twice_is_refused(finished: Config, tmp_path):
  tokens = next(finished.cache_dir.rglob('train.bin')).parent
  (tmp_path / 'link').symlink_to(tokens)
  data = str(tokens), str(tmp_path / 'link')
  config = change(finished, data=data, out_dir=tmp_path / 'run')
  with pytest.raises(UsageError, match='names a source twice'):
    train(config)


def test_a_run_is_made_again_from_its_settings(
  finished, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(loop, '_TRACED', (2, 4))
  settings, again = finished.out_dir / 'config.json', tmp_path / 'again'
  main(['--config', str(settings), '--out-dir', str(again), '--profile'])
  assert_same_run(again, finished.out_dir)
  assert list((again / 'profile').rglob('*.xplane.pb'))
  (loss,) = re.findall(
    r'^step 0: validation loss (\S+)$', capsys.readouterr().out, re.MULTILINE
  )
  # The first weights give all tokens about the same probability.
  assert float(loss) == pytest.approx(math.log(288), rel=0.05)
