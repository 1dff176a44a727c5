import dataclasses
import itertools
import math
from pathlib import Path
import re
import typing

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2 import config as config_module
from examples.gpt2.config import Config, RunConfig, UsageError, digest, flag
from examples.gpt2.presets import OPTIMIZERS, PRESETS, identity, resolve

_COUNTS = (
  'num_layers', 'num_heads', 'num_kv_heads', 'head_width', 'width',
  'mlp_width', 'context_length', 'batch_size', 'micro_batch_size', 'steps',
  'eval_every', 'eval_sequences', 'checkpoint_every', 'max_to_keep',
  'keep_period', 'unroll', 'qk_clip_every', 'init_step', 'fork_step',
  'hf_every',
)  # fmt: skip
_NOT_NEGATIVE = (
  'diagnostics_every', 'weight_decay', 'min_norm', 'warmup_steps',
  'decay_steps',
)  # fmt: skip
_POSITIVE = (
  'learning_rate', 'max_gradient_norm', 'norm_epsilon', 'qk_clip', 'init_std',
  'adam_rate', 'checkpoint_minutes', 'rope_theta',
)  # fmt: skip


@pytest.mark.parametrize(
  ('names', 'values', 'accepted'),
  [
    (_COUNTS, (0, -4), 'at least 1'),
    (_NOT_NEGATIVE, (-1, math.nan, math.inf), 'finite and at least 0'),
    (_POSITIVE, (0.0, math.nan, math.inf), 'finite and above 0'),
    (('b1', 'b2'), (-0.5, 1.0), '[0, 1)'),
    (('clip_threshold',), (0.0, math.nan), 'above 0'),
    (('warmup_share', 'min_rate'), (-0.1, 1.5), '[0, 1]'),
    (('seed',), (-1, 2**32), '[0, 2**32)'),
    (('vocab_size',), (256, 2**31), '[257, 2**31)'),
    (('rope_scaling',), ((8.0, 4.0, 1.0, 8192.0),), 'second below the third'),
    (('ratios',), ((),), "'weight', 'row' and 'column'"),
  ],
)
def test_a_setting_out_of_its_range_is_named(names, values, accepted):
  for name, value in itertools.product(names, values):
    message = re.escape(accepted) + '.* got ' + re.escape(str(value))
    with pytest.raises(UsageError, match=f'{flag(name)} must be .*{message}'):
      resolve(Config(**{name: value}))


_LLAMA = {'architecture': 'llama'}
_PROCESS = {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 1}


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'reduce_dtype': 'bfloat16'}, '--reduce-dtype .*--dtype bfloat16'),
    ({'num_heads': 3}, '--num-heads 3 .*--width 128'),
    (_LLAMA | {'width': 12}, 'even .*--width 12, --num-heads 4'),
    (_LLAMA | {'num_kv_heads': 3}, '--num-kv-heads 3 must .*--num-heads 4'),
    ({'num_kv_heads': 2}, '--num-kv-heads .*--architecture llama, got 2'),
    ({'head_width': 64}, '--head-width .*--architecture llama, got 64'),
    ({'rope_theta': 5e5}, '--rope-theta .*--architecture llama, got 500000'),
    ({'rope_scaling': (8.0, 1.0, 4.0, 64.0)}, '--rope-scaling .* llama, .*64'),
    ({'optimizer': 'adamw', 'ratios': ('row',)}, '--ratios .*merit, .* adamw'),
    ({'optimizer': 'lion', 'qkv': 'split'}, '--qkv .*merit or muon .* lion'),
    ({'adam_rate': 2.0}, '--adam-rate .*--optimizer muon .*merit'),
    ({'ns_dtype': 'bfloat16'}, '--ns-dtype .*muon or muon-hyperball, .* merit'),
    ({'qk_norm': True, 'hf_every': 2}, '--hf-every .*--qk-norm'),
    ({'decay_steps': 2}, '--decay-steps .*--schedule wsd, got --schedule'),
    (
      {'schedule': 'wsd', 'steps': 9, 'warmup_steps': 6, 'decay_steps': 4},
      '--warmup-steps .*--steps 9, got 10',
    ),
    (
      {'fork_from': Path('run'), 'fork_step': 9, 'steps': 9},
      '--fork-step must be below --steps 9, got 9',
    ),
    (
      {'optimizer': 'muon-hyperball', 'decay': 'hidden'},
      '--decay hidden leaves nothing to decay',
    ),
    ({'qk_clip_every': 2}, '--qk-clip-every needs --qk-clip'),
    ({'qk_clip': 9.0, 'qk_norm': True}, '--qk-clip .*--qk-norm'),
    ({'coordinator': 'a:1'}, '--coordinator, .*together'),
    ({'num_processes': 2}, '--num-processes .*together'),
    (_PROCESS | {'process_id': 2}, r'--process-id .*\[0, 2\).* got 2'),
  ],
)
def test_settings_that_do_not_fit_each_other_are_named(settings, message):
  with pytest.raises(UsageError, match=message):
    resolve(Config(**settings))


def test_each_choice_has_its_defaults():
  assert set(PRESETS) == set(typing.get_args(config_module.Preset))
  optimizers = set(typing.get_args(config_module.Optimizer))
  assert set(OPTIMIZERS) == optimizers - {'muon-kept'}


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
def test_runs_from_before_attention_had_settings_are_the_same(architecture):
  found = identity(resolve(Config(architecture=architecture)))
  names = {'num_kv_heads', 'head_width', 'rope_theta', 'rope_scaling'}
  assert not names & found.keys()
  said = Config(
    architecture=architecture, num_kv_heads=4, head_width=32, rope_theta=1e4
  )
  assert identity(resolve(said)) == found
  other = Config(architecture='llama', num_kv_heads=2, rope_theta=5e5)
  new = {'num_kv_heads', 'rope_theta'}
  assert names & identity(resolve(other)).keys() == new


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_settings_not_given_come_from_preset_and_optimizer(preset, optimizer):
  config = resolve(Config(preset=preset, optimizer=optimizer))
  for name in RunConfig.__annotations__:
    assert getattr(config, name) is not None, name
  # It depends on the devices.
  assert config.micro_batch_size is None
  of_preset = PRESETS[preset] | OPTIMIZERS[optimizer]
  del of_preset['micro_batch_size']
  assert of_preset.items() <= vars(config).items()


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    ({'preset': 'llama-3-8b', 'num_heads': 16},
     {'num_kv_heads': 16, 'head_width': 256}),
    ({'preset': 'llama-3-8b', 'width': 2048},
     {'num_kv_heads': 8, 'head_width': 64}),
    # Small models and kept norms start larger.
    ({}, {'init_std': 0.049}),
    ({'preset': 'small'}, {'init_std': None}),
    ({'preset': 'small', 'optimizer': 'muon-hyperball'}, {'init_std': 0.04}),
    ({'width': 768, 'init_std': 0.5}, {'init_std': 0.5}),
    ({}, {'mlp_width': 512}),
    ({'mlp_width': 100}, {'mlp_width': 100}),
    ({'width': 64}, {'mlp_width': 256}),
    ({'preset': 'llama-7b'}, {'mlp_width': 11008}),
    # Of 8/3, rounded up to a multiple of 16.
    ({'preset': 'llama-7b', 'width': 768}, {'mlp_width': 2048}),
    ({'preset': 'llama-130m', 'width': 1024, 'num_heads': 16},
     {'mlp_width': 2736}),
    ({'architecture': 'llama'}, {'mlp_width': 352}),
    ({'preset': 'llama-130m', 'architecture': 'gpt2'}, {'mlp_width': 3072}),
    # Of the number of steps, as the study found them.
    ({}, {'learning_rate': 0.02}),
    ({'steps': 1}, {'learning_rate': 0.033}),
    ({'optimizer': 'lamb'}, {'learning_rate': 0.022}),
    ({'optimizer': 'muon'}, {'learning_rate': 0.025}),
    ({'optimizer': 'muon-hyperball'}, {'learning_rate': 0.062}),
    ({'optimizer': 'lion'}, {'learning_rate': 1e-3}),
    ({'steps': 9999, 'learning_rate': 0.5}, {'learning_rate': 0.5}),
    ({'preset': 'small'}, {'learning_rate': 0.0082}),
    ({'optimizer': 'adamw', 'width': 64}, {'learning_rate': 0.016}),
    ({'optimizer': 'adamw', 'width': 128}, {'learning_rate': 0.0078}),
  ],
)  # fmt: skip
def test_defaults_follow_what_is_given(settings: dict, expected: dict):
  assert expected.items() <= vars(resolve(Config(**settings))).items()


@pytest.mark.parametrize('preset', PRESETS)
def test_a_setting_that_is_the_presets_changes_nothing(preset):
  expected = resolve(Config(preset=preset))
  for name, value in PRESETS[preset].items():
    if name != 'micro_batch_size':  # By default that of the devices.
      assert resolve(Config(preset=preset, **{name: value})) == expected, name


@hypothesis.given(
  preset=st.sampled_from(sorted(PRESETS)),
  architecture=st.sampled_from([None, 'gpt2', 'llama']),
  batch_size=st.none() | st.integers(1, 10_000),
  num_heads=st.integers(1, 16),
  head_width=st.integers(1, 32).map(lambda n: 2 * n),
  steps=st.none() | st.integers(1, 10**6),
  b1=st.none() | st.floats(0, 0.999),
  warmup_share=st.sampled_from([0.0, 0.1, 1.0]),
  clip_threshold=st.sampled_from([1.0, math.inf]),
  diagnostics_every=st.sampled_from([None, 0, 9]),
  processes=st.sampled_from([{}, _PROCESS]),
)
def test_what_is_given_stays_and_the_rest_fits(head_width, processes, **given):
  given |= processes | {'width': given['num_heads'] * head_width}
  config = resolve(Config(**given))
  kept = {k: v for k, v in given.items() if v is not None}
  assert kept.items() <= vars(config).items()
  assert resolve(config) == config


_DECIDES = dict(
  seed=1, steps=7, dtype='bfloat16', optimizer='lamb', learning_rate=0.1,
  decay='matrices', ratios=('row',), qk_norm=True, architecture='llama',
  warmup_share=0.0, vocab_size=300, eval_every=7,
)  # fmt: skip
_DECIDES_NOT = dict(
  cache_dir='/elsewhere', out_dir='/elsewhere', from_scratch=True,
  mesh='fsdp=2', micro_batch_size=16, remat='full', unroll=1,
  diagnostics_every=3, checkpoint_every=3, tensorboard=True, wandb='project',
)  # fmt: skip


@pytest.mark.parametrize(
  ('base', 'name', 'value'),
  [
    *(({}, name, value) for name, value in _DECIDES.items()),
    ({'dtype': 'bfloat16'}, 'reduce_dtype', 'bfloat16'),
    ({'optimizer': 'muon'}, 'ns_dtype', 'float32'),
    ({'optimizer': 'muon'}, 'ns_dtype', 'bfloat16'),
  ],
)
def test_identity_holds_what_decides_the_numbers(base, name: str, value):
  changed = resolve(Config(**base, **{name: value}))
  assert identity(changed) != identity(resolve(Config(**base)))


@pytest.mark.parametrize(('name', 'value'), _DECIDES_NOT.items())
def test_identity_leaves_out_what_does_not(name: str, value):
  one = resolve(Config())
  other = dataclasses.replace(one, **{name: value})
  assert getattr(one, name) != value
  assert identity(resolve(other)) == identity(one)


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
