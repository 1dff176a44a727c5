from collections.abc import Callable
import dataclasses
import json
from pathlib import Path
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from examples.gpt2.config import Config, UsageError
from examples.gpt2.convert import export_model, import_model, main
from examples.gpt2.data.tokenizer import (
  GENERATION,
  SETTINGS,
  train_tokenizer,
)
from examples.gpt2.devices.sharding import by_path
from examples.gpt2.generate import generate
from examples.gpt2.model import hugging_face
from examples.gpt2.model.config import ModelConfig, RopeScaling
from examples.gpt2.model.files import (
  Model,
  load_model,
  save_model,
)
from examples.gpt2.model.transformer import as_module, shapes
from examples.gpt2.presets import PRESETS, resolve
from examples.gpt2.run.start import with_model
from examples.gpt2.run.step import make_model_config

_GPT2 = ModelConfig(
  vocab_size=320, context_length=16, num_layers=2, num_heads=2, width=16,
  mlp_width=24,
)  # fmt: skip
_LLAMA = dataclasses.replace(_GPT2, architecture='llama')
_CONFIGS = {
  'gpt2': _GPT2,
  'gpt2-untied': dataclasses.replace(_GPT2, untied_head=True, norm_epsilon=0.1),
  'llama': dataclasses.replace(_LLAMA, untied_head=True, norm_epsilon=0.1),
  'llama-tied': dataclasses.replace(_LLAMA, norm_epsilon=1e-6),
  'llama-3': dataclasses.replace(
    _LLAMA,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    rope_theta=100.0,
    # Some features keep their speed, one changes it in part, the others by all.
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 40.0),
  ),
}
_NUM_TOKENS = 270
_PADDED = {'token_embedding.embedding': 0, 'head.kernel': 1}
_TEXT = 'some text, and some more text; the text ends — here'
_SCALING = dict(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=40,
)  # fmt: skip


def _params(config: ModelConfig) -> dict:
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: generator.normal(0.1, 0.3, x.shape).astype(np.float32),
    shapes(config),
  )


def _save(folder: Path, config: ModelConfig) -> Path:
  """Writes a model with a tokenizer."""
  tokenizer = train_tokenizer([_TEXT], _NUM_TOKENS)
  assert tokenizer.get_vocab_size() == _NUM_TOKENS
  save_model(folder, Model(config, _NUM_TOKENS, _params(config), tokenizer))
  return folder


def _export(folder: Path, kind: str) -> Path:
  export_model(_save(folder / 'model', _CONFIGS[kind]), folder / 'exported')
  return folder / 'exported'


def _import(exported: Path) -> Model:
  import_model(exported, exported.parent / 'imported')
  return load_model(exported.parent / 'imported')


def _assert_refused(exported: Path, message: str):
  with pytest.raises(UsageError, match=message) as caught:
    import_model(exported, exported.parent / 'imported')
  assert str(exported) in str(caught.value)
  assert not (exported.parent / 'imported').exists()


def _without_padding(params: dict) -> dict[str, np.ndarray]:
  return {
    path: x.take(range(_NUM_TOKENS), axis=_PADDED[path])
    if path in _PADDED
    else x
    for path, x in by_path(params).items()
  }


def _tokens() -> np.ndarray:
  return np.random.default_rng(1).integers(_NUM_TOKENS, size=(3, 16))


def _logits(model: Model) -> np.ndarray:
  logits = as_module(model.config, model.params)(_tokens())
  return np.asarray(logits[..., : model.num_tokens])


def _change_json(path: Path, **entries: object):
  path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _change_weights(folder: Path, change: Callable[[dict], dict]):
  path = folder / 'model.safetensors'
  safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


@pytest.mark.parametrize('kind', _CONFIGS)
def test_a_model_goes_out_and_comes_back_bit_for_bit(tmp_path: Path, kind: str):
  _save(tmp_path / 'model', _CONFIGS[kind])
  exported, imported = tmp_path / 'exported', tmp_path / 'imported'
  main(['export', str(tmp_path / 'model'), str(exported)])
  main(['import', str(exported), str(imported)])
  model = load_model(imported)
  assert (model.config, model.num_tokens) == (_CONFIGS[kind], _NUM_TOKENS)
  expected = _without_padding(_params(_CONFIGS[kind]))
  chex.assert_trees_all_equal(_without_padding(model.params), expected)
  before = load_model(tmp_path / 'model')
  assert model.tokenizer.to_str() == before.tokenizer.to_str()
  export_model(imported, tmp_path / 'again')
  for path in exported.iterdir():
    assert (tmp_path / 'again' / path.name).read_bytes() == path.read_bytes()
  with safetensors.safe_open(exported / 'model.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt'}  # Some versions insist on it.
  settings = json.loads((exported / 'config.json').read_text())
  assert settings['eos_token_id'] == settings['bos_token_id'] == 0


def test_rows_that_no_token_has_are_padding(tmp_path: Path):
  exported, count = _export(tmp_path, 'llama-tied'), 200
  num_rows = _NUM_TOKENS + count
  _change_json(exported / 'config.json', vocab_size=num_rows)
  name = 'model.embed_tokens.weight'
  _change_weights(
    exported, lambda x: x | {name: np.pad(x[name], ((0, count), (0, 0)))}
  )
  model = _import(exported)
  # As of tokens that were made with this tokenizer.
  assert (model.num_tokens, model.config.vocab_size) == (_NUM_TOKENS, 320)
  expected = _logits(load_model(tmp_path / 'model'))
  np.testing.assert_array_equal(_logits(model), expected)
  (exported / 'tokenizer.json').unlink()
  import_model(exported, tmp_path / 'without')
  model = load_model(tmp_path / 'without')
  assert (model.num_tokens, model.tokenizer) == (num_rows, None)


def test_qk_norm_cannot_be_exported(tmp_path: Path):
  _save(tmp_path / 'model', dataclasses.replace(_GPT2, qk_norm=True))
  with pytest.raises(UsageError, match='Neither .* has qk_norm'):
    export_model(tmp_path / 'model', tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_models_of_other_versions_are_read(tmp_path: Path):
  exported = _export(tmp_path, 'gpt2')
  weights = safetensors.numpy.load_file(exported / 'model.safetensors')
  bare = {k.removeprefix('transformer.'): x for k, x in weights.items()}
  bare |= {
    'h.0.attn.bias': np.tril(np.ones((1, 1, 16, 16), bool)),
    'h.1.attn.masked_bias': np.float32([-1e4]),
    'lm_head.weight': bare['wte.weight'],
  }
  _change_weights(exported, lambda _: bare)
  # Another name of the same function.
  gelu = 'gelu_pytorch_tanh'
  _change_json(exported / 'config.json', activation_function=gelu)
  expected = _logits(load_model(tmp_path / 'model'))
  np.testing.assert_array_equal(_logits(_import(exported)), expected)


@pytest.mark.parametrize(
  ('kind', 'entries', 'message'),
  [
    ('gpt2', {'model_type': 'opt'}, "model_type must be .* got 'opt'"),
    ('gpt2', {'n_layer': '2'}, "n_layer must be .* got '2'"),
    ('gpt2', {'activation_function': 'gelu'}, 'activation_function must be'),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'must be False'),
    ('gpt2', {'n_inner': None}, r'mlp.c_fc.bias is F32\[24\], .*\[64\]'),
    ('llama', {'attention_bias': True}, 'attention_bias must be False'),
    ('llama', {'rope_parameters': {'rope_type': 'yarn'}}, "llama3, got 'yarn'"),
    (
      'llama',
      {'rope_theta': 5e5},
      'rope_theta is 500000.0 in .* and 10000.0 in',
    ),
    ('llama', {'tie_word_embeddings': True}, 'lm_head.weight is not model.emb'),
    ('llama', {'num_hidden_layers': 1}, 'model.layers.1.* expected not there'),
  ],
)
def test_other_models_are_refused(tmp_path, kind, entries, message):
  exported = _export(tmp_path, kind)
  _change_json(exported / 'config.json', **entries)
  _assert_refused(exported, message)


def test_pickles_are_refused(tmp_path: Path):
  exported = _export(tmp_path, 'gpt2')
  (exported / 'model.safetensors').rename(exported / 'pytorch_model.bin')
  message = r'no model\.safetensors .*\(pytorch_model\.bin\) are not'
  _assert_refused(exported, message)


def test_rotary_positions_are_written_for_all_versions():
  model = Model(_CONFIGS['llama-3'], _NUM_TOKENS, {})
  settings = hugging_face.to_settings(model, 'float32')
  scaling = {'rope_type': 'llama3', **_SCALING}
  assert settings['rope_theta'] == 100.0
  assert settings['rope_scaling'] == scaling
  assert settings['rope_parameters'] == {'rope_theta': 100.0, **scaling}


@pytest.mark.parametrize(
  'entries',
  [
    # transformers 5, 4, and 4 before it had settled on a name.
    {'rope_parameters': {'rope_theta': 5e5, 'rope_type': 'llama3', **_SCALING}},
    {'rope_theta': 500000, 'rope_scaling': {'rope_type': 'llama3', **_SCALING}},
    {'rope_theta': 5e5, 'rope_scaling': {'type': 'llama3', **_SCALING}},
  ],
)
def test_rotary_positions_are_read_as_any_version_writes_them(entries: dict):
  settings = dict(
    model_type='llama', vocab_size=64, max_position_embeddings=16,
    num_hidden_layers=1, num_attention_heads=4, hidden_size=16,
    intermediate_size=16,
  )  # fmt: skip
  config, _ = hugging_face.from_settings(settings | entries)
  assert config.rope_theta == 500_000.0
  assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 40.0)
  assert (config.num_kv_heads, config.head_width) == (4, 4)
  plain, _ = hugging_face.from_settings(settings)
  assert (plain.rope_theta, plain.rope_scaling) == (10_000.0, None)
  assert plain.norm_epsilon == 1e-6


def test_export_in_shards_of_bfloat16(tmp_path: Path):
  config, out = _CONFIGS['llama-3'], tmp_path / 'exported'
  _save(tmp_path / 'model', config)
  export_model(tmp_path / 'model', out, 'bfloat16', '5KB')
  index = json.loads((out / 'model.safetensors.index.json').read_text())
  found = {}
  for part in out.glob('model-*.safetensors'):
    arrays = safetensors.numpy.load_file(part)
    assert sum(x.nbytes for x in arrays.values()) <= 5000 or len(arrays) == 1
    found |= dict.fromkeys(arrays, part.name)
    assert {x.dtype for x in arrays.values()} == {np.dtype(jnp.bfloat16)}
  assert len(set(found.values())) > 2
  assert found == index['weight_map']
  settings = json.loads((out / 'config.json').read_text())
  assert settings['torch_dtype'] == 'bfloat16'
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(np.float32), _params(config)
  )
  chex.assert_trees_all_equal(
    _without_padding(_import(out).params),
    _without_padding(rounded),
    strict=True,  # They are of float32 again.
  )


def test_folders_of_hugging_face_are_to_be_imported_first(tmp_path):
  exported = _export(tmp_path, 'gpt2')
  command = f'python -m examples.gpt2.convert import {exported} OUT'
  with pytest.raises(UsageError, match=command):
    generate(exported)
  with pytest.raises(UsageError, match=command):
    with_model(Config(init_from=exported))


_COMPANIONS = {
  SETTINGS: {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': '<|begin|>',
    'eos_token': {'content': '<|end|>', 'special': True},
    'chat_template': '{{ messages }}',
    'model_max_length': 7,
  },
  'special_tokens_map.json': {'pad_token': '<|pad|>'},
  GENERATION: {'eos_token_id': [270, 271], 'temperature': 0.6},
}


def _llama_of_others(folder: Path) -> Path:
  """Writes an export with a tokenizer and files that others might have."""
  exported = _export(folder, 'llama-3')
  tokenizer = load_model(folder / 'model').tokenizer
  tokenizer.add_special_tokens(['<|end|>', '<|begin|>', '<|pad|>'])
  tokenizer.save(str(exported / 'tokenizer.json'))
  for name, content in _COMPANIONS.items():
    (exported / name).write_text(json.dumps(content))
  (exported / 'chat_template.jinja').write_text('{{ messages[0] }}')
  ids = dict(bos_token_id=271, eos_token_id=270, pad_token_id=272)
  _change_json(exported / 'config.json', **ids)
  return exported


@pytest.mark.parametrize('kind', ['gpt2-untied', 'llama-3'])
def test_a_model_to_start_from_gives_the_settings(tmp_path: Path, kind: str):
  model = _CONFIGS[kind]
  preset = PRESETS['llama-3-8b']
  start = dataclasses.replace(preset, init_from=_save(tmp_path, model))
  completed, found = with_model(start)
  assert found.config == model
  config = make_model_config(resolve(completed), _NUM_TOKENS)
  free = {x: vars(model)[x] for x in ('unroll', 'remat', 'init_std')}
  assert dataclasses.replace(config, **free) == model
  other = dataclasses.replace(start, num_layers=7, context_length=5)
  message = '--num-layers 7 instead of 2'
  if model.architecture == 'gpt2':
    message += '.*--context-length 5 instead of 16'
  else:
    shorter = dataclasses.replace(start, context_length=5)
    assert with_model(shorter)[0].context_length == 5
  with pytest.raises(UsageError, match=message):
    with_model(other)


def test_a_folder_that_is_not_empty_is_kept(tmp_path, capsys):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / 'mine.txt').write_text('mine')
  for command in ('export', 'import'):
    with pytest.raises(SystemExit) as caught:
      main([command, str(tmp_path / 'nowhere'), str(tmp_path / 'out')])
    assert caught.value.code == 2
    assert 'there and not empty' in capsys.readouterr().err
  assert [p.name for p in (tmp_path / 'out').iterdir()] == ['mine.txt']


@pytest.fixture
def transformers() -> types.ModuleType:
  reason = 'needs torch and transformers, to compare with'
  pytest.importorskip('torch', reason=reason)
  return pytest.importorskip('transformers', reason=reason)


def _assert_same_logits(theirs: Any, folder: Path):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(_tokens())).logits.numpy()
  np.testing.assert_allclose(expected, _logits(load_model(folder)), atol=1e-4)


@pytest.mark.parametrize('kind', _CONFIGS)
def test_transformers_computes_what_we_do(tmp_path, kind, transformers):
  exported = _export(tmp_path, kind)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    exported, output_loading_info=True
  )
  assert not info['unexpected_keys']
  assert set(info['missing_keys']) <= {'lm_head.weight'}
  _assert_same_logits(theirs, tmp_path / 'model')
  theirs = transformers.AutoTokenizer.from_pretrained(exported)
  ours = load_model(tmp_path / 'model').tokenizer
  ids = ours.encode(_TEXT).ids
  assert theirs(_TEXT)['input_ids'] == ids
  assert theirs.decode(ids) == ours.decode(ids, False)


@pytest.mark.parametrize('kind', _CONFIGS)
def test_models_of_transformers_are_read(tmp_path, kind, transformers):
  torch = pytest.importorskip('torch')
  torch.manual_seed(0)
  config = transformers.AutoConfig.from_pretrained(_export(tmp_path, kind))
  theirs = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.2 * torch.randn(parameter.shape))
  theirs.to(torch.bfloat16).save_pretrained(tmp_path / 'theirs')
  import_model(tmp_path / 'theirs', tmp_path / 'imported')
  # Half precision would round the frequencies of rotary positions too.
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'theirs', dtype=torch.float32
  )
  _assert_same_logits(theirs, tmp_path / 'imported')


def test_special_tokens_survive_import_and_export(tmp_path: Path):
  import_model(_llama_of_others(tmp_path), tmp_path / 'imported')
  export_model(tmp_path / 'imported', tmp_path / 'again')

  def read(name: str) -> dict:
    return json.loads((tmp_path / 'again' / name).read_text())

  for name in (SETTINGS, 'special_tokens_map.json'):
    assert read(name) == _COMPANIONS[name]
  ids = {'bos_token_id': 271, 'eos_token_id': [270, 271], 'pad_token_id': 272}
  assert read(GENERATION) == _COMPANIONS[GENERATION] | ids
  assert ids.items() <= read('config.json').items()
  template = tmp_path / 'again' / 'chat_template.jinja'
  assert template.read_text() == '{{ messages[0] }}'
  assert read('config.json')['vocab_size'] == 273
