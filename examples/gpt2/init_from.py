"""What a run starts from: a model, the state of another run, or a seed."""

from pathlib import Path
from typing import Any

from examples.gpt2.checkpoints import Checkpoints
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, padded_vocab_size
from examples.gpt2.data import Data
from examples.gpt2.model_files import (
  Model,
  find_step,
  load_model,
  read_description,
)
from examples.gpt2.run_folder import saved_steps
from examples.gpt2.step import Trainer, TrainState
from examples.gpt2.storage import as_path
from examples.gpt2.tokenizer import read_shared, vocabulary


def find_model(config: Config) -> Model | None:
  """Returns the model that a run starts from, without weights, or None.

  It is that of ``--init-from`` or ``--fork-from``, or its copy in ``--out-dir``
  where the run goes on.
  """
  source = config.init_from or config.fork_from
  if source is None:
    return None
  folder = as_path(source)
  if config.out_dir is not None and saved_steps(as_path(config.out_dir)):
    folder = as_path(config.out_dir)
  return read_description(folder)


def find_vocabulary(
  config: Config, data: Data, model: Model | None
) -> dict[str, Any]:
  """Returns the tokenizer of a run: of the data, or what the run starts from.

  Raises ``UsageError`` if that has another vocabulary or tokenizer than the
  data.
  """
  found = read_shared(data.folders, data.vocab_size)
  if model is None:
    return found
  rows = padded_vocab_size(data.vocab_size)
  tokenizer = found.get('tokenizer')
  known = [vocabulary(x) for x in (model.tokenizer, tokenizer) if x]
  if len(set(known)) > 1 or rows != model.config.vocab_size:
    folder = config.init_from or config.fork_from
    raise UsageError(
      f'{folder} has another tokenizer than --data {" ".join(config.data)} '
      f'(with {model.config.vocab_size} and {rows} tokens, rounded up): make '
      'tokens with it, by python -m examples.gpt2.prepare --tokenizer '
      f'{folder}.'
    )
  if tokenizer is not None:
    return found
  return {
    'tokenizer': model.tokenizer,
    'end_token': model.end_token,
    'companions': model.companions,
  }


def first_state(config: Config, trainer: Trainer) -> TrainState:
  """Returns the state that a run without checkpoints starts from.

  Raises ``UsageError`` if what it is to start from cannot be used.
  """
  if config.init_from is not None:
    model = load_model(
      config.init_from, trainer.mesh, config.from_step, '--from-step'
    )
    return trainer.init()._replace(params=model.params)
  if config.fork_from is not None:
    return _forked_state(as_path(config.fork_from), config.from_step, trainer)
  return trainer.init()


def _forked_state(folder: Path, step: int | None, trainer: Trainer) -> Any:
  with Checkpoints(folder / 'checkpoints', read_only=True) as checkpoints:
    found = find_step(folder, checkpoints, step, '--from-step')
    return checkpoints.read(found, trainer.shapes)
