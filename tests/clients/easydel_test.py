"""EasyDeL trains with our optimizers, by the recipe of the documentation."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('easydel', reason='make test-clients installs it')

import datasets
import easydel as ed
from flax import nnx

_STEPS = 24


@pytest.fixture(scope='module')
def model():
  config = ed.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
  )  # fmt: skip
  return ed.LlamaForCausalLM(
    config=config,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs=nnx.Rngs(0),
  )


@pytest.fixture
def arguments(load_recipe, tmp_path):
  load_recipe('easydel_merit')

  def make(name):
    return ed.TrainingArguments(
      optimizer='merit_optax',
      extra_optimizer_kwargs={'name': name, 'decay': 0.01},
      learning_rate=0.05,
      learning_rate_end=0.0,
      scheduler='cosine',
      warmup_steps=_STEPS // 10,
      weight_decay=0.0,
      clip_grad=1.0,
      total_batch_size=8,
      max_length=32,
      max_training_steps=_STEPS,
      save_directory=str(tmp_path),
      do_last_save=False,
      use_wandb=False,
      log_steps=1,
      report_steps=1,
    )

  return make


def test_each_optimizer(arguments, assert_like_our_loop, model, name):
  optimizer, rate = arguments(name).get_optimizer_and_scheduler(_STEPS)
  assert_like_our_loop(
    optimizer,
    name,
    nnx.state(model, nnx.Param),
    {'(proj|lm_head)/kernel': 'rc', 'embedding': 'rc', 'norm/kernel': 'c'},
    learning_rate=rate,
    weight_decay=0.01,
    others='embed|lm_head',
  )


def test_training(arguments, model, capfd):
  tokens = (np.arange(8 * _STEPS * 32) % 8).reshape(-1, 32).tolist()
  dataset = datasets.Dataset.from_dict(
    {
      'input_ids': tokens,
      'attention_mask': np.ones_like(tokens).tolist(),
      'labels': tokens,
    }
  )
  ed.Trainer(
    arguments=arguments('merit_hidden'), model=model, dataset_train=dataset
  ).train()
  output = capfd.readouterr().err
  losses = [float(x) for x in re.findall(r', loss=([\d.]+)', output)]
  assert losses[-1] < losses[0] - 0.5, losses
