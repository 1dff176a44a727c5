import dataclasses
import math
from pathlib import Path
import shutil

from flax import nnx
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.corpus import load_corpus
from examples.gpt2.data.tokenizer import (
  END_OF_TEXT,
  encode,
  train_tokenizer,
)
from examples.gpt2.evaluate import evaluate, main
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.files import Model, load_model, save_model
from examples.gpt2.model.transformer import Transformer, as_module

_CONFIG = ModelConfig(
  vocab_size=320, context_length=8, num_layers=1, num_heads=2, width=16,
  mlp_width=32,
)  # fmt: skip


def _params(config: ModelConfig) -> nnx.State:
  return nnx.as_pure(nnx.state(Transformer(config, rngs=nnx.Rngs(0))))


@pytest.fixture(scope='module')
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp('text') / 'text.txt'
  generator = np.random.default_rng(0)
  words = generator.choice(['ein', 'zwei', 'drei', 'fünf'], size=3000)
  path.write_text(' '.join(words))
  return path


@pytest.fixture(scope='module')
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A model with a tokenizer; it is not to be changed."""
  path = tmp_path_factory.mktemp('model')
  tokenizer = train_tokenizer([text.read_text()], 270)
  params = jax.tree.map(lambda x: 5 * x, _params(_CONFIG))
  save_model(
    path, Model(_CONFIG, tokenizer.get_vocab_size(), params, tokenizer)
  )
  return path


def _held_out(folder: Path, text: Path) -> np.ndarray:
  """Returns the tokens of the held-out part."""
  tokenizer = load_model(folder).tokenizer
  texts = load_corpus([str(text)]).texts('val')
  return np.concatenate([*encode(tokenizer, END_OF_TEXT, texts)])


def _write_token_files(folder: Path, tokens: np.ndarray) -> str:
  tokens.astype(np.uint16).tofile(folder / 'val.bin')
  return str(folder)


def _losses(folder: Path, sequences: np.ndarray) -> np.ndarray:
  """Returns the losses of targets in some sequences, from all logits."""
  model = load_model(folder)
  logits = as_module(model.config, model.params)(sequences[:, :-1].astype(int))
  log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
  return -np.take_along_axis(log_p, sequences[:, 1:, None], axis=-1)[..., 0]


def _loss(folder: Path, tokens: np.ndarray, length: int, count: int) -> float:
  """Returns the loss of some sequences, spread over a text."""
  available = (len(tokens) - 1) // length
  starts = np.arange(count) * available // count * length
  sequences = np.stack([tokens[i : i + length + 1] for i in starts])
  return _losses(folder, sequences).mean()


@pytest.mark.parametrize(
  ('micro_batch_size', 'mesh', 'length'),
  [(1, 'tensor=2,fsdp=2', None), (3, 'fsdp=8', None), (8, '', 5)],
)
def test_loss_is_that_of_the_held_out_text(
  folder: Path, text: Path, micro_batch_size: int, mesh: str, length: int | None
):
  found = evaluate(
    folder,
    str(text),
    held_out=True,
    context_length=length,
    sequences=7,
    micro_batch_size=micro_batch_size,
    mesh=mesh,
  )
  expected = _loss(folder, _held_out(folder, text), length or 8, 7)
  assert found.loss == pytest.approx(expected, abs=1e-5)
  assert (found.num_sequences, found.num_tokens) == (7, 7 * (length or 8))


def test_bits_per_byte_count_the_bytes_of_the_text(folder: Path, text: Path):
  evaluation = evaluate(folder, str(text), held_out=True)
  tokens = _held_out(folder, text)
  document = ''.join(load_corpus([str(text)]).texts('val'))
  assert len(document.encode()) > len(document)
  expected = evaluation.loss * len(tokens) / len(document.encode())
  assert evaluation.bits_per_byte == pytest.approx(expected / math.log(2))


def test_token_files_are_measured_as_their_text(folder, text, tmp_path):
  expected = evaluate(folder, str(text), held_out=True)
  data = _write_token_files(tmp_path, _held_out(folder, text))
  for held_out in (False, True):
    evaluation = evaluate(folder, data, held_out=held_out)
    assert evaluation == expected._replace(bits_per_byte=None)
  with pytest.raises(UsageError, match='a file of tokens has no part'):
    evaluate(folder, f'{data}/val.bin', held_out=True)
  Path(data, 'val.bin').rename(Path(data, 'train.bin'))
  with pytest.raises(UsageError, match='token files, but no val.bin'):
    evaluate(folder, data)


@pytest.mark.parametrize(
  ('stride', 'count'), [(1, 30), (3, 9), (3, 33), (8, 8), (8, 30), (8, 33)]
)
def test_every_token_counts_once(folder, tmp_path, stride, count):
  tokens = np.random.default_rng(0).integers(270, size=count)
  found = evaluate(folder, _write_token_files(tmp_path, tokens), stride=stride)
  length, losses = min(8, count - 1), {}
  for end in [*range(length, count - 1, stride), count - 1]:
    window = tokens[end - length : end + 1]
    for i, loss in enumerate(_losses(folder, window[None])[0]):
      losses.setdefault(end - length + 1 + i, loss)
  assert sorted(losses) == list(range(1, count))
  assert found.num_tokens == count - 1
  assert found.loss == pytest.approx(np.mean([*losses.values()]), abs=1e-5)


def test_the_text_of_the_run_is_named(finished, capsys):
  evaluate(finished.out_dir, finished.data[0])
  assert '--held-out measures' in capsys.readouterr().err
  part = Path(finished.data[0]).with_name('text')  # A part of the name.
  part.write_text(Path(finished.data[0]).read_text())
  evaluate(finished.out_dir, str(part))
  evaluate(finished.out_dir, finished.data[0], held_out=True)
  found = capsys.readouterr().err
  assert '--held-out measures' not in found
  assert 'may have seen' not in found
  # Of another text, or the same after a change, another part is held out.
  part.write_text(part.read_text() + 'More.')
  evaluate(finished.out_dir, str(part), held_out=True)
  assert 'may have seen what is held out' in capsys.readouterr().err


def test_a_text_beside_files_of_others_is_a_text(finished: Config, tmp_path):
  run = tmp_path / 'run'
  shutil.copytree(finished.out_dir, run)
  texts = tmp_path / 'texts'
  texts.mkdir()
  shutil.copy(finished.data[0], texts / 'text.txt')
  (texts / 'index.json').write_text('{"pages": []}')
  expected = evaluate(run, str(texts), held_out=True)
  for content in ('', '[]', '{"corpus": null}'):
    (run / 'config.json').write_text(content)
    assert evaluate(run, str(texts), held_out=True) == expected
  whole = evaluate(run, str(texts / 'text.txt'))
  assert whole.num_tokens > expected.num_tokens


def test_a_longer_context_needs_rotary_positions(folder, text, tmp_path):
  with pytest.raises(UsageError, match='must be at most 8, .* got 9'):
    evaluate(folder, str(text), context_length=9)
  llama = dataclasses.replace(_CONFIG, architecture='llama')
  tokenizer = load_model(folder).tokenizer
  save_model(tmp_path, Model(llama, 270, _params(llama), tokenizer))
  found = evaluate(tmp_path, str(text), context_length=9, sequences=4)
  assert found.num_tokens == 36


def test_the_result_is_printed(folder, text, capsys):
  main([str(folder), '--data', str(text), '--held-out', '--sequences', '7'])
  printed = ' '.join(capsys.readouterr().out.split())
  expected = _loss(folder, _held_out(folder, text), 8, 7)
  assert printed.startswith(
    f'loss {expected:.4f} nats per token perplexity {math.exp(expected):.4g} '
    'measured on 7 sequences, 56 tokens bits per byte '
  )


@pytest.mark.parametrize(
  ('tokens', 'settings', 'message'),
  [
    ([], {'sequences': 0}, '--sequences must be at least 1, got 0'),
    ([], {'context_length': 0}, '--context-length must be at least 1, got 0'),
    ([], {'micro_batch_size': 0}, '--micro-batch-size must be at least 1, got'),
    ([], {'stride': 0}, '--stride must be at least 1, got 0'),
    ([], {'stride': 9}, 'at most the context length 8, got 9'),
    ([], {'stride': 2, 'sequences': 2}, 'leave out one'),
    ([270] * 20, {}, 'holds the token 270, .* has 270'),
    ([1] * 8, {'context_length': 8}, 'val .* 8 tokens, too few .* 8'),
    ([1], {}, 'val .* 1 tokens, too few'),
  ],
)
def test_settings_and_tokens_that_do_not_fit_are_refused(
  folder: Path, tmp_path: Path, tokens: list[int], settings: dict, message: str
):
  data = _write_token_files(tmp_path, np.array(tokens))
  with pytest.raises(UsageError, match=message):
    evaluate(folder, data, **settings)


def test_text_needs_a_tokenizer(folder: Path, text: Path, tmp_path: Path):
  model = load_model(folder)
  save_model(tmp_path, dataclasses.replace(model, tokenizer=None))
  with pytest.raises(UsageError, match='there is no tokenizer'):
    evaluate(tmp_path, str(text))
