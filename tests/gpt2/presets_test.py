import dataclasses
import math
import typing

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2 import config as config_module
from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.presets import OPTIMIZERS, PRESETS, identity, resolve

_OPTIONAL = {
  'out_dir', 'init_from', 'coordinator', 'num_processes', 'process_id',
  'micro_batch_size', 'norm_epsilon', 'qk_clip', 'qk_clip_every', 'init_std',
  'adam_rate', 'ns_dtype', 'unroll', 'sampling', 'wandb', 'rope_scaling',
  'warmup_steps', 'decay_steps', 'init_step', 'fork_from', 'fork_step',
  'hf_every', 'keep_period', 'checkpoint_minutes',
}  # fmt: skip


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'steps': 0}, ['--steps', 'at least 1', '0']),
    ({'batch_size': -4}, ['--batch-size', 'at least 1', '-4']),
    ({'batch_size': 0}, ['--batch-size', 'at least 1', '0']),
    ({'unroll': 0}, ['--unroll', 'at least 1', '0']),
    ({'max_to_keep': 0}, ['--max-to-keep', 'at least 1', '0']),
    ({'checkpoint_every': 0}, ['--checkpoint-every', 'at least 1', '0']),
    ({'diagnostics_every': -1}, ['--diagnostics-every', 'at least 0', '-1']),
    ({'width': 0}, ['--width', 'at least 1', '0']),
    ({'width': -4, 'optimizer': 'adamw'}, ['--width', 'at least 1', '-4']),
    ({'steps': -1}, ['--steps', 'at least 1', '-1']),
    ({'learning_rate': 0.0}, ['--learning-rate', 'finite and above 0', '0.0']),
    ({'learning_rate': math.nan}, ['--learning-rate', 'nan']),
    ({'learning_rate': math.inf}, ['--learning-rate', 'inf']),
    ({'max_gradient_norm': math.inf}, ['--max-gradient-norm', 'inf']),
    ({'weight_decay': -0.1}, ['--weight-decay', 'at least 0', '-0.1']),
    ({'weight_decay': math.nan}, ['--weight-decay', 'nan']),
    ({'b1': 1.0}, ['--b1', '[0, 1)', '1.0']),
    ({'b2': -0.5}, ['--b2', '[0, 1)', '-0.5']),
    ({'clip_threshold': 0.0}, ['--clip-threshold', 'above 0', '0.0']),
    ({'clip_threshold': math.nan}, ['--clip-threshold', 'nan']),
    ({'min_norm': -1.0}, ['--min-norm', 'at least 0']),
    ({'warmup_share': 1.5}, ['--warmup-share', '[0, 1]', '1.5']),
    ({'ratios': ()}, ['--ratios', 'weight', 'row', 'column']),
    ({'seed': -1}, ['--seed', '-1']),
    ({'seed': 2**32}, ['--seed', '2**32', '4294967296']),
    ({'vocab_size': 100}, ['--vocab-size', '257', '100']),
    ({'vocab_size': 256}, ['--vocab-size', '257', '256']),
    ({'micro_batch_size': 0}, ['--micro-batch-size', 'at least 1', '0']),
    ({'reduce_dtype': 'bfloat16'}, ['--reduce-dtype', '--dtype bfloat16']),
    ({'num_heads': 3}, ['--num-heads', '--width', '3', '128']),
    (
      {'architecture': 'llama', 'width': 12, 'num_heads': 4},
      ['--width', 'even', '--num-heads', '12', '4'],
    ),
    ({'num_kv_heads': 0}, ['--num-kv-heads', 'at least 1', '0']),
    (
      {'architecture': 'llama', 'num_kv_heads': 3},
      ['--num-kv-heads 3 must divide --num-heads 4'],
    ),
    ({'num_kv_heads': 2}, ['--num-kv-heads', '--architecture llama', '2']),
    ({'head_width': 64}, ['--head-width', '--architecture llama', '64']),
    ({'rope_theta': 5e5}, ['--rope-theta', '--architecture llama', '500000']),
    ({'architecture': 'llama', 'rope_theta': 0.0}, ['--rope-theta', 'above 0']),
    (
      {'rope_scaling': (8.0, 1.0, 4.0, 8192.0)},
      ['--rope-scaling', '--architecture llama', '8192'],
    ),
    (
      {'architecture': 'llama', 'rope_scaling': (8.0, 4.0, 1.0, 8192.0)},
      ['--rope-scaling', 'second below the third', '4.0, 1.0'],
    ),
    (
      {'optimizer': 'adamw', 'ratios': ('row',)},
      ['--ratios', '--optimizer merit', '--optimizer adamw'],
    ),
    (
      {'optimizer': 'lion', 'qkv': 'split'},
      ['--qkv', 'merit or muon', '--optimizer lion'],
    ),
    ({'qk_clip': 0.0}, ['--qk-clip', 'above 0', '0.0']),
    ({'adam_rate': 2.0}, ['--adam-rate', '--optimizer muon', 'merit']),
    (
      {'optimizer': 'merit', 'ns_dtype': 'bfloat16'},
      ['--ns-dtype', 'muon or muon-hyperball', '--optimizer merit'],
    ),
    (
      {'optimizer': 'adamw', 'ns_dtype': 'float32'},
      ['--ns-dtype', 'muon or muon-hyperball', '--optimizer adamw'],
    ),
    ({'init_std': 0.0}, ['--init-std', 'above 0', '0.0']),
    ({'qk_clip': math.nan}, ['--qk-clip', 'above 0', 'nan']),
    ({'qk_clip': 9.0, 'qk_clip_every': 0}, ['--qk-clip-every', 'at least 1']),
    ({'qk_clip_every': 2}, ['--qk-clip-every needs --qk-clip']),
    ({'qk_clip': 9.0, 'qk_norm': True}, ['--qk-clip', '--qk-norm']),
    ({'coordinator': 'a:1'}, ['--coordinator', 'together']),
    ({'num_processes': 2}, ['--num-processes', 'together']),
    (
      {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 2},
      ['--process-id', '[0, 2)', '2'],
    ),
  ],
)
def test_a_wrong_setting_is_named(settings: dict, words: list[str]):
  with pytest.raises(UsageError) as error:
    resolve(Config(**settings))
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  'settings',
  [
    {'clip_threshold': math.inf},
    {'diagnostics_every': 0},
    {'warmup_share': 0.0},
    {'warmup_share': 1.0},
    {'weight_decay': 0.0},
    {'optimizer': 'muon', 'qkv': 'heads'},
    {'architecture': 'gpt2', 'width': 12, 'num_heads': 4},
    {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 1},
  ],
)
def test_a_setting_at_its_bound_is_taken(settings: dict):
  config = resolve(Config(**settings))
  assert settings.items() <= vars(config).items()


def test_each_choice_has_its_defaults():
  assert set(PRESETS) == set(typing.get_args(config_module.Preset))
  optimizers = set(typing.get_args(config_module.Optimizer))
  assert set(OPTIMIZERS) == optimizers - {'muon-kept'}


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
def test_runs_from_before_attention_had_settings_are_the_same(
  architecture: str,
):
  found = identity(resolve(Config(architecture=architecture)))
  names = {'num_kv_heads', 'head_width', 'rope_theta', 'rope_scaling'}
  assert not names & found.keys()
  said = Config(
    architecture=architecture, num_kv_heads=4, head_width=32, rope_theta=1e4
  )
  assert identity(resolve(said)) == found
  other = Config(architecture='llama', num_kv_heads=2, rope_theta=5e5)
  assert names & identity(resolve(other)).keys() == {
    'num_kv_heads',
    'rope_theta',
  }


def test_other_heads_than_the_presets_have_keys_of_their_own():
  config = resolve(Config(preset='llama-3-8b', num_heads=16))
  assert (config.num_kv_heads, config.head_width) == (16, 256)
  config = resolve(Config(preset='llama-3-8b', width=2048))
  assert (config.num_heads, config.num_kv_heads, config.head_width) == (
    32,
    8,
    64,
  )


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_settings_not_given_come_from_preset_and_optimizer(
  preset: str, optimizer: str
):
  config = resolve(Config(preset=preset, optimizer=optimizer))
  missing = {k for k, v in vars(config).items() if v is None}
  own = {'adam_rate'} if optimizer == 'muon-hyperball' else set()
  if preset in ('llama-3-8b', 'tinyllama-1.1b', 'smollm2-135m'):
    own.add('norm_epsilon')
  if preset == 'demo' or optimizer == 'muon-hyperball':
    own.add('init_std')
  assert missing == _OPTIONAL - own
  of_preset = {k: v for k, v in PRESETS[preset].items() if k not in missing}
  assert of_preset.items() <= vars(config).items()
  assert OPTIMIZERS[optimizer].items() <= vars(config).items()


@hypothesis.given(
  preset=st.sampled_from(sorted(PRESETS)),
  architecture=st.sampled_from([None, 'gpt2', 'llama']),
  batch_size=st.none() | st.integers(1, 10_000),
  num_heads=st.integers(1, 16),
  head_width=st.integers(1, 32).map(lambda n: 2 * n),
  steps=st.none() | st.integers(1, 10**6),
  b1=st.none() | st.floats(0, 0.999),
)
def test_what_is_given_stays_and_the_rest_fits(head_width: int, **given):
  given['width'] = given['num_heads'] * head_width
  config = resolve(Config(**given))
  kept = {k: v for k, v in given.items() if v is not None}
  assert kept.items() <= vars(config).items()
  assert resolve(config) == config


@pytest.mark.parametrize(
  ('settings', 'width'),
  [
    ({}, 512),
    ({'mlp_width': 100}, 100),
    ({'width': 64}, 256),
    ({'preset': 'llama-7b'}, 11008),
    # Of 8/3, rounded up to a multiple of 16.
    ({'preset': 'llama-7b', 'width': 768, 'num_heads': 12}, 2048),
    ({'preset': 'llama-130m', 'width': 1024, 'num_heads': 16}, 2736),
    ({'architecture': 'llama'}, 352),
    ({'preset': 'llama-130m', 'architecture': 'gpt2'}, 3072),
  ],
)
def test_the_mlp_follows_the_width(settings: dict, width: int):
  assert resolve(Config(**settings)).mlp_width == width


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('seed', 1),
    ('steps', 7),
    ('dtype', 'bfloat16'),
    ('optimizer', 'lamb'),
    ('optimizer', 'muon-hyperball'),
    ('learning_rate', 0.1),
    ('decay', 'matrices'),
    ('ratios', ('row',)),
    ('qk_norm', True),
    ('architecture', 'llama'),
    ('warmup_share', 0.0),
    ('vocab_size', 300),
    ('eval_every', 7),
  ],
)
def test_identity_holds_what_decides_the_numbers(name: str, value):
  assert identity(resolve(Config(**{name: value}))) != identity(
    resolve(Config())
  )


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('cache_dir', '/elsewhere'),
    ('out_dir', '/elsewhere'),
    ('from_scratch', True),
    ('mesh', 'fsdp=2'),
    ('micro_batch_size', 16),
    ('remat', 'full'),
    ('unroll', 1),
    ('diagnostics_every', 3),
    ('checkpoint_every', 3),
    ('tensorboard', True),
    ('wandb', 'project'),
  ],
)
def test_identity_leaves_out_what_does_not(name: str, value):
  one = resolve(Config())
  other = dataclasses.replace(one, **{name: value})
  assert getattr(one, name) != value
  assert identity(resolve(other)) == identity(one)


def test_the_dtype_of_sums_counts_where_it_decides_the_numbers():
  assert 'reduce_dtype' not in identity(resolve(Config()))
  found = [
    identity(resolve(Config(dtype='bfloat16', reduce_dtype=x)))
    for x in ('float32', 'bfloat16')
  ]
  assert found[0] != found[1]


def test_the_former_name_of_an_optimizer_is_accepted():
  former, config = (
    resolve(Config(optimizer=name)) for name in ('muon-kept', 'muon-hyperball')
  )
  assert former.optimizer == 'muon-hyperball'
  assert former == config == resolve(config)


# Hashes, as in names of folders, from before there was --ns-dtype, when
# muon-hyperball was muon-kept. Other defaults make other ones.
@pytest.mark.parametrize(
  ('optimizer', 'dtype', 'before'),
  [
    ('muon-hyperball', 'float32', '97198aa5'),
    ('muon-hyperball', 'bfloat16', 'cbeffa6b'),
    ('muon', 'float32', '9d75f3de'),
    ('muon', 'bfloat16', '022783d5'),
  ],
)
def test_runs_from_before_can_resume(optimizer: str, dtype: str, before: str):
  found = identity(resolve(Config(optimizer=optimizer, dtype=dtype)))
  assert digest(found)[:8] == before


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_dtype_of_products_is_part_of_the_identity(dtype: str):
  one, other = (
    identity(resolve(Config(optimizer='muon', ns_dtype=x)))
    for x in (None, dtype)
  )
  assert 'ns_dtype' not in one
  assert other == one | {'ns_dtype': dtype}


# Best learning rates of the study, at scale nano, by the number of steps: of
# five batches with the same tokens, and of half and twice the tokens.
@pytest.mark.parametrize(
  ('optimizer', 'best'),
  [
    ('merit', [(153, 0.028), (305, 0.028), (305, 0.0198), (610, 0.014),
               (1221, 0.0099), (1220, 0.014), (2441, 0.007)]),
    ('muon-hyperball', [(153, 0.12), (305, 0.0849), (305, 0.0849), (610, 0.06),
                   (1221, 0.03), (1220, 0.03), (2441, 0.0212)]),
    ('muon', [(153, 0.028), (305, 0.028), (610, 0.028), (1221, 0.014),
              (2441, 0.0099)]),
    ('lamb', [(153, 0.028), (305, 0.028), (610, 0.0198), (1221, 0.0099),
              (1220, 0.014), (2441, 0.0099)]),
  ],
)  # fmt: skip
def test_the_learning_rate_follows_the_steps(
  optimizer: str, best: list[tuple[int, float]]
):
  for steps, rate in best:
    found = resolve(Config(optimizer=optimizer, steps=steps)).learning_rate
    assert rate / 1.5 < found < rate * 1.5


@pytest.mark.parametrize(('width', 'best'), [(64, 0.0156), (128, 0.0078)])
def test_the_learning_rate_of_adamw_follows_the_width(width: int, best: float):
  found = resolve(Config(optimizer='adamw', width=width)).learning_rate
  assert found == pytest.approx(best, rel=0.05)


def test_a_learning_rate_that_is_given_is_taken():
  assert resolve(Config()).learning_rate == 0.02
  assert resolve(Config(steps=1)).learning_rate == 0.033
  assert resolve(Config(steps=9999, learning_rate=0.5)).learning_rate == 0.5
  assert resolve(Config(preset='small')).learning_rate == 0.0082
