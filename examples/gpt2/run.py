"""A run: its folder, settings, metrics, log and report."""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import math
from pathlib import Path
import statistics
import sys
import tempfile
import time
from typing import Any, Self
import warnings

import jax
import numpy as np
import tqdm

from examples.gpt2 import hardware, model_files
from examples.gpt2.command import (
  CommandError,
  UsageError,
  describe_changes,
  format_bytes,
  os_errors,
  table,
)
from examples.gpt2.config import FIELDS, Config, batch_sizes, change, fact
from examples.gpt2.data import Data
from examples.gpt2.optimizers import make_schedule
from examples.gpt2.processes import is_process_0, on_process_0, print_once
from examples.gpt2.step import Trainer
from examples.gpt2.storage import (
  as_path,
  is_remote,
  make_folder,
  write_whole,
)

MEASURED = ('tokens_per_second', 'mfu', 'waited_share', 'peak_bytes')
"""Metrics that differ between two runs of the same settings."""
_MUST_BE_FINITE = ('train_loss', 'gradient_norm')
"""Metrics that end a run, or have its step left out, unless they are finite."""
_CONFIG, _METRICS, _SAMPLE = 'config.json', 'metrics.jsonl', 'sample.txt'
# What a run writes besides; without a config.json it is somebody else's.
_OTHERS = (
  _METRICS, _SAMPLE, model_files.DESCRIPTION, model_files.WEIGHTS,
  'checkpoints',
)  # fmt: skip
_LINE_SECONDS = 30.0
"""How often there is a line, at least, where the output is no terminal."""


class RunFolder:
  """Reads and writes the files of a run, on a disk or in a store.

  Its methods are for process 0. As a context, which all processes enter, it
  keeps a second run out of a folder on a disk.

  Attributes:
    path: The folder.
    checkpoints: Folder of the checkpoints.
    picture: File of the curves.
  """

  def __init__(self, path: Path):
    self.path = as_path(path)
    self.checkpoints = self.path / 'checkpoints'
    self.picture = self.path / 'curves.png'
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
    return (self.path / _SAMPLE).is_file()

  @os_errors()
  def start(
    self, config: Config, known_by: dict[str, Any], others: dict[str, Any]
  ) -> None:
    """Writes config.json, unless another run is here.

    Args:
      config: Settings.
      known_by: What decides the numbers of the run, as JSON values.
      others: What config.json holds beside it, as JSON values.

    Raises:
      UsageError: If the folder holds another run, or something else with a name
        that a run writes.
    """
    if (self.path / _CONFIG).exists():
      self._check_same(config, known_by)
    elif found := [x for x in _OTHERS if (self.path / x).exists()]:
      raise self._refusal(f'{", ".join(found)} of something else')
    if not self.finished:
      text = json.dumps({'config': known_by, **others}, indent=2)
      write_whole(self.path / _CONFIG, text.encode())

  def _check_same(self, config: Config, known_by: dict[str, Any]) -> None:
    """Raises ``UsageError`` unless the run here goes on with these settings."""
    schedule = [x for x in FIELDS if fact(x, 'is_schedule')]
    try:
      old = dict(self.read_settings()['config'])
      before = change(config, **{x: old[x] for x in schedule})
    except (ValueError, TypeError, KeyError) as error:
      raise self._refusal(
        f'a {_CONFIG} that no run of this trainer wrote, or a damaged one'
      ) from error
    changes, steps = describe_changes(old, known_by), saved_steps(self.path)
    # Without the first state, nothing has been computed.
    if not changes or not steps:
      return
    others = (old | known_by).keys() - {*schedule}
    if any(old.get(k) != known_by.get(k) for k in others):
      raise self._refusal(f'a run with other settings ({changes})')
    if config.steps < max(steps):
      raise self._refusal(f'a run that has done {max(steps)} steps ({changes})')
    self._check_same_past(before, config, max(steps), changes)
    # Else they would be taken for those of the longer run.
    for name in (_SAMPLE, model_files.WEIGHTS):
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
      lines = read_metrics(as_path(fork_from) / _METRICS)
    kept = {line['step']: line for line in lines if line['step'] <= step}
    if len(kept) < step:
      warnings.warn(
        f'{self.path / _METRICS} has lost {step - len(kept)} of the lines up '
        f'to step {step}.',
        stacklevel=4,
      )
    write_whole(
      self.path / _METRICS, ''.join(map(_as_line, kept.values())).encode()
    )
    return kept.get(step, {}).get('tokens', 0)

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, but for torn ones."""
    return read_metrics(self.path / _METRICS)

  def read_settings(self) -> dict[str, Any]:
    """Returns what config.json holds."""
    return json.loads((self.path / _CONFIG).read_text())

  def write_sample(self, text: str) -> None:
    """Writes the sample, which marks a run as finished."""
    write_whole(self.path / _SAMPLE, text.encode())


def saved_steps(run: Path) -> list[int]:
  """Returns the steps of which there are checkpoints, also unfinished ones."""
  folder = run / 'checkpoints'
  names = [x.name for x in folder.iterdir()] if folder.exists() else []
  return [int(name) for name in names if name.isdecimal()]


def learning_rates(config: Config) -> np.ndarray:
  """Returns the learning rate of each step."""
  return np.asarray(jax.vmap(make_schedule(config))(np.arange(config.steps)))


def _as_line(metrics: dict[str, Any]) -> str:
  # JSON has no numbers that are not finite: they become null.
  finite = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
  return json.dumps(finite) + '\n'


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Returns the lines of a file of metrics, but for a torn one; [] if none."""
  try:
    with os_errors():
      text = path.read_bytes().decode(errors='replace')
  except FileNotFoundError:
    return []
  lines = []
  for line in text.splitlines():
    with contextlib.suppress(ValueError):
      lines.append(json.loads(line))
  return [x for x in lines if isinstance(x, dict) and 'step' in x]


class NotFiniteError(CommandError):
  """A loss or gradient is infinite or not a number."""

  status = 3

  def __str__(self) -> str:
    return (
      f'{self.args[0]} The last checkpoint is sound. Try a smaller '
      '--learning-rate or --qk-norm (a new run), or --not-finite skip (leaves '
      'such steps out).'
    )


class StepLog(contextlib.ExitStack):
  """Logs one line a step, and leaves the device no time to wait.

  The metrics of a step are fetched after the next one has been dispatched. As a
  context, it closes what it has opened at its end.
  """

  def __init__(
    self,
    config: Config,
    trainer: Trainer,
    folder: RunFolder,
    done: int,
    tokens_done: int,
  ):
    """Takes the steps that are done, and their tokens, 0 if not known."""
    super().__init__()
    self._config, self._path = config, folder.path
    self._sizes = batch_sizes(config)
    length = config.model.context_length
    # A fork may have taken its first steps with another batch size.
    self._tokens = tokens_done or int(self._sizes[:done].sum()) * length
    self._peak_tokens_per_second = (
      hardware.peak_flops(jax.devices()[0])
      * jax.device_count()
      / trainer.flops_per_token
    )
    self._rates = learning_rates(config)
    self._writers: list[Callable[[dict[str, Any]], None]] = []
    if is_process_0():
      self._writers = self._open_writers(folder, done)
    is_terminal = sys.stderr.isatty()
    self._bar = self.enter_context(
      tqdm.tqdm(
        total=config.steps,
        initial=done,
        unit='step',
        mininterval=0.5 if is_terminal else _LINE_SECONDS,
        # A line for each, where the output is no terminal.
        bar_format=None
        if is_terminal
        else '{desc}{n_fmt}/{total_fmt} steps, {remaining} left{postfix}\n',
        disable=not is_process_0(),
      )
    )
    self._evaluation = 'none'
    self._running: Any = None
    self._since = time.perf_counter()

  def _open_writers(
    self, folder: RunFolder, done: int
  ) -> list[Callable[[dict[str, Any]], None]]:
    """Returns functions that take the metrics of a step."""
    self._file = _MetricsFile(self.enter_context, folder.path / _METRICS)
    writers: list[Callable[[dict[str, Any]], None]] = [self._file.add]
    if self._config.tensorboard:
      writers.append(_open_board(self, folder.path, done))
    if self._config.wandb is not None:
      writers.append(_open_wandb(self, self._config.wandb, folder))
    return writers

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves time out of the speed: evaluations, saves and diagnostics."""
    jax.block_until_ready(self._running)
    start = time.perf_counter()
    yield
    self._since += time.perf_counter() - start

  def begin_step(
    self, step: int, metrics: dict[str, Any], waited: float
  ) -> None:
    """Remembers a step that has been dispatched, and logs the one before it.

    Args:
      step: Its number.
      metrics: Numbers by name, and lists, arrays and dictionaries of them. They
        may still be on the device.
      waited: Seconds in which the batch of the next step was made.
    """
    self.finish_step()
    self._running = step, metrics, waited

  def finish_step(self, evaluation: dict[str, Any] | None = None) -> None:
    """Waits for the dispatched step, if there is one, and logs it.

    Raises ``NotFiniteError`` if a validation loss is infinite or not a number;
    or if a loss or gradient is, and such steps are not to be left out.
    """
    if self._running is None:
      return
    step, arrays, waited = self._running
    self._running = None
    found = as_json(arrays)
    metrics = self._measure(step, waited) | found | (evaluation or {})
    checked = {name: found[name] for name in _MUST_BE_FINITE}
    if not all(map(math.isfinite, checked.values())):
      self._stop_unless_skipping(step, checked)
      metrics['skipped'] = True
    if evaluation:
      self._evaluation = _describe(metrics)
    for write in self._writers:
      write(metrics)
    self._show(metrics)
    if evaluation and not math.isfinite(evaluation['val_loss']):
      raise NotFiniteError(
        f'at step {step} the validation loss is {evaluation["val_loss"]}.'
      )

  def flush(self) -> None:
    """Makes sure that a store has all lines."""
    # Others have no such file.
    on_process_0(lambda: self._file.flush())  # noqa: PLW0108

  def _measure(self, step: int, waited: float) -> dict[str, Any]:
    now = time.perf_counter()
    seconds = max(now - self._since, 1e-9)
    self._since = now
    size = int(self._sizes[step - 1])
    tokens = size * self._config.model.context_length
    self._tokens += tokens
    mfu = tokens / seconds / self._peak_tokens_per_second
    return {
      'step': step,
      'tokens': self._tokens,
      'batch_size': size,
      'learning_rate': float(self._rates[step - 1]),
      'tokens_per_second': tokens / seconds,
      'mfu': mfu if math.isfinite(mfu) else None,
      'waited_share': min(1.0, waited / seconds),
      'peak_bytes': hardware.peak_memory(),
    }

  def _stop_unless_skipping(self, step: int, values: dict[str, float]) -> None:
    if self._config.not_finite == 'skip':
      return
    found = ', '.join(f'{k} is {v}' for k, v in values.items())
    raise NotFiniteError(
      f'at step {step} {found}; the step changed no weights (evaluation before:'
      f' {self._evaluation}). Metrics so far are in {self._path}.'
    )

  def _show(self, metrics: dict[str, Any]) -> None:
    shown = {
      'loss': f'{metrics["train_loss"]:.3f}',
      'tokens/s': f'{metrics["tokens_per_second"]:,.0f}',
      'MFU': 'n/a' if metrics['mfu'] is None else f'{metrics["mfu"]:.1%}',
    }
    self._bar.set_postfix(shown, refresh=False)
    self._bar.update()
    if 'val_loss' in metrics and is_process_0():
      # Through the bar, which would be in the way on a terminal.
      write = self._bar.write if sys.stderr.isatty() else print_once
      write(_describe(metrics))


def as_json(metrics: Any) -> Any:
  """Returns numbers and arrays, perhaps on a device, as JSON values."""
  return jax.tree.map(
    lambda x: x.tolist() if hasattr(x, 'tolist') else x, jax.device_get(metrics)
  )


class _MetricsFile:
  """The file of metrics; in a store, which does not append, as of ``flush``."""

  def __init__(self, enter: Callable[[Any], Any], path: Path):
    self._path, self._local = path, path
    if is_remote(path):
      self._local = Path(enter(tempfile.TemporaryDirectory()), path.name)
      self._local.write_bytes(path.read_bytes() if path.exists() else b'')

  def add(self, metrics: dict[str, Any]) -> None:
    with self._local.open('a') as file:
      file.write(_as_line(metrics))

  @os_errors()
  def flush(self) -> None:
    if self._local != self._path:
      write_whole(self._path, self._local.read_bytes())


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns each number of a step by its path, such as 'layers/clipped/1'."""
  found = {}
  for path, value in jax.tree.leaves_with_path(metrics):
    # Layers count from 1.
    keys = [x.key if hasattr(x, 'key') else str(x.idx + 1) for x in path]
    if isinstance(value, (int, float)):
      found['/'.join(keys)] = float(value)
  return found


def _open_board(
  stack: contextlib.ExitStack, folder: Path, done: int
) -> Callable[[dict[str, Any]], None]:
  """Opens TensorBoard."""
  import tensorboardX  # noqa: PLC0415  Optional.

  if is_remote(folder):
    raise UsageError(f'--tensorboard needs --out-dir on a disk, got {folder}.')
  board = stack.enter_context(
    tensorboardX.SummaryWriter(str(folder / 'tensorboard'), purge_step=done + 1)
  )

  def write(metrics: dict[str, Any]) -> None:
    for name, value in scalars(metrics).items():
      board.add_scalar(name, value, metrics['step'])

  return write


def _open_wandb(
  stack: contextlib.ExitStack, project: str, folder: RunFolder
) -> Callable[[dict[str, Any]], None]:
  """Opens a new run at Weights & Biases, or that of the folder.

  W&B takes each step once: steps that are taken again have the same numbers and
  are left out, and those that it lacks are sent first. Raises ``UsageError`` if
  W&B does not know who it is to log in as.
  """
  import wandb  # noqa: PLC0415  Optional.

  id_file = folder.path / 'wandb_id.txt'
  is_new = not id_file.exists()
  try:
    run = wandb.init(
      project=project,
      id=None if is_new else id_file.read_text(),
      name=folder.path.name if is_new else None,
      resume='allow',
      dir=None if is_remote(folder.path) else folder.path,
      config=folder.read_settings(),
      allow_val_change=True,
    )
  except (wandb.errors.Error, ValueError) as error:
    raise UsageError(
      f'--wandb {project}: {error} (Without an account or a network, set '
      'WANDB_MODE=offline.)'
    ) from error
  write_whole(id_file, run.id.encode())
  stack.callback(run.finish)

  def write(metrics: dict[str, Any]) -> None:
    if metrics['step'] >= run.starting_step:
      run.log(scalars(metrics), step=metrics['step'], commit=True)

  for metrics in folder.read_metrics():
    write(metrics)
  return write


def _describe(metrics: dict[str, Any]) -> str:
  """Returns the evaluation of a step as text."""
  text = f'step {metrics["step"]}: validation loss {metrics["val_loss"]:.4f}'
  for name, loss in metrics.get('val_losses', {}).items():
    text += f', {name} {loss:.4f}'
  if 'max_attention_logit' in metrics:
    logits = ' '.join(f'{x:.1f}' for x in metrics['max_attention_logit'])
    text += f', max attention logit by layer {logits}'
  return text


def overview(
  config: Config, data: Data, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what is to come, as text."""
  devices, model = jax.devices(), config.model
  sizes = batch_sizes(config)
  total = int(sizes.sum()) * model.context_length
  ramp = f', ramp {" ".join(config.batch_ramp)}' if config.batch_ramp else ''
  rows = {
    'model': f'{config.preset}, {model.architecture}, '
    f'{trainer.num_params:,} parameters, '
    f'{model.num_layers} layers of width {model.width}',
    'data': f'{" ".join(config.data)}, sha256 {data.sha256[:16]}',
    'tokens': f'{data.train_tokens:,} to train on, '
    f'{data.validation_tokens:,} held out, vocabulary {data.vocab_size:,}',
    'steps': f'{config.steps:,} of {config.batch_size:,} x '
    f'{model.context_length:,} tokens{ramp}, {total:,} in all, '
    f'{total / data.train_tokens:.2g} times the data',
    'micro-batch': f'{config.micro_batch_size} sequences of a shard at once',
    'optimizer': f'{config.optimizer}, learning rate '
    f'{config.learning_rate:g}, weight decay {config.weight_decay:g}',
    'devices': f'{len(devices)} x {devices[0].device_kind}, '
    f'{jax.process_count()} process(es), {model.dtype}',
    'mesh': ', '.join(f'{k} {v}' for k, v in trainer.mesh.shape.items()),
    'memory': f'{format_bytes(hardware.bytes_per_device(trainer.shapes))} of '
    'weights and moments on each device',
    'results': str(folder.path),
  }
  return table(rows)


def report(folder: RunFolder) -> str:
  """Returns what came out, with the sample, as text."""
  lines, settings = folder.read_metrics(), folder.read_settings()
  rows = {'validation loss': 'not known, since metrics are lost'}
  if lines and 'val_loss' in lines[-1]:
    rows['validation loss'] = f'{lines[-1]["val_loss"]:.4f} nats per token'
  skipped = sum('skipped' in line for line in lines)
  if skipped:
    rows['left out'] = f'{skipped} steps whose loss or gradient was not finite'
  diagnosed = [x for x in lines if 'max_attention_logit' in x]
  rows |= _diagnosed(diagnosed, settings['config'])
  sample = folder.path / _SAMPLE
  files = {'sample': str(sample)}
  if folder.picture.is_file():
    files = {'picture': str(folder.picture)} | files
  return f'{table(rows | _speed(lines) | files)}\n\n{sample.read_text("utf-8")}'


def _diagnosed(
  lines: list[dict[str, Any]], config: dict[str, Any]
) -> dict[str, str]:
  """Returns rows of the diagnostics steps: of the last, and of their noise.

  Trace and squared norm are averaged separately, since either is noisy and
  their ratio is biased, and over the second half, when weights have settled.
  """
  if not lines:
    return {}
  logits = ', '.join(
    'not finite' if x is None else f'{x:.1f}'
    for x in lines[-1]['max_attention_logit']
  )
  rows = {'max attention logit': f'{logits} (first to last layer)'}
  half = [x for x in lines[len(lines) // 2 :] if not x.get('skipped')]
  noises = [x['gradient_noise'] for x in half if x['gradient_noise']]
  trace = math.fsum(noise['trace'] for noise in noises)
  square = math.fsum(noise['squared_norm'] for noise in noises)
  if trace > 0 and square > 0:
    length = config['context_length']
    scale, per_step = trace / square * length, config['batch_size'] * length
    rows['gradient noise'] = (
      f'critical batch about {scale:,.0f} tokens; a step has {per_step:,}'
    )
  return rows


def _speed(lines: list[dict[str, Any]]) -> dict[str, str]:
  if not lines:
    return {}
  speed = statistics.median_high(line['tokens_per_second'] for line in lines)
  waited = max(line['waited_share'] for line in lines[len(lines) // 2 :])
  mfus = [line['mfu'] for line in lines if line['mfu'] is not None]
  mfu = f'{statistics.median_high(mfus):.1%}' if mfus else 'n/a'
  return {
    'speed': f'{speed:,.0f} tokens/s (median), MFU {mfu}, '
    f'at most {waited:.1%} of a step spent making batches',
    'peak memory': format_bytes(max(line['peak_bytes'] for line in lines)),
  }
