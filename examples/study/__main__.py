"""Runs the experiments of the paper: python -m examples.study --help."""

import dataclasses
from pathlib import Path
import statistics
from typing import Annotated, Any, Literal

import jax
import tyro

from examples.gpt2.command import exit_on_error
from examples.gpt2.config import (
  Remat,
  RunConfig,
  UsageError,
  check_at_least,
  flag,
)
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.devices import hardware, processes
from examples.study.analysis import report
from examples.study.archive import cells
from examples.study.experiments import EXPERIMENTS
from examples.study.scales import SCALES, Scale
from examples.study.training.store import Store
from examples.study.training.sweep import Sweep
from examples.study.tuning import Plan, count_trials, execute, gather

# What tyro reads as it runs, and mypy cannot.
Name: Any = Literal['all', *EXPERIMENTS, 'report', *cells.NAMES]
ScaleName: Any = Literal[*SCALES]
_FOLDER = Path(__file__).parent
_RESULTS = _FOLDER / 'results'
_FOR_TRAINER = (
  'data', 'mesh', 'micro_batch_size', 'dtype', 'remat', 'distributed',
  'coordinator', 'num_processes', 'process_id',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
  """Runs an experiment of the paper, and writes its figures and RESULTS.md.

  Trials that have a result are not repeated, so a killed study goes on where it
  was, and experiments share trials. The flags after --plan-only go to the
  trainer.
  """

  # Experiment; report only writes figures and RESULTS.md from the results. Of
  # experiments that are closed, the archived results are printed.
  name: Annotated[Name, tyro.conf.Positional] = 'all'
  # Size: nano and mini for CPU cores, micro for one GPU, small and medium are
  # the paper's (OpenWebText in nanoGPT's format, see --data).
  scale: ScaleName = 'nano'
  # Folder of the results: SCALE.jsonl has a line for each trial; the folder
  # SCALE has the points of each experiment, figures and RESULTS.md. Default:
  # results/ beside this command, with the report of nano beside it.
  results: Path | None = None
  # Folder of unfinished runs, with their logs and checkpoints.
  work: Path = Path('runs/study')
  # Runs at once, each on a CPU core of its own. Default: as many as cores at
  # the scales nano and mini, else 1, which takes all devices.
  jobs: int | None = None
  # Runs to train as one program where they differ in learning rate and seed
  # alone, for an accelerator that one of them does not fill; with --jobs 1.
  together: int = 1
  # Steps of every run, to try a scale out.
  steps: int | None = None
  # Whether to only count the runs and their cost.
  plan_only: bool = False
  # Text or tokens. Default: the scale's.
  data: str | None = None
  # Device mesh, as for the trainer.
  mesh: str | None = None
  # Sequences that each shard of a batch processes at once. Default: the
  # scale's, or as many as its memory holds by an estimate.
  micro_batch_size: int | None = None
  # Data type of activations.
  dtype: Literal['float32', 'bfloat16'] | None = None
  # What the backward pass recomputes to save memory (rematerialization).
  remat: Remat | None = None
  # Whether other processes take part, as for the trainer. Default: auto.
  distributed: Literal['auto', 'on', 'off'] | None = None
  # Address and port of process 0, such as '10.0.0.1:1234', for processes that
  # jax does not find.
  coordinator: str | None = None
  # Number of processes, with --coordinator.
  num_processes: int | None = None
  # Number of this process, from 0, with --coordinator.
  process_id: int | None = None


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, 1 if runs failed, 4 if a device ran out of
      memory, and 128 + the number of the signal after one.
  """
  settings = tyro.cli(Settings, args=args, prog='python -m examples.study')
  with exit_on_error():
    study(settings)


def study(settings: Settings) -> None:
  """Trains the trials that have no result, and writes the report.

  Raises:
    UsageError: If a setting is wrong, or results are of another text.
  """
  _check(settings)
  if settings.name in cells.NAMES:
    _print_archived(settings.name)
    return
  scale = _scale(settings)
  processes.connect(_largest(scale))
  jobs = _num_jobs(settings, scale)
  if settings.together > 1 and (jobs > 1 or jax.process_count() > 1):
    raise UsageError(
      f'--together {settings.together} needs one process and --jobs 1, got '
      f'{jax.process_count()} and {jobs}.'
    )
  if settings.together > 1 and not scale.settings.get('micro_batch_size'):
    raise UsageError(
      f'--together {settings.together} needs --micro-batch-size at the scale '
      f'{settings.scale}: estimates are for one run.'
    )
  store = Store((settings.results or _RESULTS) / f'{settings.scale}.jsonl')
  if settings.plan_only:
    _print_cost(settings, scale, store)
    return
  if settings.name != 'report':
    with store.locked():
      count = _print_cost(settings, scale, store)
      store.check_text(load_tokens(_largest(scale)).sha256)
      with Sweep(store, settings.work, jobs, count, settings.together) as sweep:
        execute(_plan(settings.name, scale), sweep)
  processes.on_process_0(_report, settings, scale, store)


def _print_archived(name: str) -> None:
  records = Store(_RESULTS / 'nano.jsonl').records
  print(report.archived_section(name, records))
  print(
    f'\n{name} is closed: these are its archived results. '
    f'{cells.FOLDER / "README.md"} says which commit has the code that ran it.'
  )


def _check(settings: Settings) -> None:
  check_at_least(
    1, jobs=settings.jobs, together=settings.together, steps=settings.steps
  )
  for name in ('steps', 'data', 'dtype'):
    is_own = name == 'data' and settings.scale != 'nano'
    if getattr(settings, name) and not (settings.results or is_own):
      raise UsageError(
        f'{flag(name)} leads to other results than those of the scale: give '
        '--results another folder.'
      )


def _scale(settings: Settings) -> Scale:
  """Returns the scale with what the command line changes."""
  changes = {name: getattr(settings, name) for name in _FOR_TRAINER}
  changes = {name: x for name, x in changes.items() if x is not None}
  scale = SCALES[settings.scale]
  return dataclasses.replace(
    scale, settings=scale.settings | changes, steps=settings.steps
  )


def _largest(scale: Scale) -> RunConfig:
  """Returns the settings of a trial at the largest batch."""
  return scale.run('merit', scale.batch_sizes[-1], 1.0).config


def _num_jobs(settings: Settings, scale: Scale) -> int:
  """Returns how many trials to train at once."""
  takes_all = bool(settings.mesh) or jax.process_count() > 1
  if takes_all and settings.jobs not in (None, 1):
    raise UsageError(
      'With --mesh or several processes a trial takes all devices: --jobs must '
      f'be 1, got {settings.jobs}.'
    )
  if settings.jobs or takes_all or not scale.on_one_core:
    return settings.jobs or 1
  return len(hardware.usable_cores())


def _print_cost(settings: Settings, scale: Scale, store: Store) -> int:
  """Prints how many trials are left, and how long they take.

  Returns their number.
  """
  count = count_trials(_plan(settings.name, scale), store.result)
  seconds = [x['seconds'] for x in store.records.values()]
  text = f'{settings.name}, {settings.scale}: about {count} trials left'
  if seconds:
    median = statistics.median(seconds)
    text += (
      f', of {median:.0f} s each as the {len(seconds)} that are done: '
      f'{count * median / 3600:.1f} hours, divided by --jobs'
    )
  processes.print_once(text)
  return count


def _plan(name: str, scale: Scale) -> Plan[Any]:
  names = EXPERIMENTS if name in ('all', 'report') else [name]
  return gather({x: EXPERIMENTS[x].plan(scale) for x in names})


def _report(settings: Settings, scale: Scale, store: Store) -> None:
  """Writes the points of experiments that are complete, and the report."""
  folder = store.path.parent / settings.scale
  complete = {
    name: execute(experiment.plan(scale), store.results)
    for name, experiment in EXPERIMENTS.items()
    if not count_trials(experiment.plan(scale), store.result)
  }
  missing = [x for x in EXPERIMENTS if x not in complete]
  if missing:
    print(f'not complete, since trials are missing: {", ".join(missing)}')
  report.write_points(folder, complete)
  found = report.read_points(folder, store)
  is_committed = settings.scale == 'nano' and settings.results is None
  page = _FOLDER if is_committed else folder
  for path in report.write(page, settings.scale, found, store):
    print(f'wrote {path}')
  if is_committed:
    path = cells.FOLDER / 'RESULTS.md'
    path.write_text(report.archive_text(store.records))
    print(f'wrote {path}')


if __name__ == '__main__':
  main()
