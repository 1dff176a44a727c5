import dataclasses
import functools
from pathlib import Path
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import END_OF_TEXT, train_tokenizer
from examples.gpt2.devices.sharding import make_mesh, parameter_shardings
from examples.gpt2.generate import (
  GenerateConfig,
  generate,
  main,
  sample_text,
)
from examples.gpt2.model.decoding import empty_cache, extend, generate_tokens
from examples.gpt2.model.files import as_module, save_model, shapes
from examples.gpt2.model.layers import ModelConfig

_GPT2 = ModelConfig(
  vocab_size=320,
  context_length=16,
  num_layers=2,
  num_heads=2,
  width=16,
  mlp_width=32,
)
_CONFIGS = {
  'gpt2': _GPT2,
  'llama': dataclasses.replace(_GPT2, architecture='llama', untied_head=True),
  'qk_norm': dataclasses.replace(_GPT2, qk_norm=True),
}
_NUM_TOKENS = 290


def _params(config: ModelConfig) -> dict:
  """Returns parameters that make the padded tokens the likeliest."""
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: generator.normal(0.1, 0.3, x.shape).astype(np.float32),
    shapes(config),
  )
  if config.untied_head:
    params['head']['kernel'][:, _NUM_TOKENS:] *= 10
  else:
    params['token_embedding']['embedding'][_NUM_TOKENS:] *= 10
  return params


def _generate(config: ModelConfig, **options: object) -> np.ndarray:
  options = (
    dict(
      params=_params(config),
      prompt_T=np.array([5, 250, 7], np.int32),
      num_tokens=13,
      num_identifiers=_NUM_TOKENS,
      temperature=1.0,
      key=jax.random.key(0),
    )
    | options
  )
  return np.asarray(generate_tokens(config, **options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  """A model with a tokenizer."""
  tokenizer = train_tokenizer(['some text, and some more text'], _NUM_TOKENS)
  save_model(
    tmp_path,
    _GPT2,
    tokenizer.get_vocab_size(),
    _params(_GPT2),
    tokenizer,
  )
  return tmp_path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
  """A model without a tokenizer."""
  save_model(tmp_path, _GPT2, _NUM_TOKENS, _params(_GPT2))
  return tmp_path


@pytest.mark.parametrize('kind', _CONFIGS)
def test_the_cache_gives_the_logits_of_a_whole_pass(kind: str):
  config = _CONFIGS[kind]
  tokens = np.random.default_rng(1).integers(320, size=(2, 9))

  @jax.jit
  def run(params: dict) -> tuple[jax.Array, jax.Array]:
    model = as_module(config, params)
    cache, start, features = empty_cache(config, 2, 12), 0, []
    for length in (4, 1, 1, 3):
      part = tokens[:, start : start + length]
      new, cache = extend(model, part, cache, start)
      features.append(new)
      start += length
    return model.logits(jnp.concatenate(features, axis=1)), model(tokens)

  got, expected = run(_params(config))
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', _CONFIGS)
def test_at_temperature_zero_the_likeliest_known_token_is_taken(kind: str):
  config = _CONFIGS[kind]
  model = as_module(config, _params(config))
  tokens, padded = [5, 250, 7], 0
  run = jax.jit(model)
  for length in range(3, 16):
    row = np.zeros((1, 16), np.int32)
    row[0, :length] = tokens
    logits = run(row)[0, length - 1]
    padded += int(logits.argmax() >= _NUM_TOKENS)
    tokens.append(int(logits[:_NUM_TOKENS].argmax()))
  assert padded  # Else the mask would not have counted.
  got = _generate(config, temperature=0.0)
  np.testing.assert_array_equal(got, [tokens[3:]])


def _draw_once(**options: object) -> tuple[jax.Array, np.ndarray]:
  """Returns the logits after a prompt, and many tokens that follow it."""
  model = as_module(_GPT2, _params(_GPT2))
  logits = model(np.array([[5, 250, 7]]))[0, -1, :_NUM_TOKENS]
  drawn = _generate(_GPT2, num_tokens=1, num_samples=20_000, **options)
  return logits, drawn[:, 0]


def test_samples_follow_the_softmax():
  logits, drawn = _draw_once(temperature=0.2)
  expected = jax.nn.softmax(logits / 0.2)
  counts = np.bincount(drawn, minlength=320)
  assert counts[_NUM_TOKENS:].sum() == 0
  assert expected.max() > 0.05
  np.testing.assert_allclose(
    counts[:_NUM_TOKENS] / len(drawn), expected, atol=0.01
  )


@pytest.mark.parametrize('top_k', [4, 300])
def test_only_the_top_tokens_are_taken(top_k: int):
  logits, drawn = _draw_once(temperature=100.0, top_k=top_k)
  best = np.argsort(logits)[-top_k:]
  np.testing.assert_array_equal(np.unique(drawn), np.sort(best))


def test_samples_differ_and_a_seed_repeats_them():
  first, second = _generate(_GPT2, num_samples=2)
  assert (first != second).any()
  np.testing.assert_array_equal(_generate(_GPT2, num_samples=2)[1], second)
  other = _generate(_GPT2, num_samples=2, key=jax.random.key(1))
  assert (other[0] != first).any()


def test_no_tokens_are_generated_where_none_are_asked_for():
  assert _generate(_GPT2, num_tokens=0).shape == (1, 0)


def test_half_precision_generates():
  config = dataclasses.replace(_GPT2, dtype='bfloat16')
  tokens = _generate(config, params=_params(config))
  assert tokens.shape == (1, 13)
  assert empty_cache(config, 1, 2)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize('with_tokenizer', [True, False])
def test_the_trainers_sample_is_the_same_on_a_mesh(with_tokenizer: bool):
  tokenizer = train_tokenizer(['some text, and some more text'], 290)
  tokens = types.SimpleNamespace(
    validation=np.arange(40, 80, dtype=np.uint16),
    tokenizer=tokenizer if with_tokenizer else None,
    vocab_size=tokenizer.get_vocab_size(),
  )
  params = _params(_GPT2)

  def sample(params: dict, seed: int, context_length: int = 16) -> str:
    model = functools.partial(as_module, _GPT2)
    return sample_text(model, params, tokens, context_length, seed)

  text = sample(params, 3)
  mesh = make_mesh('data=2,fsdp=2,tensor=2')
  sharded = jax.device_put(params, parameter_shardings(mesh, params))
  assert sample(sharded, 3) == text
  assert sample(params, 4) != text
  start = tokenizer.decode([40, 41]) if with_tokenizer else '40 41'
  assert text.startswith(f'[prompt]\n{start}\n[continuation]\n')
  if not with_tokenizer:
    assert len(text.split()) == 2 + 16
    assert len(sample(params, 3, context_length=1).split()) == 2 + 1


def test_text_is_continued(folder: Path, capsys: pytest.CaptureFixture):
  args = [str(folder), '--prompt', 'some text', '--tokens', '6']
  main([*args, '--num-samples', '2', '--top-k', '50', '--seed', '1'])
  first, second = capsys.readouterr().out.split('[sample 2]\n')
  first = first.removeprefix('[sample 1]\n')
  assert first.startswith('some text')
  assert second.startswith('some text')
  assert first != second


def test_without_a_prompt_a_document_starts(folder: Path):
  (text,) = generate(GenerateConfig(folder, tokens=3))
  assert text.startswith(END_OF_TEXT)


def test_identifiers_are_continued_where_there_is_no_tokenizer(bare: Path):
  (text,) = generate(
    GenerateConfig(bare, prompt='5 250  7', tokens=13, temperature=0.0)
  )
  expected = _generate(_GPT2, temperature=0.0)[0]
  assert text == '5 250 7 ' + ' '.join(map(str, expected))


@pytest.mark.parametrize('prompt', ['', 'text', '-1', '1 290', '²'])
def test_other_prompts_are_refused_there(bare: Path, prompt: str):
  with pytest.raises(UsageError, match='--prompt must be token .* below 290'):
    generate(GenerateConfig(bare, prompt=prompt))


@pytest.mark.parametrize(
  ('flag', 'value', 'message'),
  [
    ('--tokens', '0', '--tokens must be at least 1, got 0'),
    ('--num-samples', '0', '--num-samples must be at least 1, got 0'),
    ('--top-k', '-1', '--top-k must be at least 0, got -1'),
    ('--temperature', '-0.5', '--temperature must be finite and at least 0'),
    ('--temperature', 'nan', '--temperature must be finite and at least 0'),
    ('--temperature', 'inf', '--temperature must be finite and at least 0'),
    ('--seed', '-1', '--seed must be in'),
  ],
)
def test_settings_out_of_range_exit_with_status_2(
  flag: str, value: str, message: str, capsys: pytest.CaptureFixture
):
  with pytest.raises(SystemExit) as caught:
    main(['nowhere', flag, value])
  assert caught.value.code == 2
  assert capsys.readouterr().err.startswith(f'error: {message}')


def test_a_context_that_is_too_long_is_refused_for_learned_positions(
  bare: Path,
):
  config = GenerateConfig(bare, prompt='5 250 7', tokens=14, temperature=0.0)
  message = 'The prompt of 3 tokens and --tokens 14 exceed .* model, 16'
  with pytest.raises(UsageError, match=message):
    generate(config)
  assert generate(dataclasses.replace(config, tokens=13))


def test_a_context_that_is_too_long_is_mentioned_for_rotary_positions(
  tmp_path: Path, capsys: pytest.CaptureFixture
):
  config = _CONFIGS['llama']
  save_model(tmp_path, config, _NUM_TOKENS, _params(config))
  (text,) = generate(GenerateConfig(tmp_path, prompt='5', tokens=20))
  assert len(text.split()) == 21
  assert 'exceed the context length' in capsys.readouterr().err
