import dataclasses
from pathlib import Path
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import ModelConfig, complete
from examples.gpt2.generate import (
  empty_cache,
  extend,
  generate,
  generate_tokens,
  main,
  sample_text,
)
from examples.gpt2.model import as_module, shapes
from examples.gpt2.model_files import Model, save_model
from examples.gpt2.sharding import make_mesh, parameter_shardings
from examples.gpt2.tokenizer import train_tokenizer

_GPT2 = complete(ModelConfig(
  vocab_size=320, context_length=16, num_layers=2, num_heads=2, width=16,
  mlp_width=32,
))  # fmt: skip
_LLAMA = dataclasses.replace(_GPT2, architecture='llama')
_CONFIGS = {
  'gpt2': _GPT2,
  'llama': dataclasses.replace(_LLAMA, untied_head=True),
  'qk_norm': dataclasses.replace(_GPT2, qk_norm=True),
  'llama-3': dataclasses.replace(
    _LLAMA, num_heads=4, num_kv_heads=2, head_width=8,
    rope_scaling=(8.0, 1.0, 4.0, 16.0),
  ),
}  # fmt: skip
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


def _model(kind: str = 'gpt2', **settings: object) -> Model:
  config = dataclasses.replace(_CONFIGS[kind], **settings)
  return Model(config, _NUM_TOKENS, _params(config))


def _one_device() -> jax.sharding.Mesh:
  return make_mesh('', jax.devices()[:1])


def _generate(model: Model, **options: object) -> np.ndarray:
  defaults = dict(
    prompt_T=[5, 250, 7], num_tokens=13, mesh=_one_device(), temperature=1.0,
    seed=0,
  )  # fmt: skip
  return generate_tokens(model, **defaults | options)


def _sharded(model: Model, mesh: jax.sharding.Mesh) -> Model:
  shardings = parameter_shardings(mesh, model.params)
  params = jax.device_put(model.params, shardings)
  return dataclasses.replace(model, params=params)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  """A model with a tokenizer."""
  tokenizer = train_tokenizer(['some text, and some more text'], _NUM_TOKENS)
  count = tokenizer.get_vocab_size()
  save_model(tmp_path, Model(_GPT2, count, _params(_GPT2), tokenizer))
  return tmp_path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
  """A model without a tokenizer."""
  save_model(tmp_path, _model())
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


def test_at_temperature_zero_the_likeliest_known_token_is_taken():
  model = _model()
  [got] = _generate(model, temperature=0.0)
  tokens = np.array([[5, 250, 7, *got]])
  logits = as_module(model.config, model.params)(tokens)[0, 2:-1]
  # Else the mask would not have counted.
  assert (logits.argmax(axis=-1) >= _NUM_TOKENS).any()
  expected = logits[:, :_NUM_TOKENS].argmax(axis=-1)
  np.testing.assert_array_equal(got, expected)


def _draw_once(**options: object) -> tuple[jax.Array, np.ndarray]:
  """Returns the logits after a prompt, and many tokens that follow it."""
  model = as_module(_GPT2, _params(_GPT2))
  logits = model(np.array([[5, 250, 7]]))[0, -1, :_NUM_TOKENS]
  drawn = _generate(_model(), num_tokens=1, num_samples=20_000, **options)
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


def test_only_the_top_tokens_are_taken():
  logits, drawn = _draw_once(temperature=100.0, top_k=4)
  best = np.argsort(logits)[-4:]
  np.testing.assert_array_equal(np.unique(drawn), np.sort(best))


def test_samples_differ_and_a_seed_repeats_them():
  first, second = _generate(_model(), num_samples=2)
  assert (first != second).any()
  np.testing.assert_array_equal(_generate(_model(), num_samples=2)[1], second)
  other = _generate(_model(), num_samples=2, seed=2**32 - 1)
  assert (other[0] != first).any()


def _sample(model: Model, mesh: jax.sharding.Mesh, seed: int = 3) -> str:
  return sample_text(model, np.arange(40, 80, dtype=np.uint16), mesh, seed)


def test_the_trainers_sample_is_the_same_on_a_mesh():
  model, mesh = _model(), make_mesh('data=2,fsdp=2,tensor=2')
  text = _sample(model, _one_device())
  assert _sample(_sharded(model, mesh), mesh) == text
  assert _sample(model, _one_device(), seed=4) != text
  assert text.startswith('[prompt]\n40 41\n[continuation]\n')
  assert len(text.split()) == 2 + 16


def test_text_is_continued(folder: Path, capsys: pytest.CaptureFixture):
  args = [str(folder), '--prompt', 'some text', '--tokens', '6']
  main([*args, '--num-samples', '2', '--top-k', '50', '--seed', '1'])
  _, *texts = re.split(r'\[sample \d\]\n', capsys.readouterr().out)
  assert len(set(texts)) == 2
  assert all(text.startswith('some text') for text in texts)


def test_without_a_tokenizer_the_prompt_is_token_numbers(bare: Path):
  options = dict(prompt='5 250  7', tokens=13, temperature=0.0)
  [text] = generate(bare, **options)
  [expected] = _generate(_model(), temperature=0.0)
  assert text == '5 250 7 ' + ' '.join(map(str, expected))
  assert generate(bare, mesh='fsdp=8', **options) == [text]


@pytest.mark.parametrize('prompt', ['', '-1', '1 290'])
def test_other_prompts_are_refused_there(bare: Path, prompt: str):
  with pytest.raises(UsageError, match='--prompt must be token .* below 290'):
    generate(bare, prompt=prompt)


@pytest.mark.parametrize(
  ('flag', 'value', 'message'),
  [
    ('--tokens', '0', '--tokens must be at least 1, got 0'),
    ('--temperature', 'inf', '--temperature must be finite and at least 0'),
    ('--mesh', 'fsdp=3', '--mesh fsdp=3: the product of its axes'),
  ],
)
def test_settings_out_of_range_exit_with_status_2(flag, value, message, capsys):
  with pytest.raises(SystemExit) as caught:
    main(['nowhere', flag, value])
  assert caught.value.code == 2
  assert capsys.readouterr().err.startswith(f'error: {message}')


def test_generation_ends_at_the_context_length(bare: Path):
  [text] = generate(bare, prompt='5 250 7')
  assert len(text.split()) == 16
  message = 'of 3 tokens and 14 more exceed .* model, 16'
  with pytest.raises(UsageError, match=message):
    generate(bare, prompt='5 250 7', tokens=14)
  with pytest.raises(UsageError, match='of 16 tokens and 1 more exceed'):
    generate(bare, prompt='5 ' * 16)
