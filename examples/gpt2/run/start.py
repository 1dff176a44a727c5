"""What a run starts from: a checkpoint, of another run too, weights, a seed."""

from collections.abc import Callable
import contextlib
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
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.folder import RunFolder
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

  That is the model of ``--init-from`` or ``--fork-from``, which is returned
  too, without weights, if it is there. Raises ``UsageError`` if a setting that
  is given is another, or if neither that nor the run in ``--out-dir`` says what
  the model is.
  """
  folder = config.init_from or config.fork_from
  if folder is None:
    return config, None
  is_set = {x: getattr(config, x) != getattr(Config, x) for x in _MODEL}
  model = None
  try:
    model = read_description(folder)
    found = dict(vars(model.config))
  except UsageError as error:
    # Of a run of 0.2.0 that has not ended, or of what is gone since.
    found = _recorded(folder) or _recorded(config.out_dir)
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
      f'{as_path(folder)} holds another model than the settings say: '
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
    folder = as_path(config.init_from or config.fork_from or '')
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
  known = on_process_0(_recorded, config.out_dir)
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
      lambda: _forked(config).sha256(),
      fork.get('sha256') if is_same else None,
      config,
    )
    found['fork'] = {'step': config.fork_step, 'sha256': sha256}
  return found


def _recorded(run: Path | None) -> dict[str, Any]:
  """Returns the settings of the run in a folder, nothing without one."""
  if run is None:
    return {}
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    return dict(RunFolder(run).read_settings()['config'])
  return {}


def _unless_gone(
  read: Callable[[], str], known: str | None, config: Config
) -> str:
  """Returns what is read or, if that is not there, what is known of it."""
  try:
    return read()
  except UsageError as error:
    if known is None:
      raise UsageError(f'{error}{_hint(config)}') from error
    return known


def _forked(config: FittedConfig) -> Checkpoint:
  # Without a step it would be another one as soon as that run has gone on.
  assert config.fork_from is not None
  if config.fork_step is None:
    raise UsageError(
      f'--fork-from {as_path(config.fork_from)} needs --fork-step, the step of '
      'one of its checkpoints.'
    )
  return Checkpoint(config.fork_from, config.fork_step, '--fork-step')


def initial_state(
  config: FittedConfig, trainer: Trainer, params: Any, checkpoints: Checkpoints
) -> TrainState:
  """Returns the state that a run goes on from.

  That is its newest sound checkpoint, else that of ``--fork-from``, else the
  weights given, else those of the seed. Raises ``UsageError`` if there are
  checkpoints but none is sound.
  """
  found = checkpoints.restore(trainer.shapes)
  if found is not None:
    print_once(f'going on after step {found[0]}, from its checkpoint')
    return found[1]
  if config.fork_from is not None:
    checkpoint = _forked(config)
    source = as_path(config.fork_from)
    print_once(f'going on after step {checkpoint.step} of {source}')
    return checkpoint.state(trainer.shapes)
  state = trainer.init()
  return state if params is None else state._replace(params=params)


def check_fork(config: FittedConfig, trainer: Trainer) -> None:
  """Raises ``UsageError`` if ``--fork-from`` has the state of another run."""
  if config.fork_from is None:
    return
  checkpoint = _forked(config)
  theirs = on_process_0(_recorded, config.fork_from).get('optimizer')
  ours = identity(config)['optimizer']
  if theirs not in (None, ours):
    raise UsageError(
      f'--fork-from {as_path(config.fork_from)} is a run of --optimizer '
      f'{theirs}, got --optimizer {ours}: a fork goes on with the state of its '
      'optimizer, --init-from with the weights alone.'
    )
  checkpoint.check(trainer.shapes)


def initial_params(config: FittedConfig, trainer: Trainer) -> Any:
  """Returns the weights of ``--init-from``, None without it.

  Raises ``UsageError`` if they cannot be used.
  """
  if config.init_from is None:
    return None
  return load_model(
    config.init_from, trainer.mesh, config.init_step, '--init-step'
  ).params
