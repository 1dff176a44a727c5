"""What a run starts from: a checkpoint, of another run too, weights, a seed."""

from collections.abc import Callable
import dataclasses
import functools
from pathlib import Path
from typing import Any

from examples.gpt2.config import Config, FittedConfig, UsageError, flag
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices.processes import on_process_0, print_once
from examples.gpt2.model.config import NORM_EPSILON, padded_vocab_size
from examples.gpt2.model.files import Model, read_description
from examples.gpt2.presets import identity
from examples.gpt2.run.folder import recorded
from examples.gpt2.run.restore import Checkpoint
from examples.gpt2.run.step import Trainer, TrainState
from examples.gpt2.run.weights import load_model, weights_sha256
from examples.gpt2.storage import as_path

# Settings that say what a model is.
_MODEL = (
  'architecture', 'num_layers', 'num_heads', 'num_kv_heads', 'head_width',
  'rope_theta', 'rope_scaling', 'width', 'mlp_width', 'context_length',
  'norm_epsilon', 'qk_norm', 'untied_head',
)  # fmt: skip


def with_model(config: Config) -> tuple[Config, Model | None]:
  """Returns settings with those of the model that a run starts from.

  That is the model of ``--init-from`` or ``--fork-from``. It is returned too,
  without weights; or None, if it cannot be read but the run in ``--out-dir``
  says what it is. Raises ``UsageError`` if a setting that is given is another,
  or if there is neither.
  """
  folder = _source(config)
  if folder is None:
    return config, None
  is_set = {x: getattr(config, x) != getattr(Config, x) for x in _MODEL}
  model = None
  try:
    model = read_description(folder)
    found = dict(vars(model.config))
  except UsageError as error:
    found = recorded(config.out_dir, 'config')
    if not found:
      name = 'fork_from' if config.init_from is None else 'init_from'
      raise UsageError(
        f'{flag(name)} cannot be used: {error}{_hint(config)}'
      ) from error
  if model is not None:
    _check_same_model(folder, found, config, is_set)
  missing = {x: found[x] for x in _MODEL if x in found and not is_set[x]}
  # Stored settings leave out what is usual.
  if found.get('norm_epsilon') == NORM_EPSILON.get(
    found.get('architecture', '')
  ):
    missing.pop('norm_epsilon', None)
  return dataclasses.replace(config, **missing), model


def _source(config: Config) -> Path | None:
  """Returns the folder of ``--init-from`` or ``--fork-from``."""
  folder = config.init_from or config.fork_from
  return None if folder is None else as_path(folder)


def _hint(config: Config) -> str:
  """Returns how a run goes on once its source is gone."""
  if config.out_dir is not None:
    return ''
  return (
    ' A run that has checkpoints of its own goes on without it, if --out-dir '
    'names its folder.'
  )


def _check_same_model(
  folder: Path, found: dict[str, Any], config: Config, is_set: dict[str, bool]
) -> None:
  # A Llama has no weights for positions.
  is_llama = found['architecture'] == 'llama'
  changes = [
    f'{flag(x)} {_shown(getattr(config, x))} instead of {_shown(found[x])}'
    for x in _MODEL
    if is_set[x] and getattr(config, x) != found[x]
    if not (is_llama and x == 'context_length')
  ]
  if changes:
    raise UsageError(
      f'{folder} holds another model than the settings say: '
      f'{", ".join(changes)}. They may be left out.'
    )


def _shown(value: Any) -> str:
  """Returns a setting as a command line has it."""
  return ' '.join(map(str, value)) if isinstance(value, tuple) else str(value)


def with_vocabulary(
  config: FittedConfig, tokens: Tokens, model: Model | None
) -> Tokens:
  """Returns tokens with the tokenizer of the model that a run starts from.

  Raises ``UsageError`` if that has another vocabulary or tokenizer than the
  data.
  """
  if model is None:
    return tokens
  rows = padded_vocab_size(tokens.vocab_size)
  known = [x.to_str() for x in (model.tokenizer, tokens.tokenizer) if x]
  if len(set(known)) > 1 or rows != model.config.vocab_size:
    folder = _source(config)
    raise UsageError(
      f'{folder} has another tokenizer than --data '
      f'{config.data} (with {model.config.vocab_size} and {rows} tokens, '
      'rounded up): make tokens with it, by python -m examples.gpt2.prepare '
      f'--tokenizer {folder}.'
    )
  if tokens.tokenizer is not None:
    return tokens
  return dataclasses.replace(
    tokens,
    tokenizer=model.tokenizer,
    end_token=model.end_token,
    companions=model.companions,
  )


def origin(config: FittedConfig) -> dict[str, Any]:
  """Returns hashes of what a run starts from, to be known by.

  If that is gone, since another run has deleted its checkpoint meanwhile, they
  are those that the run in ``--out-dir`` has written of the same step. Raises
  ``UsageError`` if there is neither.
  """
  known = on_process_0(recorded, config.out_dir, 'config')
  found: dict[str, Any] = {'init_sha256': None}
  if config.init_from is not None:
    is_same = known.get('init_step') == config.init_step
    found['init_sha256'] = _unless_gone(
      functools.partial(weights_sha256, config.init_from, config.init_step),
      known.get('init_sha256') if is_same else None,
      config,
    )
  if config.init_step is not None:
    found['init_step'] = config.init_step
  if config.fork_from is not None:
    fork = known.get('fork', {})
    is_same = fork.get('step') == config.fork_step
    sha256 = _unless_gone(
      functools.partial(_state_sha256, config.fork_from, config.fork_step),
      fork.get('sha256') if is_same else None,
      config,
    )
    found['fork'] = {'step': config.fork_step, 'sha256': sha256}
  return found


def _state_sha256(run: Path, step: int | None) -> str:
  return Checkpoint(run, step, '--fork-step').sha256()


def _unless_gone(
  read: Callable[[], str], known: str | None, config: Config
) -> str:
  """Returns what process 0 reads or, if that is not there, what is known."""
  try:
    return on_process_0(read)
  except UsageError as error:
    if known is None:
      raise UsageError(f'{error}{_hint(config)}') from error
    return known


def initial_state(
  config: FittedConfig, trainer: Trainer, source: Model | None
) -> TrainState | None:
  """Returns the state that a run starts from, None for that of its seed.

  That is the one of ``--fork-from``, or has the weights of ``--init-from``.
  Raises ``UsageError`` if it cannot be used.
  """
  folder = _source(config)
  if folder is None:
    return None
  if source is None:
    read_description(folder)  # Says what is wrong with it.
  if config.fork_from is not None:
    return _forked_state(config, trainer, folder)
  model = load_model(folder, trainer.mesh, config.init_step, '--init-step')
  return trainer.init()._replace(params=model.params)


def _forked_state(
  config: FittedConfig, trainer: Trainer, folder: Path
) -> TrainState:
  theirs = on_process_0(recorded, folder, 'config').get('optimizer')
  ours = identity(config)['optimizer']
  if theirs not in (None, ours):
    raise UsageError(
      f'--fork-from {folder} is a run of --optimizer {theirs}, got '
      f'--optimizer {ours}: a fork goes on with the state of its optimizer, '
      '--init-from with the weights alone.'
    )
  checkpoint = Checkpoint(folder, config.fork_step, '--fork-step')
  state = checkpoint.state(trainer.shapes)
  print_once(f'going on after step {checkpoint.step} of {folder}')
  return state
