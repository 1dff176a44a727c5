from collections.abc import Callable
import dataclasses
import json
from pathlib import Path
import shlex
import tempfile

import chex
import huggingface_hub
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tokenizers

from examples.gpt2 import convert, prepare
from examples.gpt2.command import UsageError
from examples.gpt2.config import (
  Config,
  ModelConfig,
  RopeScaling,
  change,
  complete,
  identity,
  padded_vocab_size,
)
from examples.gpt2.convert import export_model, import_model, main
from examples.gpt2.generate import generate
from examples.gpt2.init_from import find_model
from examples.gpt2.model import as_module, shapes
from examples.gpt2.model_card import command
from examples.gpt2.model_files import Model, load_model, save_model
from examples.gpt2.presets import PRESETS
from examples.gpt2.resolve import resolve
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.sharding import by_path
from examples.gpt2.tokenizer import (
  GENERATION,
  SETTINGS,
  find_begin,
  read_vocabulary,
  train_tokenizer,
  vocabulary,
)
from examples.gpt2.train import parse

transformers = pytest.importorskip('transformers', reason='of [convert]')

_GPT2 = complete(ModelConfig(
  vocab_size=320, context_length=16, num_layers=2, num_heads=2, width=16,
  mlp_width=24,
))  # fmt: skip
_SCALING = dict(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=8,
)  # fmt: skip
_LLAMA = dataclasses.replace(
  _GPT2,
  architecture='llama',
  num_heads=4,
  num_kv_heads=2,
  head_width=8,
  norm_epsilon=0.1,
  rope_theta=100.0,
  # Some features keep their speed, one changes it in part, the others by all.
  rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8.0),
)
_CONFIGS = {
  'gpt2': _GPT2,
  'gpt2-untied': dataclasses.replace(_GPT2, untied_head=True, norm_epsilon=0.1),
  'llama': dataclasses.replace(_LLAMA, rope_scaling=None, untied_head=True),
  'llama-3': _LLAMA,
}
_NUM_TOKENS = 270
_TEXT = 'some text, and some more text; the text ends — here'


@st.composite
def _any_config(draw: st.DrawFn) -> ModelConfig:
  groups, heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 6), (1, 4)]))
  llama = dict(
    architecture='llama',
    num_kv_heads=groups,
    head_width=draw(st.sampled_from([2, 6])),
    rope_theta=draw(st.sampled_from([1e4, 5e5])),
    rope_scaling=draw(st.sampled_from([None, RopeScaling(8.0, 1.0, 4.0, 8.0)])),
  )
  model = ModelConfig(
    vocab_size=320,
    context_length=draw(st.integers(9, 12)),
    num_layers=draw(st.integers(1, 3)),
    num_heads=heads,
    width=12,
    mlp_width=draw(st.integers(1, 50)),
    norm_epsilon=draw(st.sampled_from([1e-5, 1e-6])),
    untied_head=draw(st.booleans()),
    **draw(st.sampled_from([{}, llama])),
  )
  return complete(model)


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
  model = Model(
    config, _NUM_TOKENS, _params(config), tokenizer, '<|endoftext|>'
  )
  save_model(folder, model)
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
  arrays = by_path(params)
  for name, axis in (('token_embedding.embedding', 0), ('head.kernel', 1)):
    if name in arrays:
      arrays[name] = arrays[name].take(range(_NUM_TOKENS), axis=axis)
  return arrays


def _logits(model: Model) -> np.ndarray:
  tokens = np.random.default_rng(1).integers(_NUM_TOKENS, size=(3, 16))
  logits = as_module(model.config, model.params)(tokens)
  return np.asarray(logits[..., : model.num_tokens])


def _read(path: Path) -> dict:
  return json.loads(path.read_text())


def _change_json(path: Path, **entries: object):
  path.write_text(json.dumps(_read(path) | entries))


def _change_weights(folder: Path, change: Callable[[dict], dict]):
  path = folder / 'model.safetensors'
  safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)


@hypothesis.given(_any_config())
@hypothesis.settings(max_examples=8, phases=[hypothesis.Phase.generate])
def test_a_model_goes_out_and_comes_back_bit_for_bit(config: ModelConfig):
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    _save(folder / 'model', config)
    main(['export', str(folder / 'model'), str(folder / 'exported')])
    main(['import', str(folder / 'exported'), str(folder / 'imported')])
    model = load_model(folder / 'imported')
    assert (model.config, model.num_tokens) == (config, _NUM_TOKENS)
    chex.assert_trees_all_equal(
      _without_padding(model.params), _without_padding(_params(config))
    )
    ours = load_model(folder / 'model')
    assert model.tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    assert model.tokenizer.encode(_TEXT).ids == ours.tokenizer.encode(_TEXT).ids
    assert model.end_token == ours.end_token == '<|endoftext|>'
    export_model(folder / 'imported', folder / 'again')
    for path in (folder / 'exported').iterdir():
      assert (folder / 'again' / path.name).read_bytes() == path.read_bytes()


def test_tokens_made_before_are_those_of_a_model_that_came_back(tmp_path):
  before = load_model(_save(tmp_path / 'model', _GPT2)).tokenizer
  export_model(tmp_path / 'model', tmp_path / 'exported')
  after = _import(tmp_path / 'exported').tokenizer
  assert vocabulary(after) == vocabulary(before)
  after.add_tokens(['text'])
  assert vocabulary(after) != vocabulary(before)


def test_rows_that_no_token_has_are_padding(tmp_path: Path):
  exported, count = _export(tmp_path, 'llama-3'), 200
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


def test_rows_that_pad_a_vocabulary_are_the_mean_of_the_others(tmp_path):
  # Of rows of zeros, GPT-2's logits would be above those of all tokens.
  exported = _export(tmp_path, 'gpt2')
  rows = _import(exported).params['token_embedding']['embedding']
  expected = np.tile(rows[:_NUM_TOKENS].mean(axis=0), (50, 1))
  np.testing.assert_allclose(rows[_NUM_TOKENS:], expected, rtol=1e-5)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path):
  exported = _export(tmp_path, 'llama')
  train_tokenizer([_TEXT], 280).save(str(exported / 'tokenizer.json'))
  _assert_refused(exported, 'identifiers up to 279: .* below 270')


def test_qk_norm_cannot_be_exported(tmp_path: Path):
  _save(tmp_path / 'model', dataclasses.replace(_GPT2, qk_norm=True))
  with pytest.raises(UsageError, match='Neither .* has qk_norm'):
    export_model(tmp_path / 'model', tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_the_names_and_constants_of_gpt2s_own_weights_are_read(tmp_path: Path):
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
    ('gpt2', {'n_layer': '2'}, 'n_layer.* expected int, got str'),
    ('gpt2', {'activation_function': 'gelu'}, 'activation_function must be'),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}, 'must be False'),
    ('gpt2', {'n_inner': None}, r'mlp.c_fc.bias is F32\[24\], .*\[64\]'),
    ('llama', {'attention_bias': True}, 'attention_bias must be False'),
    (
      'llama',
      {'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}},
      "llama3, got 'yarn'",
    ),
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
  _assert_refused(exported, r'no model\.safetensors .* pickles')


def test_transformers_reads_what_is_exported(tmp_path: Path):
  exported = _export(tmp_path, 'llama-3')
  config = transformers.AutoConfig.from_pretrained(exported)
  assert config.rope_parameters == {
    'rope_type': 'llama3', 'rope_theta': 100.0, **_SCALING,
  }  # fmt: skip
  assert config.architectures == ['LlamaForCausalLM']
  assert config.eos_token_id == config.bos_token_id == 0
  with safetensors.safe_open(exported / 'model.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt'}  # Some versions insist on it.
  theirs = transformers.AutoTokenizer.from_pretrained(exported)
  assert theirs.bos_token == theirs.eos_token == '<|endoftext|>'
  ours = load_model(tmp_path / 'model').tokenizer
  ids = ours.encode(_TEXT).ids
  assert theirs(_TEXT)['input_ids'] == ids
  assert theirs.decode(ids) == ours.decode(ids, False)


def test_rotary_positions_of_most_llamas_on_the_hub_are_read(tmp_path: Path):
  exported = _export(tmp_path, 'llama-3')
  settings = _read(exported / 'config.json')
  del settings['rope_parameters']
  # As transformers 4 wrote them.
  settings |= {
    'rope_theta': 500000,
    'rope_scaling': {'rope_type': 'llama3', **_SCALING},
  }
  (exported / 'config.json').write_text(json.dumps(settings))
  config = _import(exported).config
  assert config == dataclasses.replace(_LLAMA, rope_theta=500_000.0)


def test_export_in_shards_of_bfloat16(tmp_path: Path):
  out = tmp_path / 'exported'
  _save(tmp_path / 'model', _LLAMA)
  export_model(tmp_path / 'model', out, 'bfloat16', '5KB')
  index, found = _read(out / 'model.safetensors.index.json'), {}
  for part in out.glob('model-*.safetensors'):
    arrays = safetensors.numpy.load_file(part)
    assert sum(x.nbytes for x in arrays.values()) <= 5000 or len(arrays) == 1
    found |= dict.fromkeys(arrays, part.name)
    assert {x.dtype for x in arrays.values()} == {np.dtype(jnp.bfloat16)}
  assert len(set(found.values())) > 2
  assert found == index['weight_map']
  assert _read(out / 'config.json')['dtype'] == 'bfloat16'
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(np.float32), _params(_LLAMA)
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
    find_model(Config(init_from=exported))


def test_special_tokens_survive_import_and_export(tmp_path: Path):
  model = load_model(_save(tmp_path / 'model', _LLAMA))
  names = ['<|end|>', '<|begin|>', '<|pad|>', '<|more|>']
  model.tokenizer.add_special_tokens(names)
  save_model(tmp_path / 'model', dataclasses.replace(model, num_tokens=274))
  exported = tmp_path / 'exported'
  export_model(tmp_path / 'model', exported)
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': '<|begin|>',
    'eos_token': {
      'content': '<|end|>',
      'special': True,
      '__type': 'AddedToken',
    },
    'additional_special_tokens': ['<|more|>'],
    'chat_template': '{{ messages }}',
    'model_max_length': 7,  # Of the model that it came with.
  }
  (exported / SETTINGS).write_text(json.dumps(settings))
  more = exported / 'special_tokens_map.json'
  more.write_text(json.dumps({'pad_token': '<|pad|>'}))
  generation = {'eos_token_id': [270, 271], 'temperature': 0.6}
  (exported / GENERATION).write_text(json.dumps(generation))
  model = _import(exported)
  assert model.end_token == '<|end|>'
  again = tmp_path / 'again'
  export_model(tmp_path / 'imported', again)
  assert _read(again / GENERATION) == generation
  theirs = transformers.AutoTokenizer.from_pretrained(again)
  special = theirs.eos_token, theirs.bos_token, theirs.pad_token
  assert [*special, *theirs.extra_special_tokens] == names
  assert theirs.chat_template == '{{ messages }}'
  assert theirs.model_max_length == 16
  ids = dict(bos_token_id=271, eos_token_id=270, pad_token_id=272)
  assert ids.items() <= _read(again / 'config.json').items()
  assert _read(again / 'config.json')['vocab_size'] == 274


@pytest.mark.parametrize('begin', ['', '<|begin|>'])
def test_documents_prompts_and_the_export_begin_alike(tmp_path, begin: str):
  source = train_tokenizer([_TEXT], _NUM_TOKENS)
  if begin:
    source.add_special_tokens([begin])
    number = source.token_to_id(begin)
    template = tokenizers.processors.TemplateProcessing(
      single=f'{begin} $A', special_tokens=[(begin, number)]
    )
    byte_level = tokenizers.processors.ByteLevel(trim_offsets=False)
    source.post_processor = tokenizers.processors.Sequence(
      [byte_level, template]  # As Llama 3 has it.
    )
  source.save(str(tmp_path / 'tokenizer.json'))
  for i in range(9):
    (tmp_path / f'{i}.txt').write_text(f'{_TEXT}{i}')
  prepare.main([
    '--data', *map(str, tmp_path.glob('*.txt')),
    '--tokenizer', str(tmp_path / 'tokenizer.json'),
    '--out-dir', str(tmp_path / 'tokens'), '--validation-share', '0.5',
    '--end-token', '<|endoftext|>', '--cache-dir', str(tmp_path / 'cache'),
  ])  # fmt: skip
  known = read_vocabulary(tmp_path / 'tokens')
  tokens = np.fromfile(tmp_path / 'tokens' / 'train.bin', np.uint16)
  text = known['tokenizer'].decode(tokens, skip_special_tokens=False)
  *documents, rest = text.split('<|endoftext|>')
  assert rest == ''
  assert {x[:-1] for x in documents} == {begin + _TEXT}
  count = known['tokenizer'].get_vocab_size()
  save_model(tmp_path / 'model', Model(_GPT2, count, _params(_GPT2), **known))
  for prompt, start in ((_TEXT[:8], begin), ('', begin or '<|endoftext|>')):
    [found] = generate(tmp_path / 'model', prompt, tokens=1)
    assert found.startswith(start + prompt)
  export_model(tmp_path / 'model', tmp_path / 'exported')
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'exported')
  assert theirs.decode(theirs(_TEXT)['input_ids']) == begin + _TEXT
  assert theirs.bos_token == (begin or '<|endoftext|>')
  assert theirs.model_max_length == _GPT2.context_length
  imported = _import(tmp_path / 'exported').tokenizer
  assert find_begin(imported) == find_begin(known['tokenizer'])


def test_the_model_card_tells_what_is_known(finished: Config, tmp_path: Path):
  run = finished.out_dir
  out = tmp_path / 'exported'
  export_model(run, out)
  card = huggingface_hub.ModelCard.load(out / 'README.md')
  assert card.data.to_dict() == {
    'library_name': 'transformers', 'pipeline_tag': 'text-generation',
  }  # fmt: skip
  facts, metrics = _read(run / 'config.json'), RunFolder(run).read_metrics()
  for known in (
    f'SHA-256 `{facts["data"]["sha256"]}`',
    f'Optimizer: merit, learning rate {finished.learning_rate:.4g}',
    f'Trained on: {metrics[-1]["tokens"]:,} tokens, {finished.steps} steps',
    f'Validation loss: {metrics[-1]["val_loss"]:.4f}',
    f'jax {jax.__version__}',
    '`<|endoftext|>` after each',
    'License: to be filled in',
  ):
    assert known in card.text
  assert f'`{command(finished)}`' in card.text
  export_model(run, tmp_path / 'earlier', step=4)
  earlier = (tmp_path / 'earlier' / 'README.md').read_text()
  assert f'Trained on: {metrics[3]["tokens"]:,} tokens, 4 steps' in earlier


@hypothesis.given(
  st.fixed_dictionaries(
    {},
    optional=dict(
      data=st.tuples(st.sampled_from(["a's text.txt", 'tokens:0.5'])),
      learning_rate=st.floats(1e-9, 1e9),
      batch_ramp=st.just(('4:2', '8:3')),
      untied_head=st.booleans(),
      out_dir=st.just(Path('elsewhere')),
    ),
  ),
  st.sampled_from(['demo', 'llama-130m']),
)
def test_the_command_of_a_card_gives_the_same_numbers(settings, preset: str):
  config = change(PRESETS[preset], **settings)
  *_, module, rest = command(config).split(' ', 3)
  found = parse(shlex.split(rest))
  assert module == 'examples.gpt2.train'
  assert identity(found) == identity(config)
  assert found.data == config.data


@pytest.mark.parametrize('kind', ['gpt2-untied', 'llama-3'])
def test_a_model_to_start_from_gives_the_settings(tmp_path: Path, kind: str):
  model = _CONFIGS[kind]
  preset = PRESETS['llama-3-8b']
  start = change(preset, init_from=_save(tmp_path, model), learning_rate=0.01)
  found = find_model(start).config
  assert found == model
  config = dataclasses.replace(
    resolve(start, None, found).model,
    vocab_size=padded_vocab_size(_NUM_TOKENS),
  )
  free = {x: vars(model)[x] for x in ('unroll', 'remat', 'init_std')}
  assert dataclasses.replace(config, **free) == model
  other = change(start, num_layers=7, context_length=5)
  message = '--num-layers 7 instead of 2'
  if model.architecture == 'gpt2':
    message += '.*--context-length 5 instead of 16'
  else:
    shorter = change(start, context_length=5)
    assert resolve(shorter, None, found).model.context_length == 5
  with pytest.raises(UsageError, match=message):
    resolve(other, None, found)


def test_a_folder_that_is_not_empty_is_kept(tmp_path, capsys):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / 'mine.txt').write_text('mine')
  source = _save(tmp_path / 'model', _GPT2)
  for name in ('export', 'import'):
    with pytest.raises(SystemExit) as caught:
      main([name, str(source), str(tmp_path / 'out')])
    assert caught.value.code == 2
    assert 'there and not empty' in capsys.readouterr().err
  assert [p.name for p in (tmp_path / 'out').iterdir()] == ['mine.txt']


def test_without_transformers_the_command_says_how_to_get_it(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(convert.sys.modules, 'transformers', None)
  with pytest.raises(UsageError, match=r"pip install -e '\.\[convert\]'"):
    _export(tmp_path, 'gpt2')
