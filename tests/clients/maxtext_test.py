"""MaxText trains with our optimizers, by the recipe of the documentation."""

import re

import jax
import numpy as np
import pytest

pytest.importorskip('maxtext', reason='make test-clients installs it')

from flax import nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.utils import maxtext_utils, model_creation_utils

_STEPS = 20
_SETTINGS = """
  run_name=tiny hardware=cpu skip_jax_distributed_system=true
  enable_checkpointing=false enable_goodput_recording=false
  dataset_type=synthetic per_device_batch_size=4 max_target_length=16
  vocab_size=32 base_emb_dim=16 base_num_query_heads=4 base_num_kv_heads=2
  base_mlp_dim=32 base_num_decoder_layers=2 head_dim=8 attention=dot_product
  dtype=float32 adam_eps=1e-6 adam_weight_decay=0.01
"""


def test_training_on_a_mesh(collectives, run_recipe, tmp_path):
  def train(opt_type, steps):
    folder = tmp_path / opt_type
    output = run_recipe(
      'maxtext_merit.py', *_SETTINGS.split(), f'steps={steps}',
      f'opt_type={opt_type}', 'learning_rate=0.03',
      'learning_rate_final_fraction=0', 'ici_fsdp_parallelism=2',
      'ici_tensor_parallelism=2', f'base_output_directory={folder}',
      cwd=tmp_path,
      XLA_FLAGS='--xla_force_host_platform_device_count=4 '
      f'--xla_dump_to={folder} --xla_dump_hlo_as_text '
      '--xla_dump_hlo_module_re=jit_train_step',
    )  # fmt: skip
    return output, collectives(folder)

  output, sent = train('merit_optax.muon', _STEPS)
  losses = [
    float(x) for x in re.findall(r'step: \d+.*? loss: ([\d.]+)', output)
  ]
  assert len(losses) == _STEPS
  assert losses[-1] < losses[0] - 1, losses
  _, by_adam = train('adamw', 1)
  # Matrices of three groups move along two axes until whole, and back.
  assert sent - by_adam == {'all-to-all': 3 * 2 * 2}
  assert not by_adam - sent


_OUTSIDE = {'token_embedder': 'rc', 'logits_dense': 'rc', 'decoder_norm': 'c'}
_SCANNED = {
  'layers/.*norm': 'cb',
  'attention/(query|key|value)/kernel': 'rbcc',
  'attention/out/kernel': 'rbrc',
}


@pytest.fixture
def assert_steps(assert_like_our_loop, load_recipe, tmp_path):
  def check(name, layouts, *settings):
    load_recipe('maxtext_merit').use(name)
    config = pyconfig.initialize(
      [
        '',
        *_SETTINGS.split(),
        *settings,
        'opt_type=adam_pax',
        f'base_output_directory={tmp_path}',
      ]
    )
    mesh = jax.sharding.Mesh(
      maxtext_utils.create_device_mesh(config), config.mesh_axes
    )
    _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    _, shapes, _ = nnx.split(model, nnx.Param, ...)
    generator = np.random.default_rng(1)
    params = jax.tree.map(
      lambda x: generator.normal(size=x.shape).astype(np.float32), shapes
    )
    assert_like_our_loop(
      optimizers.get_optimizer(config, lambda _: 0.02, model),
      name,
      params,
      _OUTSIDE | layouts,
      learning_rate=0.02,
      weight_decay=0.01,
      others='token_embedder|logits_dense|gate',
    )

  return check


def test_each_optimizer(assert_steps, name):
  assert_steps(name, {'mlp/.*kernel': 'rbc', **_SCANNED})


@pytest.mark.parametrize(
  'name, settings, layouts',
  [
    (
      'merit',
      ['scan_layers=false'],
      {
        r'layers_\d/.*norm': 'c',
        'mlp/': 'rc',
        'attention/(query|key|value)/': 'rcc',
        'attention/out/': 'rrc',
      },
    ),
    (
      'merit',
      ['decoder_block=gpt3', 'attention_bias=true'],
      {
        r'mlp/w[io].*kernel': 'rbc',
        r'mlp/w[io].*bias': 'cb',
        'attention/(query|key|value)/bias': 'cbc',
        'attention/out/bias': 'cb',
        **_SCANNED,
      },
    ),
    (
      'merit_hidden',
      ['decoder_block=mixtral', 'num_experts=3', 'base_moe_mlp_dim=32'],
      {'gate': 'rbc', '(?i)moe.*/w[io]': 'bbrc', **_SCANNED},
    ),
    (
      'muon',
      [
        'decoder_block=deepseek',
        'attention_type=mla',
        'q_lora_rank=8',
        'kv_lora_rank=8',
        'qk_nope_head_dim=4',
        'qk_rope_head_dim=4',
        'v_head_dim=8',
        'num_experts=4',
        'num_experts_per_tok=2',
        'shared_experts=1',
        'base_moe_mlp_dim=16',
        'first_num_dense_layers=1',
        'base_num_decoder_layers=3',
        'base_num_kv_heads=4',
      ],
      {
        'layers/.*norm/scale': 'cb',
        'attention/w(q|kv)_a/kernel': 'rbc',
        'attention/w(q|kv)_b/kernel': 'rbcc',
        'attention/out/kernel': 'rbrc',
        'dense_layers/mlp/|shared_experts': 'rbc',
        'gate': 'rbc',
        '/MoeBlock_0/w[io]': 'bbrc',
      },
    ),
  ],
  ids=['not scanned', 'biases', 'experts', 'latent attention'],
)
def test_models(assert_steps, name, settings, layouts):
  assert_steps(name, layouts, *settings)
