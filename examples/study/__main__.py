"""Runs the experiments of the paper: python -m examples.study --help."""

import dataclasses
from pathlib import Path
import statistics
from typing import Annotated, Any, Literal

import tyro

from examples.gpt2.config import UsageError, flag
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.devices import hardware, processes
from examples.gpt2.run.command import exit_on_error
from examples.study import report
from examples.study.plans import Plan, carry_out, count_runs, together
from examples.study.runner import Runner
from examples.study.scales import SCALES, Scale
from examples.study.store import Store

Name = Literal['all', *report.EXPERIMENTS, 'report']
_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Settings:
  """Runs an experiment of the paper, and writes its figures and RESULTS.md.

  Runs that have a result are not repeated, so that a killed study goes on, and
  experiments share runs. The flags after --plan-only go to the trainer.
  """

  name: Annotated[Name, tyro.conf.Positional] = 'all'
  """Experiment; report only writes figures and RESULTS.md from the results."""

  scale: Literal[*SCALES] = 'nano'
  """Size: nano for two CPU cores, micro for one GPU, small and medium are the
  paper's (OpenWebText in nanoGPT's format, see --data)."""

  results: Path | None = None
  """Folder of the results, a JSON file for each run. Default: beside this
  command, by scale."""

  work: Path = Path('runs/study')
  """Folder of runs that are not finished, with their logs and checkpoints."""

  jobs: int | None = None
  """Runs at once, each on a CPU core of its own. Default: as many as cores at
  scale nano, else 1, which takes all devices."""

  steps: int | None = None
  """Steps of every run, to try a scale out."""

  plan_only: bool = False
  """Whether to only count the runs and their cost."""

  data: str | None = None
  """Text or tokens. Default: the scale's."""

  mesh: str | None = None
  """Device mesh, as for the trainer."""

  micro_batch_size: int | None = None
  """Sequences that devices process at once."""

  dtype: Literal['float32', 'bfloat16'] | None = None
  """Data type of activations."""

  remat: Literal['none', 'dots', 'full'] | None = None
  """What the backward pass computes anew."""


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
  """Makes the runs that are missing, and the report.

  Raises:
    UsageError: If a setting is wrong, or results are of another text.
  """
  _check(settings)
  scale = _scale(settings)
  folder = settings.results or _FOLDER / 'results' / settings.scale
  store = Store(folder)
  if settings.plan_only:
    _say_cost(settings, scale, store)
    return
  if settings.name != 'report':
    with store.locked():
      _say_cost(settings, scale, store)
      _make_runs(settings, scale, store)
  is_committed = settings.scale == 'nano' and settings.results is None
  for path in report.write(
    _FOLDER if is_committed else folder, settings.scale, scale, store
  ):
    processes.say(f'wrote {path}')


def _check(settings: Settings) -> None:
  for name in ('jobs', 'steps'):
    value = getattr(settings, name)
    if value is not None and value < 1:
      raise UsageError(f'{flag(name)} must be at least 1, got {value}.')
  if settings.jobs not in (None, 1) and settings.mesh:
    raise UsageError(
      f'--mesh is for --jobs 1, which takes all devices, got --jobs '
      f'{settings.jobs}.'
    )
  for name in ('steps', 'data', 'dtype'):
    is_own = name == 'data' and settings.scale != 'nano'
    if getattr(settings, name) and not (settings.results or is_own):
      raise UsageError(
        f'{flag(name)} makes other runs than those of the scale: give '
        '--results a folder of its own.'
      )


def _make_runs(settings: Settings, scale: Scale, store: Store) -> None:
  """Makes the runs that are missing."""
  first = scale.run('merit', scale.largest_batch, scale.rates['merit']).config
  processes.connect(first)
  store.check_text(load_tokens(first).sha256)
  is_small = settings.scale == 'nano' and not settings.mesh
  jobs = settings.jobs or (len(hardware.usable_cores()) if is_small else 1)
  count = count_runs(_plan(settings.name, scale), store.result)
  with Runner(store, settings.work, jobs, count) as runner:
    carry_out(_plan(settings.name, scale), runner)


def _plan(name: str, scale: Scale) -> Plan[Any]:
  modules = report.EXPERIMENTS
  names = modules if name in ('all', 'report') else [name]
  return together(*(modules[x].plan(scale) for x in names))


def _say_cost(settings: Settings, scale: Scale, store: Store) -> None:
  """Says how many runs are to be made, and how long that takes."""
  count = count_runs(_plan(settings.name, scale), store.result)
  done = [x['seconds'] for x in store.read_all()]
  text = f'{settings.name}, {settings.scale}: about {count} runs to make'
  if done:
    seconds = statistics.median(done)
    text += (
      f', of {seconds:.0f} s each as the {len(done)} that are done: '
      f'{count * seconds / 3600:.1f} hours, divided by --jobs'
    )
  processes.say(text)


def _scale(settings: Settings) -> Scale:
  """Returns the scale with what the command line changes."""
  names = ('data', 'mesh', 'micro_batch_size', 'dtype', 'remat')
  changes = {
    name: getattr(settings, name)
    for name in names
    if getattr(settings, name) is not None
  }
  scale = SCALES[settings.scale]
  return dataclasses.replace(
    scale, settings=scale.settings | changes, steps=settings.steps
  )


if __name__ == '__main__':
  main()
