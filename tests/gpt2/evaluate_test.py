import json
import math
from pathlib import Path
import shutil

from flax import nnx
import jax
import numpy as np
import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import ModelConfig, complete
from examples.gpt2.evaluate import evaluate, main
from examples.gpt2.model import Transformer, as_module
from examples.gpt2.model_files import Model, load_model, save_model
from examples.gpt2.prepare import read_text
from examples.gpt2.tokenizer import (
  END_OF_TEXT,
  train_tokenizer,
)

_CONFIG = complete(ModelConfig(
  vocab_size=320, context_length=8, num_layers=1, num_heads=2, width=16,
  mlp_width=32,
))  # fmt: skip


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


def _tokens(folder: Path, text: Path) -> np.ndarray:
  tokenizer = load_model(folder).tokenizer
  tokens, _ = read_text(str(text), 'text', tokenizer, END_OF_TEXT)
  return tokens


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
  [(1, 'tensor=2,fsdp=2', None), (8, '', 5)],
)
def test_the_command_measures_a_text(
  folder, text, micro_batch_size, mesh, length, capsys
):
  flags = [f'--mesh={mesh}', f'--micro-batch-size={micro_batch_size}']
  if length is not None:
    flags.append(f'--context-length={length}')
  data = ['--data', str(text), '--sequences=7']
  main([str(folder), *data, *flags])
  printed = ' '.join(capsys.readouterr().out.split())
  expected = _loss(folder, _tokens(folder, text), length or 8, 7)
  assert printed.startswith(
    f'loss {expected:.4f} nats per token perplexity {math.exp(expected):.4g} '
    f'measured on 7 sequences, {7 * (length or 8)} tokens bits per byte '
  )


def test_bits_per_byte_count_the_bytes_of_the_text(folder: Path, text: Path):
  evaluation = evaluate(folder, str(text))
  tokens = _tokens(folder, text)
  document = text.read_text()
  assert len(document.encode()) > len(document)
  expected = evaluation.loss * len(tokens) / len(document.encode())
  assert evaluation.bits_per_byte == pytest.approx(expected / math.log(2))


def test_token_files_are_measured_as_their_text(folder, text, tmp_path):
  expected = evaluate(folder, str(text))
  data = _write_token_files(tmp_path, _tokens(folder, text))
  assert evaluate(folder, data) == expected._replace(bits_per_byte=None)


@pytest.mark.parametrize(
  ('stride', 'count'), [(1, 12), (3, 33), (3, 34), (8, 8)]
)
def test_every_token_counts_once(folder, tmp_path, stride, count):
  tokens = np.random.default_rng(0).integers(270, size=count)
  found = evaluate(folder, _write_token_files(tmp_path, tokens), stride=stride)
  length, losses = min(8, count - 1), {}
  for start in range(0, count - 1, stride):
    window = tokens[start : start + length + 1]
    for i, loss in enumerate(_losses(folder, window[None])[0], start + 1):
      losses.setdefault(i, loss)
  assert sorted(losses) == list(range(1, count))
  assert found.num_tokens == count - 1
  assert found.loss == pytest.approx(np.mean([*losses.values()]), abs=1e-5)


def test_a_run_that_mixed_sources_needs_one_to_be_named(folder, tmp_path):
  text = json.dumps({'data': {'folders': ['web', 'code']}})
  run = tmp_path / 'run'
  shutil.copytree(folder, run)
  (run / 'config.json').write_text(text)
  with pytest.raises(UsageError, match='--data, out of web, code'):
    evaluate(run)


def test_a_model_without_a_run_needs_data(folder):
  with pytest.raises(UsageError, match='does not tell .*: give --data'):
    evaluate(folder)


@pytest.mark.parametrize(
  ('tokens', 'settings', 'message'),
  [
    ([], {'sequences': 0}, '--sequences must be at least 1, got 0'),
    ([], {'stride': 9}, 'at most the context length 8, got 9'),
    ([], {'stride': 2, 'sequences': 2}, 'leave out one'),
    ([270] * 20, {}, 'holds the token 270, .* has 270'),
    ([1] * 8, {'context_length': 8}, '8 tokens, too few .* 8'),
  ],
)
def test_settings_and_tokens_that_do_not_fit_are_refused(
  folder: Path, tmp_path: Path, tokens: list[int], settings: dict, message: str
):
  data = _write_token_files(tmp_path, np.array(tokens))
  with pytest.raises(UsageError, match=message):
    evaluate(folder, data, **settings)
