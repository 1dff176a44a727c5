import dataclasses
import itertools
import math
from pathlib import Path
import re
import typing

import hypothesis
from hypothesis import strategies as st
import pytest
import tyro

from examples.gpt2 import config as config_module, presets
from examples.gpt2.config import Config, RunConfig, UsageError, digest, flag
from examples.gpt2.presets import OPTIMIZERS, PRESETS, identity, resolve

# By what is accepted, which the table of the ranges has.
_REFUSED = {
  'at least 1': (0, -4),
  'finite and at least 0': (-1, math.nan, math.inf),
  'finite and above 0': (0.0, math.nan, math.inf),
  'in [0, 1)': (-0.5, 1.0),
  'above 0': (0.0, math.nan),
  'in [0, 1]': (-0.1, 1.5),
  'in [0, 2**32)': (-1, 2**32),
  'in [257, 2**31)': (256, 2**31),
  'four numbers above 0, the second below the third': ((8.0, 4.0, 1.0, 9.0),),
  "out of 'weight', 'row' and 'column'": ((),),
}


@pytest.mark.parametrize(('names', 'accepted', '_'), presets._RANGES)
def test_a_setting_out_of_its_range_is_named(names, accepted, _):
  for name, value in itertools.product(names, _REFUSED[accepted]):
    message = re.escape(f'{flag(name)} must be {accepted}, got {value}.')
    with pytest.raises(UsageError, match=message):
      resolve(Config(**{name: value}))


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_readme_has_the_defaults(name: str):
  page = Path(presets.__file__).with_name('README.md').read_text()
  (row,) = re.findall(rf'^\| `{name}` \| (.*) \|$', page, re.MULTILINE)
  *_, decay, b1, b2 = row.split(' | ')
  values = OPTIMIZERS[name]
  assert [0.0 if decay == 'none' else float(decay), float(b1), float(b2)] == [
    values[x] for x in ('weight_decay', 'b1', 'b2')
  ]


def test_every_number_has_a_range():
  numbers = {
    name
    for name, hint in typing.get_type_hints(Config).items()
    if {int, float} & {hint, *typing.get_args(hint)}
  }
  ranged = {name for names, *_ in presets._RANGES for name in names}
  assert numbers - ranged == {'num_processes', 'process_id'}


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
    ({'out_dir': Path('')}, '--out-dir must name a folder, got nothing'),
    ({'qk_clip_every': 2}, '--qk-clip-every needs --qk-clip'),
    ({'qk_clip': 9.0, 'qk_norm': True}, '--qk-clip .*--qk-norm'),
    ({'coordinator': 'a:1'}, '--coordinator, .*together'),
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


def test_former_names_of_flags_are_accepted():
  args = ['--watch-every', '7', '--keep', '8', '--fresh']
  expected = Config(diagnostics_every=7, max_to_keep=8, from_scratch=True)
  assert tyro.cli(Config, args=args) == expected


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    ({'preset': 'llama-3-8b', 'num_heads': 16},
     {'num_kv_heads': 16, 'head_width': 256}),
    ({'preset': 'llama-3-8b', 'width': 2048},
     {'num_kv_heads': 8, 'head_width': 64}),
    # Small models and kept norms start larger; rates are of the number of
    # steps, as the study found them.
    ({}, {'init_std': 0.049, 'mlp_width': 512, 'learning_rate': 0.02}),
    ({'preset': 'small'}, {'init_std': None, 'learning_rate': 0.0082}),
    ({'preset': 'small', 'optimizer': 'muon-hyperball'}, {'init_std': 0.04}),
    ({'width': 768, 'init_std': 0.5}, {'init_std': 0.5}),
    ({'mlp_width': 100}, {'mlp_width': 100}),
    ({'width': 64}, {'mlp_width': 256}),
    # Of 8/3, rounded up to a multiple of 16.
    ({'preset': 'llama-7b', 'width': 768}, {'mlp_width': 2048}),
    ({'preset': 'llama-130m', 'width': 1024, 'num_heads': 16},
     {'mlp_width': 2736}),
    ({'architecture': 'llama'}, {'mlp_width': 352}),
    ({'preset': 'llama-130m', 'architecture': 'gpt2'}, {'mlp_width': 3072}),
    ({'steps': 1}, {'learning_rate': 0.033}),
    ({'optimizer': 'lamb'}, {'learning_rate': 0.022}),
    ({'optimizer': 'muon'}, {'learning_rate': 0.021}),
    ({'optimizer': 'muon-hyperball'}, {'learning_rate': 0.062}),
    ({'optimizer': 'lion'}, {'learning_rate': 1e-3}),
    ({'steps': 9999, 'learning_rate': 0.5}, {'learning_rate': 0.5}),
    ({'optimizer': 'adamw', 'width': 64}, {'learning_rate': 0.016}),
    ({'optimizer': 'adamw', 'width': 128}, {'learning_rate': 0.0078}),
  ],
)  # fmt: skip
def test_defaults_follow_what_is_given(settings: dict, expected: dict):
  assert expected.items() <= vars(resolve(Config(**settings))).items()


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


# Of settings that are set by default, the hashes below tell.
def test_identity_holds_what_decides_the_numbers_and_no_more():
  one = resolve(Config(optimizer='muon'))
  for name, value in dict(
    out_dir='/elsewhere', micro_batch_size=16, unroll=1, wandb='project'
  ).items():
    other = dataclasses.replace(one, **{name: value})
    assert identity(resolve(other)) == identity(one), name
  for value in ('float32', 'bfloat16'):
    other = dataclasses.replace(one, ns_dtype=value)
    assert identity(other) != identity(one)


def test_digests_do_not_change_between_versions():
  # Names of folders and of cached tokens are made of them.
  assert digest({'seed': 0}, 'a').startswith('709139eb')
