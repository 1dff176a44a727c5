import dataclasses
import json
import math
from pathlib import Path
import re
import typing

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2 import presets
from examples.gpt2.config import (
  FIELDS,
  GROUPS,
  Config,
  RunConfig,
  UsageError,
  fact,
  flag,
  identity,
)
from examples.gpt2.presets import (
  OPTIMIZERS,
  PRESETS,
  from_json,
  parse,
  resolve,
  to_json,
)

# What is accepted, numbers at its ends, and others beyond them.
_RANGES = {
  'at least 1': ((1,), (0, -4)),
  'finite and at least 0': ((0,), (-1, math.nan, math.inf)),
  'finite and above 0': ((1e-30,), (0.0, math.nan, math.inf)),
  'above 0': ((1e-30, math.inf), (0.0, math.nan)),
  'in [0, 1)': ((0.0, 0.999), (-0.5, 1.0, math.nan)),
  'in [0, 1]': ((0.0, 1.0), (-0.1, 1.5, math.nan)),
  'in [0, 2**32)': ((0, 2**32 - 1), (-1, 2**32)),
  'in [257, 2**31)': ((257, 2**31 - 1), (256, 2**31)),
  'four numbers above 0, the second below the third': (
    ((8.0, 1.0, 4.0, 9.0),),
    ((8.0, 4.0, 1.0, 9.0), (0.0, 1.0, 4.0, 9.0)),
  ),
}
_NUMBERS = [
  name
  for name, hint in typing.get_type_hints(Config).items()
  if re.search(r'\b(int|float)\b', str(hint))
]
_LLAMA = {'architecture': 'llama'}


@pytest.mark.parametrize('name', _NUMBERS)
def test_a_number_out_of_its_range_is_named(name: str):
  accepted = fact(name, 'accepts')
  inside, outside = _RANGES[accepted.text]
  assert all(accepted.holds(value) for value in inside)
  for value in outside:
    message = f'{flag(name)} must be {accepted.text}, got {value}.'
    with pytest.raises(UsageError, match=re.escape(message)):
      resolve(Config(**{name: value}))


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_heads': 3}, '--num-heads 3 .*--width 128'),
    (_LLAMA | {'num_kv_heads': 3}, '--num-kv-heads 3 must .*--num-heads 4'),
    ({'optimizer': 'lion', 'qkv': 'split'}, '--qkv .*merit or muon .* lion'),
    ({'optimizer': 'adamw', 'min_norm': 1.0}, '--min-norm .*merit, .* adamw'),
    ({'adam_rate': 2.0}, '--adam-rate 2.0 needs --others adam'),
    ({'decay': 2}, '--decay .*--schedule wsd, got --schedule cosine'),
    (
      {'schedule': 'wsd', 'steps': 9, 'warmup': 6, 'decay': 0.5},
      '--warmup .*--steps 9, got 10',
    ),
    ({'init_from': Path('a'), 'fork_from': Path('b')}, 'leave out one'),
    ({'from_step': 2}, '--from-step needs --init-from or --fork-from'),
    ({'fork_from': Path('run')}, '--fork-from run needs --from-step'),
    ({'out_dir': Path('')}, '--out-dir must name a folder, got nothing'),
    ({'coordinator': 'a:1'}, '--coordinator, .*together'),
  ],
)
def test_settings_that_do_not_fit_each_other_are_named(settings, message):
  with pytest.raises(UsageError, match=message):
    resolve(Config(**settings))


@pytest.mark.parametrize('name', PRESETS)
def test_presets_resolve_with_every_optimizer(name: str):
  preset = PRESETS[name]
  assert preset.preset == name
  for optimizer, defaults in OPTIMIZERS.items():
    config = resolve(dataclasses.replace(preset, optimizer=optimizer))
    for filled in RunConfig.__annotations__:
      assert getattr(config, filled) is not None, filled
    given = {k: v for k, v in vars(preset).items() if v is not None}
    assert (given | {'optimizer': optimizer} | defaults).items() <= vars(
      config
    ).items()


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_readme_has_the_defaults(name: str):
  page = Path(presets.__file__).with_name('README.md').read_text()
  (row,) = re.findall(rf'^\| `{name}` \| (.*) \|$', page, re.MULTILINE)
  *_, decay, b1, b2 = row.split(' | ')
  found = [0.0 if decay == 'none' else float(decay), float(b1), float(b2)]
  assert found == [OPTIMIZERS[name][x] for x in ('weight_decay', 'b1', 'b2')]


@pytest.mark.parametrize(
  ('preset', 'settings', 'expected'),
  [
    ('llama-3-8b', {'num_heads': 16}, {'num_kv_heads': 8, 'head_width': 256}),
    # Small models and kept norms start larger; rates are of the number of
    # steps, as the study found them.
    ('demo', {}, {'init_std': 0.049, 'mlp_width': 512}),
    ('demo', {'steps': 400}, {'learning_rate': 0.02}),
    ('small', {}, {'init_std': None, 'learning_rate': 0.0082}),
    ('small', {'optimizer': 'muon-hyperball'}, {'init_std': 0.04}),
    # Of 8/3, rounded up to a multiple of 16.
    ('demo', _LLAMA, {'mlp_width': 352}),
    ('demo', {'steps': 1}, {'learning_rate': 0.033}),
    ('demo', {'optimizer': 'adamw', 'width': 64}, {'learning_rate': 0.016}),
    ('demo', {'others': 'adam'}, {'adam_rate': 0.004}),
  ],
)  # fmt: skip
def test_defaults_follow_what_is_given(preset, settings, expected):
  config = resolve(dataclasses.replace(PRESETS[preset], **settings))
  assert expected.items() <= vars(config).items()


@hypothesis.given(
  architecture=st.sampled_from(['gpt2', 'llama']),
  batch_size=st.integers(1, 10_000),
  num_heads=st.integers(1, 16),
  head_width=st.integers(1, 32).map(lambda n: 2 * n),
  steps=st.integers(1, 10**6),
  b1=st.none() | st.floats(0, 0.999),
  learning_rate=st.none() | st.floats(1e-6, 1),
  others=st.sampled_from(['same', 'adam']),
)
def test_given_settings_stay_and_the_rest_fits(head_width, **given):
  given['width'] = given['num_heads'] * head_width
  config = resolve(Config(**given))
  kept = {k: v for k, v in given.items() if v is not None}
  assert kept.items() <= vars(config).items()
  assert resolve(config) == config


def test_identity_holds_only_settings_that_change_the_numbers():
  config = resolve(Config())
  for name, other, decides in (
    ('seed', 1, True),
    ('dtype', 'bfloat16', True),
    ('steps', 401, True),
    ('init_from', Path('run'), True),
    ('out_dir', Path('run'), False),
    ('micro_batch_size', 16, False),
    ('data', ('elsewhere',), False),
  ):
    changed = identity(dataclasses.replace(config, **{name: other}))
    assert (changed != identity(config)) == decides, name
    json.dumps(changed)


def _parse(*args: str) -> Config:
  return parse(args, 'train')


def test_flags_override_a_preset():
  args = ['--steps', '1e3', '--preset=small', '--data', 'a', 'b:0.5']
  assert _parse(*args, '--clip-threshold', 'inf', '--qk_norm') == (
    dataclasses.replace(
      PRESETS['small'],
      steps=1000,
      data=('a', 'b:0.5'),
      clip_threshold=math.inf,
      qk_norm=True,
    )
  )
  assert _parse() == Config()


@pytest.mark.parametrize('number', ['1.5', 'inf', 'many'])
def test_a_number_that_is_no_integer_is_refused(number: str, capsys):
  with pytest.raises(SystemExit):
    _parse('--steps', number)
  assert re.search(f'parsing --steps.*{number}', capsys.readouterr().err)


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--lr', '1'], '--lr is here: --learning-rate'),
    (['--resume'], 'the same command goes on'),
    (['--preset', 'huge'], "--preset must be one of demo, .*, got 'huge'"),
    (['--preset', 'demo', '--config', 'x'], 'exclude each other'),
    (['--config', '/nowhere'], '/nowhere holds no settings'),
  ],
)
def test_unknown_flags_are_answered(args, message):
  with pytest.raises(UsageError, match=message):
    _parse(*args)


@pytest.mark.parametrize('content', ['', '{"settings": {"unheard_of": 1}}'])
def test_a_file_without_settings_is_named(content: str, tmp_path: Path):
  path = tmp_path / 'config.json'
  path.write_text(content)
  with pytest.raises(UsageError, match=f'{path} holds no settings'):
    _parse('--config', str(path))


@hypothesis.given(st.data())
def test_settings_come_back_from_json(data: st.DataObject):
  paths = st.sampled_from([Path('a'), Path('/b/c')])
  kinds = typing.get_type_hints(Config).items()
  values = {
    name: (paths if 'Path' in str(kind) else st.from_type(kind))
    for name, kind in kinds
  }
  config = Config(**data.draw(st.fixed_dictionaries(values)))
  # NaN is not equal to itself.
  found = from_json(json.loads(json.dumps(to_json(config))))
  assert repr(found) == repr(config)


def test_flags_override_a_file(tmp_path: Path):
  config = dataclasses.replace(PRESETS['llama-3-8b'], data=('a', 'b'))
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'settings': to_json(config)}))
  assert _parse('--config', str(path)) == config
  found = _parse(f'--config={path}', '--steps', '7')
  assert found == dataclasses.replace(config, steps=7)


def test_help_has_all_flags_in_groups(capsys):
  with pytest.raises(SystemExit):
    _parse('--help')
  text = capsys.readouterr().out
  assert re.findall(r'(\w+) options', text) == list(GROUPS)
  hidden = {'head_width', 'norm_epsilon', 'rope_theta', 'rope_scaling'}
  shown = re.findall(r'^[│ ] (--[a-z][\w-]*)', text, re.MULTILINE)
  names = FIELDS.keys() - hidden - {'preset'}
  assert sorted(shown) == sorted(map(flag, names))
