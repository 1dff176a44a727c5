"""The folder of a run: its settings and its metrics."""

import contextlib
import fcntl
import json
from pathlib import Path
from typing import Any, Self
import warnings

import numpy as np

from examples.gpt2.command import UsageError, describe_changes, os_errors
from examples.gpt2.config import ROLES, Config, batch_sizes, change
from examples.gpt2.processes import on_process_0
from examples.gpt2.schedules import learning_rates
from examples.gpt2.storage import (
  as_path,
  is_remote,
  make_folder,
  write_whole,
)

DESCRIPTION, WEIGHTS = 'model.json', 'weights.safetensors'
"""Files of a run that say what its model is; see ``model_files.py``."""
METRICS = 'metrics.jsonl'
_CONFIG, _SAMPLE = 'config.json', 'sample.txt'
# What a run writes besides; without a config.json it is somebody else's.
_OTHERS = (METRICS, _SAMPLE, DESCRIPTION, WEIGHTS, 'checkpoints')


class RunFolder:
  """Reads and writes the files of a run, on a disk or in a store.

  Its methods are for process 0. As a context, which all processes enter, it
  keeps a second run out of a folder on a disk.

  Attributes:
    path: The folder.
    checkpoints: Folder of the checkpoints.
    picture: File of the curves.
    sample: File of the text sample.
  """

  def __init__(self, path: Path):
    self.path = as_path(path)
    self.checkpoints = self.path / 'checkpoints'
    self.picture = self.path / 'curves.png'
    self.sample = self.path / _SAMPLE
    self._lock = contextlib.ExitStack()

  def __enter__(self) -> Self:
    on_process_0(self._open)
    return self

  def __exit__(self, *_: object) -> None:
    self._lock.close()

  def _open(self) -> None:
    """Makes the folder and locks it."""
    try:
      make_folder(self.path)
      if not is_remote(self.path):
        file = self._lock.enter_context((self.path / '.lock').open('wb'))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UsageError(
        f'--out-dir {self.path} is in use by a run that goes on now.'
      ) from error
    except OSError as error:
      raise UsageError(
        f'--out-dir {self.path} cannot be written: {error}'
      ) from error

  @property
  def finished(self) -> bool:
    """Whether a run ended here: the sample is written last."""
    return self.sample.is_file()

  @os_errors()
  def start(
    self, config: Config, identity: dict[str, Any], others: dict[str, Any]
  ) -> None:
    """Writes config.json, unless another run is here.

    Args:
      config: Settings.
      identity: What decides the numbers of the run, as JSON values.
      others: What config.json holds beside it, as JSON values.

    Raises:
      UsageError: If the folder holds another run, or something else with a name
        that a run writes.
    """
    if (self.path / _CONFIG).exists():
      self._check_same(config, identity)
    elif found := [x for x in _OTHERS if (self.path / x).exists()]:
      raise self._refusal(f'{", ".join(found)} of something else')
    if not self.finished:
      text = json.dumps({'config': identity, **others}, indent=2)
      write_whole(self.path / _CONFIG, text.encode())

  def _check_same(self, config: Config, identity: dict[str, Any]) -> None:
    """Raises ``UsageError`` unless the run here goes on with these settings."""
    schedule = [k for k, role in ROLES.items() if role == 'schedule']
    try:
      old = dict(self.read_settings()['config'])
      before = change(config, **{x: old[x] for x in schedule})
    except (ValueError, TypeError, KeyError) as error:
      raise self._refusal(
        f'a {_CONFIG} that no run of this trainer wrote, or a damaged one'
      ) from error
    changes, steps = describe_changes(old, identity), saved_steps(self.path)
    # Without the first state, nothing has been computed.
    if not changes or not steps:
      return
    others = (old | identity).keys() - {*schedule}
    if any(old.get(k) != identity.get(k) for k in others):
      raise self._refusal(f'a run with other settings ({changes})')
    if config.steps < max(steps):
      raise self._refusal(f'a run that has done {max(steps)} steps ({changes})')
    self._check_same_past(before, config, max(steps), changes)
    # Else they would be taken for those of the longer run.
    for name in (_SAMPLE, WEIGHTS):
      (self.path / name).unlink(missing_ok=True)

  def _check_same_past(
    self, before: Config, now: Config, done: int, changes: str
  ) -> None:
    """Raises ``UsageError`` if a step that is done had another rate or size."""
    for what, count in (
      ('the learning rate', learning_rates),
      ('a batch of', batch_sizes),
    ):
      old, new = count(before)[:done], count(now)[:done]
      (different,) = np.nonzero(old != new)
      if not different.size:
        continue
      step = int(different[0])
      advice = 'Another ramp is for the steps that are left'
      if count is learning_rates:
        advice = (
          'A run can be made longer while its rates do not depend on --steps, '
          'before the decay of --schedule wsd, with --warmup in steps (it has '
          f'--warmup {before.warmup:g} --learning-rate '
          f'{before.learning_rate:g})'
        )
      raise self._refusal(
        f'a run with other settings ({changes}): its step {step + 1} had {what}'
        f' {old[step]:.6g}, now {new[step]:.6g}. {advice}; else --fork-from '
        'makes a run of its own from a checkpoint'
      )

  def _refusal(self, what: str) -> UsageError:
    return UsageError(
      f'--out-dir {self.path} holds {what}: choose another folder.'
    )

  @os_errors()
  def keep_metrics(self, step: int, fork_from: Path | None = None) -> int:
    """Cuts off the lines of metrics.jsonl after a step, also torn ones.

    Args:
      step: Last step to keep.
      fork_from: Folder of a run whose lines to take, if there are none here.

    Returns:
      The tokens of all steps up to that one, 0 if that is not known.
    """
    lines = self.read_metrics()
    if not lines and fork_from is not None:
      lines = read_metrics(as_path(fork_from) / METRICS)
    kept = {line['step']: line for line in lines if line['step'] <= step}
    if len(kept) < step:
      warnings.warn(
        f'{self.path / METRICS} has lost {step - len(kept)} of the lines up '
        f'to step {step}.',
        stacklevel=4,
      )
    write_whole(
      self.path / METRICS, ''.join(map(as_line, kept.values())).encode()
    )
    return kept[step]['tokens'] if step in kept else 0

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, but for damaged ones."""
    return read_metrics(self.path / METRICS)

  def read_settings(self) -> dict[str, Any]:
    """Returns what config.json holds."""
    return json.loads((self.path / _CONFIG).read_text())

  def finish(self, sample: str) -> None:
    """Writes the sample, which marks the run as finished."""
    write_whole(self.sample, sample.encode())


def saved_steps(run: Path) -> list[int]:
  """Returns the steps of which there are checkpoints, also unfinished ones."""
  folder = run / 'checkpoints'
  names = [x.name for x in folder.iterdir()] if folder.exists() else []
  return [int(name) for name in names if name.isdecimal()]


def as_line(metrics: dict[str, Any]) -> str:
  """Returns the metrics of a step as a line of JSON."""
  # JSON has no numbers that are not finite: they become null.
  finite = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
  return json.dumps(finite) + '\n'


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Returns the lines of a file of metrics, but for damaged ones."""
  try:
    with os_errors():
      text = path.read_bytes().decode(errors='replace')
  except FileNotFoundError:
    return []
  lines = []
  for line in text.splitlines():
    with contextlib.suppress(ValueError):
      lines.append(json.loads(line))
  return [x for x in lines if isinstance(x, dict) and _counts(x)]


def _counts(line: dict[str, Any]) -> bool:
  # Another value is of somebody who has edited the file.
  return all(type(line.get(name)) is int for name in ('step', 'tokens'))
