import dataclasses
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import pytest
import tyro

from examples.gpt2.config import Config, digest, flag

_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(),
  lambda x: st.lists(x) | st.dictionaries(st.text(), x),
  max_leaves=5,
)


def test_no_flags_are_the_defaults():
  assert tyro.cli(Config, args=[]) == Config()


@pytest.mark.parametrize(
  ('args', 'name', 'value'),
  [
    (['--ratios', 'row', 'column'], 'ratios', ('row', 'column')),
    (['--clip-threshold', 'inf'], 'clip_threshold', float('inf')),
    (['--qk-norm'], 'qk_norm', True),
    (['--untied-head', 'False'], 'untied_head', False),
    (['--out-dir', 'a/b'], 'out_dir', Path('a/b')),
    (['--mesh', 'fsdp=4,tensor=2'], 'mesh', 'fsdp=4,tensor=2'),
    (['--steps', '7'], 'steps', 7),
    # Names of 0.2.0.
    (['--watch-every', '7'], 'diagnostics_every', 7),
    (['--keep', '7'], 'max_to_keep', 7),
    (['--fresh'], 'from_scratch', True),
  ],
)
def test_a_flag_sets_its_field_alone(args: list[str], name: str, value):
  expected = dataclasses.replace(Config(), **{name: value})
  assert tyro.cli(Config, args=args) == expected


def test_an_unknown_choice_is_refused(capsys):
  with pytest.raises(SystemExit) as error:
    tyro.cli(Config, args=['--optimizer', 'sgd'])
  assert error.value.code == 2
  assert '--optimizer' in capsys.readouterr().err


def test_every_flag_is_in_the_help(capsys):
  with pytest.raises(SystemExit):
    tyro.cli(Config, args=['--help'])
  words = capsys.readouterr().out.split()
  assert '--micro-batch-size' in words
  for field in dataclasses.fields(Config):
    assert any(word.startswith(flag(field.name)) for word in words)


@hypothesis.given(st.dictionaries(st.text(), _JSON))
def test_a_digest_does_not_depend_on_the_order_of_keys(value: dict):
  turned = dict(reversed(value.items()))
  assert digest(turned) == digest(value)
  assert int(digest(value), 16) < 2**256


@hypothesis.given(a=_JSON, b=_JSON)
def test_a_digest_tells_values_apart(a, b):
  # JSON has no other equality: 1 is not true, and an integer key is text.
  assert (digest(a) == digest(b)) == (repr(_sorted(a)) == repr(_sorted(b)))
  assert digest(a, b) != digest([a, b])


def _sorted(x):
  if isinstance(x, dict):
    return sorted((k, _sorted(v)) for k, v in x.items()), 'dict'
  return [_sorted(v) for v in x] if isinstance(x, list) else x


def test_digests_do_not_change_between_versions():
  # Names of folders and of cached tokens are made of them.
  assert digest({'seed': 0}, 'a').startswith('709139eb')
