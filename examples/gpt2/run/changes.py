"""What may change when a run goes on from its checkpoints."""

import dataclasses
from typing import Any

import jax
import numpy as np

from examples.gpt2.config import Config, describe_changes, flag
from examples.gpt2.optim.optimizers import make_schedule

# They change nothing that is computed.
_FREE = ('eval_every',)
# They may change where this changes no learning rate of a step that is done.
_SCHEDULE = (
  'steps', 'learning_rate', 'schedule', 'warmup_share', 'warmup_steps',
  'decay_steps', 'decay_shape', 'min_rate',
)  # fmt: skip


def refusal(old: dict[str, Any], new: dict[str, Any], done: int) -> str:
  """Returns why a run is another one with new settings, '' if it is not.

  Args:
    old: Settings of the run, as :func:`examples.gpt2.presets.identity` has
      them.
    new: Those with which it is to go on.
    done: Steps that it has done.
  """
  changes = _changes(old, new, _FREE)
  if not changes:
    return ''
  if not done or _changes(old, new, _FREE + _SCHEDULE):
    return f'a run with other settings ({changes})'
  if new['steps'] < done:
    return f'a run that has done {done} steps, more than --steps {new["steps"]}'
  before, now = (_learning_rates(x, done) for x in (old, new))
  different = np.flatnonzero(before != now)
  if not different.size:
    return ''
  step = int(different[0])
  hints = ' '.join(
    f'{flag(name)} {old[name]}' for name in _SCHEDULE[1:] if name in old
  )
  return (
    f'a run with other settings ({changes}), whose step {step + 1} had the '
    f'learning rate {before[step]:.6g}, now {now[step]:.6g}. A run can be made '
    'longer while its rates do not depend on --steps, as before the decay of '
    f'--schedule wsd, with --warmup-steps (it has {hints}); else --fork-from '
    'makes a run of its own from a checkpoint'
  )


def _changes(
  old: dict[str, Any], new: dict[str, Any], but: tuple[str, ...]
) -> str:
  """Returns which settings differ, but for some."""
  # Settings leave out some defaults.
  usual = {name: getattr(Config, name) for name in _SCHEDULE}
  compared = [
    {k: x for k, x in (usual | settings).items() if k not in but}
    for settings in (old, new)
  ]
  return describe_changes(*compared)


def _learning_rates(settings: dict[str, Any], steps: int) -> np.ndarray:
  known = {name: settings[name] for name in _SCHEDULE if name in settings}
  config: Any = dataclasses.replace(Config(), **known)
  schedule = make_schedule(config)
  return np.asarray(jax.vmap(schedule)(np.arange(steps)))
