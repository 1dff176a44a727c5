import json
import math
from pathlib import Path
import re
import typing

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2 import config as settings_module
from examples.gpt2.command import UsageError, flag
from examples.gpt2.config import (
  FIELDS,
  Config,
  ModelConfig,
  by_name,
  change,
  check_values,
  complete,
  from_json,
  identity,
  to_json,
)
from examples.gpt2.optimizers import OPTIMIZERS
from examples.gpt2.presets import PRESETS
from examples.gpt2.resolve import resolve
from examples.gpt2.train import parse

_LLAMA = {'architecture': 'llama'}
_HINTS = typing.get_type_hints(Config) | typing.get_type_hints(ModelConfig)
del _HINTS['model']
_NUMBERS = [
  name
  for name, hint in _HINTS.items()
  if re.search(r'\b(int|float)\b', str(hint))
]


def _config(preset: str = 'demo', **settings) -> Config:
  return change(PRESETS[preset], **settings)


@pytest.mark.parametrize('name', _NUMBERS)
def test_a_number_beyond_its_limits_is_named(name: str):
  limits = FIELDS[name].metadata['limits']
  assert limits or name == 'rope_scaling'
  for word, limit in limits.items():
    refused = [math.nan, limit + (1 if word in ('at most', 'below') else -1)]
    if word in ('above', 'below'):
      refused.append(limit)
    else:
      check_values({name: limit})
    for value in refused if math.isfinite(limit) else [limit]:
      with pytest.raises(UsageError) as error:
        check_values({name: value})
      for part in (f'{flag(name)} must be', f'{word} {limit}', f'got {value}'):
        assert part in str(error.value)


def test_scaling_of_positions_must_rise():
  for scaling in ((8.0, 4.0, 1.0, 9.0), (0.0, 1.0, 4.0, 9.0)):
    with pytest.raises(UsageError, match='--rope-scaling must be four numbers'):
      resolve(_config(**_LLAMA, rope_scaling=scaling))


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_heads': 3}, '--num-heads 3 .*--width 128'),
    (_LLAMA | {'num_kv_heads': 3}, '--num-kv-heads 3 must .*--num-heads 4'),
    (_LLAMA | {'width': 12}, '--head-width must be even for llama, got 3'),
    ({'num_kv_heads': 2}, '--num-kv-heads is for --architecture llama'),
    ({'optimizer': 'lamb', 'qkv': 'split'}, '--qkv .*merit or .*muon.* lamb'),
    ({'optimizer': 'adamw', 'min_norm': 1.0}, '--min-norm .*merit .* adamw'),
    ({'adam_rate': 2.0}, '--adam-rate is for --optimizer merit-hidden or'),
    ({'decay': 2}, '--decay .*--schedule wsd, got --schedule cosine'),
    (
      {'schedule': 'wsd', 'steps': 9, 'warmup': 6, 'decay': 0.5},
      '--warmup .*--steps 9, got 10',
    ),
    ({'init_from': Path('a'), 'fork_from': Path('b')}, 'leave out one'),
    ({'init_from': Path('a')}, '--init-from needs --learning-rate'),
    ({'from_step': 2}, '--from-step needs --init-from or --fork-from'),
    ({'fork_from': Path('run')}, '--fork-from run needs --from-step'),
    ({'batch_ramp': ('4:100',), 'steps': 4}, '4:100 .*--steps 4'),
  ],
)
def test_settings_that_do_not_fit_each_other_are_named(settings, message):
  with pytest.raises(UsageError, match=message):
    resolve(_config(**settings))


@pytest.mark.parametrize('name', PRESETS)
def test_presets_resolve_with_every_optimizer(name: str):
  assert PRESETS[name].preset == name
  for optimizer, (_, defaults, _) in OPTIMIZERS.items():
    config = by_name(resolve(_config(name, optimizer=optimizer)))
    for filled in ('mlp_width', 'init_std', 'norm_epsilon', *defaults):
      assert config[filled] is not None, filled
    given = {k: v for k, v in by_name(PRESETS[name]).items() if v is not None}
    assert (given | {'optimizer': optimizer}).items() <= config.items()


@pytest.mark.parametrize(
  ('preset', 'settings', 'expected'),
  [
    ('llama-3-8b', {'num_heads': 16}, {'num_kv_heads': 8, 'head_width': 256}),
    # Small models and kept norms start larger; rates are of the number of
    # steps, as the study found them.
    ('demo', {}, {'init_std': 0.049, 'mlp_width': 512}),
    ('demo', {'steps': 400}, {'learning_rate': 0.02}),
    ('small', {}, {'init_std': 0.02, 'learning_rate': 0.0082}),
    ('xl', {}, {'init_std': 0.02}),
    ('small', {'optimizer': 'muon-hyperball'}, {'init_std': 0.04}),
    # Of 8/3, rounded up to a multiple of 16.
    ('demo', _LLAMA, {'mlp_width': 352}),
    ('demo', {'steps': 1}, {'learning_rate': 0.033}),
    ('demo', {'optimizer': 'adamw', 'width': 64}, {'learning_rate': 0.016}),
    ('demo', {'optimizer': 'merit-hidden'}, {'adam_rate': 0.004}),
  ],
)  # fmt: skip
def test_defaults_follow_what_is_given(preset, settings, expected):
  config = by_name(resolve(_config(preset, **settings)))
  assert expected.items() <= config.items()


@hypothesis.given(
  architecture=st.sampled_from(['gpt2', 'llama']),
  batch_size=st.integers(1, 10_000),
  num_heads=st.integers(1, 16),
  head_width=st.integers(1, 32).map(lambda n: 2 * n),
  steps=st.integers(1, 10**6),
  b1=st.none() | st.floats(0, 0.999),
  learning_rate=st.none() | st.floats(1e-6, 1),
  optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_given_settings_stay_and_the_rest_fits(head_width, **given):
  given['width'] = given['num_heads'] * head_width
  config = resolve(_config(**given))
  kept = {k: v for k, v in given.items() if v is not None}
  assert kept.items() <= by_name(config).items()
  assert resolve(config) == config
  assert complete(config.model) == config.model


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
    changed = identity(change(config, **{name: other}))
    assert (changed != identity(config)) == decides, name
    json.dumps(changed)


def _parse(*args: str) -> Config:
  return parse(args, 'train')


def test_flags_override_a_preset():
  args = ['small', '--steps', '1000', '--data', 'a', 'b:0.5']
  expected = _config('small', steps=1000, data=('a', 'b:0.5'), qk_norm=True)
  assert _parse(*args, '--qk-norm') == expected
  assert _parse('--clip-threshold', 'inf') == _config(clip_threshold=math.inf)
  assert _parse() == _parse('demo') == Config()


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--steps', '1.5'], 'parsing --steps.*1.5'),
    (['huge'], 'huge.*small'),
    (['--learning-rat', '1'], '--learning-rate'),
    (['--optimizer', 'muo'], 'muo.*muon-hyperball'),
  ],
)
def test_wrong_arguments_are_answered(args, message: str, capsys):
  with pytest.raises(SystemExit):
    _parse(*args)
  text = ' '.join(capsys.readouterr().err.split())
  assert re.search(message, text), text


@pytest.mark.parametrize(
  'content', [None, '', '{"settings": {"unheard_of": 1, "model": {}}}']
)
def test_a_file_without_settings_is_named(content: str | None, tmp_path: Path):
  path = tmp_path / 'config.json'
  if content is not None:
    path.write_text(content)
  with pytest.raises(UsageError, match=f'{path} holds no settings'):
    _parse('--config', str(path))


@hypothesis.given(st.data())
def test_settings_come_back_from_json(data: st.DataObject):
  paths = st.sampled_from([Path('a'), Path('/b/c')])
  values = {
    name: (paths if 'Path' in str(kind) else st.from_type(kind))
    for name, kind in _HINTS.items()
  }
  config = change(Config(), **data.draw(st.fixed_dictionaries(values)))
  # NaN is not equal to itself.
  found = from_json(json.loads(json.dumps(to_json(config))))
  assert repr(found) == repr(config)


def test_flags_override_a_file(tmp_path: Path):
  config = _config(
    'llama-3-8b', data=('a', 'b'), rope_scaling=(8.0, 1.0, 4.0, 64.0)
  )
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'settings': to_json(config)}))
  assert _parse('--config', str(path)) == config
  found = _parse('--steps', '7', f'--config={tmp_path}')
  assert found == change(config, steps=7)


def test_help_has_a_text_for_each_flag(capsys):
  with pytest.raises(SystemExit):
    _parse('demo', '--help')
  text = capsys.readouterr().out
  hidden = {
    'head_width', 'norm_epsilon', 'rope_theta', 'rope_scaling', 'preset',
  }  # fmt: skip
  for name in FIELDS:
    assert bool(re.search(f'{flag(name)}[ ,]', text)) == (name not in hidden), (
      name
    )
  source = Path(settings_module.__file__).read_text()
  for name in FIELDS:
    assert re.search(rf'  # .*\n  {name}: ', source), name
