"""MaxText trains with MERIT, by the recipe of the documentation."""

import re

import jax
import numpy as np
import pytest

pytest.importorskip('maxtext', reason='make test-clients installs it')

from flax import nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.globals import MAXTEXT_PKG_DIR

_STEPS = 20
_CONFIG = f'{MAXTEXT_PKG_DIR}/configs/base.yml'
_SETTINGS = """
  run_name=tiny hardware=cpu skip_jax_distributed_system=true
  enable_checkpointing=false enable_goodput_recording=false
  dataset_type=synthetic per_device_batch_size=4 max_target_length=16
  vocab_size=32 base_emb_dim=16 base_num_query_heads=4 base_num_kv_heads=2
  base_mlp_dim=32 base_num_decoder_layers=2 head_dim=8 attention=dot_product
  dtype=float32 opt_type=adam_pax learning_rate=0.02 adam_eps=1e-6
  adam_weight_decay=0.01 learning_rate_final_fraction=0
"""


@pytest.fixture(scope='module')
def recipe(load_recipe):
  return load_recipe('maxtext_merit.py')


def test_training(run_recipe, tmp_path):
  output = run_recipe(
    'maxtext_merit.py', _CONFIG, *_SETTINGS.split(), f'steps={_STEPS}',
    f'base_output_directory={tmp_path}', cwd=tmp_path,
  )  # fmt: skip
  losses = [
    float(x) for x in re.findall(r'step: \d+.*? loss: ([\d.]+)', output)
  ]
  assert len(losses) == _STEPS
  assert losses[-1] < losses[0] - 1, losses


_OUTSIDE = {'token_embedder': 'rc', 'logits_dense': 'rc', 'decoder_norm': 'c'}
_SCANNED = {
  'layers/.*norm': 'cb',
  'attention/(query|key|value)/kernel': 'rbcc',
  'attention/out/kernel': 'rbrc',
}


@pytest.mark.parametrize(
  'settings, layouts',
  [
    ([], {'mlp/.*kernel': 'rbc', **_SCANNED}),
    (
      ['scan_layers=false'],
      {
        r'layers_\d/.*norm': 'c',
        'mlp/': 'rc',
        'attention/(query|key|value)/': 'rcc',
        'attention/out/': 'rrc',
      },
    ),
    (
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
      ['decoder_block=mixtral', 'num_experts=3', 'base_moe_mlp_dim=32'],
      {'gate': 'rbc', '(?i)moe.*/w[io]': 'bbrc', **_SCANNED},
    ),
  ],
  ids=['scanned', 'not scanned', 'biases', 'experts'],
)
@pytest.mark.usefixtures('recipe')
def test_updates(gradients_like, assert_merit, tmp_path, settings, layouts):
  config = pyconfig.initialize(
    [
      None,
      _CONFIG,
      *_SETTINGS.split(),
      *settings,
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
  gradients = gradients_like(params)
  optimizer = optimizers.get_optimizer(config, lambda _: 0.02, model)
  updates, _ = jax.jit(optimizer.update)(
    gradients, optimizer.init(params), params
  )
  assert_merit(
    updates, params, gradients, _OUTSIDE | layouts,
    learning_rate=0.02, weight_decay=0.01,
  )  # fmt: skip
