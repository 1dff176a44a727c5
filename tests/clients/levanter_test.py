"""Levanter trains with our optimizers, by the recipe of the documentation."""

import re

import jax
import numpy as np
import pytest
import yaml

pytest.importorskip('levanter', reason='make test-clients installs it')

import haliax as hax
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.mixtral import MixtralConfig
from levanter.store.cache import SerialCacheWriter
from levanter.trainer_state import trainables_only
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_STEPS = 30
_SIZES = dict(
  max_seq_len=16, hidden_dim=16, num_layers=2, num_heads=4,
  gradient_checkpointing=False,
)  # fmt: skip


@pytest.fixture(scope='module')
def recipe(load_recipe):
  return load_recipe('levanter_merit')


def test_training_on_a_mesh(collectives, run_recipe, tmp_path):
  words = Tokenizer(models.WordLevel({str(i): i for i in range(8)}, '0'))
  words.pre_tokenizer = pre_tokenizers.Whitespace()
  PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
  tokens = {'input_ids': np.arange(64, dtype=np.int32) % 8}
  for split in ('train', 'validation'):
    with SerialCacheWriter(str(tmp_path / 'cache' / split), tokens) as writer:
      writer.write_batch([tokens] * 64)
  config = {
    'data': {
      'tokenizer': str(tmp_path),
      'components': {'tiny': {'cache_dir': str(tmp_path / 'cache')}},
    },
    'model': {
      'type': 'gpt2',
      'tokenizer': str(tmp_path),
      'initializer_range': 0.2,
      **_SIZES,
    },
    'trainer': {
      'tracker': {'type': 'json_logger'},
      'train_batch_size': 8,
      'require_accelerator': False,
      'mesh': {'axes': {'data': 2, 'model': 2}},
    },
  }

  def train(optimizer, steps):
    config['optimizer'] = optimizer
    config['trainer']['num_train_steps'] = steps
    (tmp_path / 'config.yaml').write_text(yaml.safe_dump(config))
    folder = tmp_path / optimizer['type']
    output = run_recipe(
      'levanter_merit.py', '--config_path', 'config.yaml',
      cwd=tmp_path,
      XLA_FLAGS='--xla_force_host_platform_device_count=4 '
      f'--xla_dump_to={folder} --xla_dump_hlo_as_text '
      '--xla_dump_hlo_module_re=jit__train_step',
    )  # fmt: skip
    return output, collectives(folder)

  output, sent = train(
    {'type': 'merit_optax', 'name': 'muon', 'learning_rate': 0.05}, _STEPS
  )
  losses = [float(x) for x in re.findall(r'"train/loss": ([\d.]+)', output)]
  assert len(losses) >= _STEPS
  assert losses[-1] < losses[0] - 0.5, losses
  _, by_adam = train({'type': 'adam'}, 2)
  # Matrices of three groups move along two axes until whole, and back.
  assert sent - by_adam == {'all-to-all': 3 * 2 * 2}
  assert not by_adam - sent


_ATTENTION = {
  'q_proj': 'bcccr',
  'k_proj|v_proj': 'bccr',
  'o_proj': 'bcrr',
  r'transformer/norm/': 'c',
  'layernorm': 'bc',
  '(token_embeddings|lm_head)': 'rc',
}


_LLAMA = LlamaConfig(num_kv_heads=2, intermediate_dim=24, **_SIZES)
_LLAMA_LAYOUTS = {'mlp': 'brc', **_ATTENTION}


@pytest.fixture
def assert_steps(recipe, assert_like_our_loop):
  def check(name, config, layouts):
    model = config.build(hax.Axis('vocab', 8), key=jax.random.key(0))
    # From the step after the warm-up, the rate decays from its peak.
    made = recipe.MeritOptaxConfig(
      name=name, warmup=0.0, lr_schedule='constant'
    )
    with hax.axis_mapping({}):  # As the trainer does for its mesh.
      assert_like_our_loop(
        made.build(_STEPS),
        name,
        trainables_only(model, True),
        layouts,
        learning_rate=0.02,
        weight_decay=0.01,
        others='embeddings|lm_head|moe/gate',
        # Levanter's mask leaves these out.
        undecayed='(ln_|norm|embeddings|/bias/)',
      )

  return check


def test_each_optimizer(assert_steps, name):
  assert_steps(name, _LLAMA, _LLAMA_LAYOUTS)


@pytest.mark.parametrize('name', ['merit', 'muon'])
@pytest.mark.parametrize(
  'config, layouts',
  [
    (
      Gpt2Config(**_SIZES),
      {
        r'ln_\d': 'bc',
        'ln_f': 'c',
        'attn/c_attn/weight': 'brccc',
        'attn/c_attn/bias': 'bccc',
        'attn/c_proj/weight': 'brrc',
        'mlp/.*/weight': 'brc',
        'c_(proj|fc)/bias': 'bc',
        'embeddings': 'rc',
      },
    ),
    (
      MixtralConfig(
        num_kv_heads=2, intermediate_dim=24, n_routed_experts=3, **_SIZES
      ),
      {'moe/gate': 'brc', 'experts/': 'bbrc', **_ATTENTION},
    ),
  ],
  ids=['gpt2', 'mixtral'],
)
def test_models(assert_steps, name, config, layouts):
  assert_steps(name, config, layouts)


def test_schedule(recipe):
  schedule = recipe.MeritOptaxConfig().lr_scheduler(100)
  rates = [float(schedule(x)) for x in (0, 5, 10, 55, 100)]
  np.testing.assert_allclose(rates, [0, 0.01, 0.02, 0.01, 0], atol=1e-8)
