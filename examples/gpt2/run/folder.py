"""The folder of a run: its settings, metrics and results."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any
import warnings

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import COMPANIONS
from examples.gpt2.devices.processes import (
  is_process_0,
  on_process_0,
  print_once,
)
from examples.gpt2.run.changes import refusal
from examples.gpt2.run.checkpoint_folder import CheckpointFolder
from examples.gpt2.run.claim import FileLock, Lease, claim
from examples.gpt2.run.metrics import metrics_file, read_metrics
from examples.gpt2.storage import (
  as_path,
  make_folder,
  move,
  os_errors,
  unused_path,
  write_whole,
)

_CONFIG = 'config.json'
_METRICS = 'metrics.jsonl'
_SAMPLE = 'sample.txt'
_PICTURE = 'curves.png'
_WEIGHTS = 'weights.safetensors'
_RESULTS = (
  _METRICS, 'model.json', _WEIGHTS, _PICTURE, _SAMPLE,
)  # fmt: skip
# What only the end of a run writes.
_ENDS = _RESULTS[1:]
# What makes a run finished; if its metrics are lost, it has no picture.
_NEEDED = (_CONFIG, _METRICS, 'model.json', _WEIGHTS, _SAMPLE)
# What a run writes besides; not every run does.
_OTHERS = (
  'tokenizer.json', *COMPANIONS, 'checkpoints', 'damaged-checkpoints', 'hf',
  'tensorboard', 'wandb', 'profile',
)  # fmt: skip


class RunFolder:
  """Reads and writes the files of a run, on a disk or in a store.

  Process 0 does it. All processes call the methods, but for those that say
  otherwise, and an error is raised in all. As a context, it lets other runs
  into the folder at its end.

  A run is finished once its files are there; the sample is written last.
  """

  def __init__(self, path: Path):
    self.path = as_path(path)
    self.checkpoints = self.path / 'checkpoints'
    self.picture = self.path / _PICTURE
    self._claim: FileLock | Lease | None = None
    self._former: dict[str, Any] = {}  # Settings of the run that is here.
    self._metrics = metrics_file(self.path / _METRICS)

  def __enter__(self) -> 'RunFolder':
    return self

  def __exit__(self, *_: object) -> None:
    if self._claim is not None:
      self._claim.close()

  @property
  def finished(self) -> bool:
    """Whether a run ended here."""
    return on_process_0(self._is_finished)

  @os_errors()
  def _is_finished(self) -> bool:
    return all((self.path / name).is_file() for name in _NEEDED)

  def open(
    self, settings: dict[str, Any], *, from_scratch: bool = False
  ) -> bool:
    """Makes the folder, and keeps a second run out while this one goes on.

    Nothing that it holds is changed. Raises ``UsageError`` as ``start`` does.

    Returns:
      Whether a run goes on here from a checkpoint of its own, or has been done.
    """
    return on_process_0(self._open, settings, from_scratch)

  @os_errors()
  def _open(self, settings: dict[str, Any], from_scratch: bool) -> bool:
    try:
      with os_errors():
        make_folder(self.path)
        self._claim = claim(self.path)
    except OSError as error:
      raise UsageError(
        f'--out-dir {self.path} cannot be written: {error}'
      ) from error
    self._former = self._own_settings(settings['config'])
    if from_scratch and not self._is_requeued():
      return False
    if CheckpointFolder(self.checkpoints).steps():
      return True
    return self._is_finished() and not self._is_longer(settings)

  def start(
    self, settings: dict[str, Any], *, from_scratch: bool = False
  ) -> None:
    """Opens the folder, if it is not yet, and writes its settings, JSON values.

    A run is known by the entry ``'config'``. With ``from_scratch``, what it
    left here is moved to a folder in this one, ``before-1`` or the next number
    that is free; but a job that Slurm has requeued goes on with what it wrote.

    Raises ``UsageError`` if the folder cannot be written, if it holds another
    run or something else of a name that a run writes, or if a run is going on
    in it.
    """
    on_process_0(self._start, settings, from_scratch)

  @os_errors()
  def _start(self, settings: dict[str, Any], from_scratch: bool) -> None:
    if self._claim is None:
      self._open(settings, from_scratch)
    if from_scratch and self._is_requeued():
      print_once(
        '--from-scratch: Slurm has requeued this job, which goes on with its '
        'files.'
      )
    elif from_scratch and self._former:
      # The sample first, without which no run is finished. Settings last, by
      # which the rest is known to be that of this run.
      to = self._move_aside(_SAMPLE, *_OTHERS, *_RESULTS, _CONFIG)
      print_once(
        f'--from-scratch: what a run left in {self.path} is in {to} now.'
      )
    elif self._is_longer(settings) and (self.path / _WEIGHTS).is_file():
      # Weights that stayed would be read as those of the longer run. Also of a
      # run that was killed before its sample, or before all was moved.
      to = self._move_aside(*reversed(_ENDS))
      print_once(
        f'more --steps: the weights at the former end are in {to} now.'
      )
    if not self._is_finished():
      content = json.dumps(settings | {'slurm': _slurm_job()}, indent=2)
      write_whole(self.path / _CONFIG, content.encode())

  def _is_requeued(self) -> bool:
    """Returns whether a Slurm job is that of the run here, started again."""
    before, now = self._former.get('slurm', {}), _slurm_job()
    name = 'SLURM_JOB_ID'
    return name in now and now[name] == before.get(name) and now != before

  def _own_settings(self, identity: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run in the folder, {} if there is none.

    Raises ``UsageError`` where something of somebody else would be lost.
    """
    if not (self.path / _CONFIG).exists():
      found = [x for x in _OTHERS + _RESULTS if (self.path / x).exists()]
      if found:
        raise self._refusal(f'{", ".join(found)} of something else')
      return {}
    try:
      settings = self.read_settings()
      old = dict(settings['config'])
    except (ValueError, TypeError, KeyError) as error:
      raise self._refusal(
        f'a {_CONFIG} that no run of this trainer wrote, or a damaged one'
      ) from error
    done = max(CheckpointFolder(self.checkpoints).steps(), default=0)
    refused = refusal(old, json.loads(json.dumps(identity)), done)
    if refused:
      raise self._refusal(refused)
    return settings

  def _is_longer(self, settings: dict[str, Any]) -> bool:
    """Returns whether the run here had fewer steps before."""
    before = self._former.get('config', {}).get('steps', math.inf)
    return bool(settings['config'].get('steps', 0) > before)

  def _refusal(self, what: str) -> UsageError:
    return UsageError(
      f'--out-dir {self.path} holds {what}: choose another folder, or move '
      'that away.'
    )

  def _move_aside(self, *names: str) -> Path:
    """Moves files and folders to a folder in this one, and returns that."""
    folder = unused_path(self.path / 'before')
    make_folder(folder)
    for name in names:
      with contextlib.suppress(FileNotFoundError):
        move(self.path / name, folder / name)
    return folder

  def keep_metrics(
    self, step: int, fork_from: Path | None = None, fork_step: int | None = None
  ) -> int | None:
    """Cuts off the lines of metrics.jsonl after a step, also torn ones.

    If there are none, they are those of another run's folder, if one is given,
    up to the step of the fork. Warns if lines of steps before are lost.

    Returns:
      The tokens of all steps up to that one, None if its line is lost.
    """
    return on_process_0(self._keep_metrics, step, fork_from, fork_step)

  @os_errors()
  def _keep_metrics(
    self, step: int, fork_from: Path | None, fork_step: int | None
  ) -> int | None:
    path, last = self.path / _METRICS, step
    if fork_from is not None and not path.is_file():
      path, last = as_path(fork_from) / _METRICS, fork_step or step
    lines = read_metrics(path) if path.is_file() else []
    kept = {line['step']: line for line in lines if line['step'] <= last}
    if len(kept) < step:
      warnings.warn(
        f'{path} has lost {step - len(kept)} of the lines up to step {step}.',
        stacklevel=4,
      )
    self._metrics.replace([_line(line) for line in kept.values()])
    return kept.get(step, {}).get('tokens')

  def log(self, metrics: dict[str, Any]) -> None:
    """Appends JSON values to metrics.jsonl, or later if that fails.

    It waits for no other process, and raises nothing. In a store, the lines go
    up about once a minute.
    """
    if is_process_0():
      self._metrics.add(_line(metrics))

  def flush(self) -> None:
    """Makes sure that metrics.jsonl has all lines, or raises ``OSError``.

    Raises ``UsageError`` if another run has taken over a folder in a store.
    """
    on_process_0(self._flush)

  def _flush(self) -> None:
    if self._claim is not None:
      self._claim.check()
    self._metrics.flush()

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, but for torn ones; for process 0."""
    return read_metrics(self.path / _METRICS)

  def read_settings(self) -> dict[str, Any]:
    """Returns what ``start`` was given, and the Slurm job; for process 0."""
    return json.loads((self.path / _CONFIG).read_text())

  def write_sample(self, text: str) -> None:
    """Writes the sample, which marks a run as finished; for process 0."""
    write_whole(self.path / _SAMPLE, text.encode())


def recorded(run: Path | None, entry: str) -> dict[str, Any]:
  """Returns an entry of the settings of a run, {} where that is not there."""
  if run is None:
    return {}
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    return dict(RunFolder(run).read_settings()[entry])
  return {}


def _slurm_job() -> dict[str, str]:
  """Returns what names a Slurm job and counts its restarts, if it is one."""
  names = ('SLURM_JOB_ID', 'SLURM_RESTART_COUNT')
  return {name: os.environ[name] for name in names if name in os.environ}


def _line(metrics: dict[str, Any]) -> str:
  # JSON has no numbers that are not finite: they become null.
  finite = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
  return json.dumps(finite) + '\n'
