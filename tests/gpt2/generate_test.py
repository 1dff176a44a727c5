import dataclasses
from pathlib import Path
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import END_OF_TEXT, train_tokenizer
from examples.gpt2.devices.sharding import (
  by_path,
  make_mesh,
  parameter_shardings,
)
from examples.gpt2.generate import generate, main, sample_text
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.decoding import empty_cache, extend, generate_tokens
from examples.gpt2.model.files import Model, load_model, save_model
from examples.gpt2.model.transformer import as_module, shapes

_GPT2 = ModelConfig(
  vocab_size=320, context_length=16, num_layers=2, num_heads=2, width=16,
  mlp_width=32,
)  # fmt: skip
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


@pytest.mark.parametrize('kind', ['gpt2', 'llama-3'])
def test_at_temperature_zero_the_likeliest_known_token_is_taken(kind: str):
  model = _model(kind)
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


@pytest.mark.parametrize('top_k', [4, 300])
def test_only_the_top_tokens_are_taken(top_k: int):
  logits, drawn = _draw_once(temperature=100.0, top_k=top_k)
  best = np.argsort(logits)[-top_k:]
  np.testing.assert_array_equal(np.unique(drawn), np.sort(best))


def test_samples_differ_and_a_seed_repeats_them():
  first, second = _generate(_model(), num_samples=2)
  assert (first != second).any()
  np.testing.assert_array_equal(_generate(_model(), num_samples=2)[1], second)
  other = _generate(_model(), num_samples=2, seed=2**32 - 1)
  assert (other[0] != first).any()


def test_the_cache_has_the_heads_of_keys_in_the_dtype_of_activations():
  cache = empty_cache(_model('llama-3', dtype='bfloat16').config, 3, 5)
  assert cache[0].shape == (2, 3, 5, 2, 8)
  assert cache[0].dtype == jnp.bfloat16


def test_half_precision_generates():
  assert _generate(_model(dtype='bfloat16')).shape == (1, 13)


@pytest.mark.parametrize('mesh', ['fsdp=8', 'data=2,fsdp=2,tensor=2'])
@pytest.mark.parametrize('kind', ['gpt2', 'llama-3'])
def test_a_mesh_writes_what_one_device_does(kind: str, mesh: str):
  model, mesh = _model(kind), make_mesh(mesh)
  sharded = _sharded(model, mesh)
  expected = _generate(model, temperature=0.0)
  for count in (1, 9):
    got = _generate(sharded, mesh=mesh, temperature=0.0, num_samples=count)
    np.testing.assert_array_equal(got, np.repeat(expected, count, axis=0))


def _sample(model: Model, mesh: jax.sharding.Mesh, seed: int = 3) -> str:
  return sample_text(model, np.arange(40, 80, dtype=np.uint16), mesh, seed)


def test_the_trainers_sample_is_the_same_on_a_mesh():
  model, mesh = _model(), make_mesh('data=2,fsdp=2,tensor=2')
  text = _sample(model, _one_device())
  assert _sample(_sharded(model, mesh), mesh) == text
  assert _sample(model, _one_device(), seed=4) != text
  assert text.startswith('[prompt]\n40 41\n[continuation]\n')
  assert len(text.split()) == 2 + 16
  shortest = _model(context_length=1)
  assert len(_sample(shortest, _one_device()).split()) == 2 + 1


def test_the_trainers_sample_is_text(folder: Path):
  model = load_model(folder)
  start = model.tokenizer.decode([40, 41])
  text = _sample(model, _one_device())
  assert text.startswith(f'[prompt]\n{start}\n[continuation]\n')


def test_text_is_continued(folder: Path, capsys: pytest.CaptureFixture):
  args = [str(folder), '--prompt', 'some text', '--tokens', '6']
  main([*args, '--num-samples', '2', '--top-k', '50', '--seed', '1'])
  _, *texts = re.split(r'\[sample \d\]\n', capsys.readouterr().out)
  assert len(set(texts)) == 2
  assert all(text.startswith('some text') for text in texts)


def test_a_prompt_that_is_no_text_is_refused(folder: Path):
  with pytest.raises(UsageError, match='--prompt must be text'):
    generate(folder, prompt='\udcff')


def test_without_arguments_a_document_starts(folder: Path, capsys):
  main([str(folder)])
  assert capsys.readouterr().out.startswith(END_OF_TEXT)


def test_identifiers_are_continued_where_there_is_no_tokenizer(bare: Path):
  [text] = generate(bare, prompt='5 250  7', tokens=13, temperature=0.0)
  [expected] = _generate(_model(), temperature=0.0)
  assert text == '5 250 7 ' + ' '.join(map(str, expected))


def test_parameters_are_sharded_while_a_command_samples(bare, monkeypatch):
  passed = []

  def look(model: Model, *args: object) -> np.ndarray:
    passed.append(model.params)
    return generate_tokens(model, *args)

  monkeypatch.setattr('examples.gpt2.generate.generate_tokens', look)
  options = dict(prompt='5 250 7', tokens=13, temperature=0.0)
  expected = generate(bare, **options)
  assert generate(bare, mesh='fsdp=8', **options) == expected
  _, params = passed
  for name, x in by_path(params).items():
    is_matrix = name.endswith(('kernel', 'embedding'))
    assert x.is_fully_replicated != is_matrix, name


@pytest.mark.parametrize('prompt', ['', '-1', '1 290', '²'])
def test_other_prompts_are_refused_there(bare: Path, prompt: str):
  with pytest.raises(UsageError, match='--prompt must be token .* below 290'):
    generate(bare, prompt=prompt)


@pytest.mark.parametrize(
  ('flag', 'value', 'message'),
  [
    ('--tokens', '0', '--tokens must be at least 1, got 0'),
    ('--num-samples', '0', '--num-samples must be at least 1, got 0'),
    ('--top-k', '-1', '--top-k must be at least 0, got -1'),
    ('--temperature', '-0.5', '--temperature must be finite and at least 0'),
    ('--temperature', 'inf', '--temperature must be finite and at least 0'),
    ('--seed', '-1', '--seed must be in'),
    ('--mesh', 'fsdp=3', '--mesh fsdp=3: the product of its axes'),
  ],
)
def test_settings_out_of_range_exit_with_status_2(flag, value, message, capsys):
  with pytest.raises(SystemExit) as caught:
    main(['nowhere', flag, value])
  assert caught.value.code == 2
  assert capsys.readouterr().err.startswith(f'error: {message}')


@pytest.mark.parametrize('length', [16, 256])
def test_what_fits_into_the_context_is_generated(tmp_path: Path, length: int):
  save_model(tmp_path, _model(context_length=length))
  [text] = generate(tmp_path, prompt='5 250 7')
  assert len(text.split()) == 3 + min(length - 3, 200)
  message = f'of 3 tokens and --tokens {length - 2} exceed .* model, {length}'
  with pytest.raises(UsageError, match=message):
    generate(tmp_path, prompt='5 250 7', tokens=length - 2)


@pytest.mark.parametrize(
  ('kind', 'advice'), [('gpt2', r'one\.'), ('llama', r'one, or --tokens\.')]
)
def test_a_prompt_without_room_after_it_is_refused(tmp_path, kind, advice):
  save_model(tmp_path, _model(kind))
  message = f'16 tokens, which fill the context .*a shorter {advice}$'
  with pytest.raises(UsageError, match=message):
    generate(tmp_path, prompt='5 ' * 16)


def test_a_context_that_is_too_long_is_mentioned_for_rotary_positions(
  tmp_path: Path, capsys: pytest.CaptureFixture
):
  save_model(tmp_path, _model('llama'))
  [text] = generate(tmp_path, prompt='5', tokens=20)
  assert len(text.split()) == 21
  assert 'exceed the context length' in capsys.readouterr().err
