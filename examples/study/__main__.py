"""Runs the experiments of the paper: python -m examples.study --help."""

import dataclasses
import os
from pathlib import Path
import statistics
from typing import Annotated, Any, Literal

import tyro

from examples.gpt2 import hardware
from examples.gpt2.command import exit_on_error
from examples.gpt2.config import UsageError
from examples.gpt2.tokens import load_tokens
from examples.study import report
from examples.study.plans import Plan, carry_out, count_runs, together
from examples.study.runs import Runner, Store
from examples.study.scales import SCALES, Scale

Name = Literal[
  'all', 'batch-scaling', 'attention-logits', 'ablation', 'clip-threshold',
  'hyperparameters', 'report',
]  # fmt: skip
_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Settings:
  """Runs an experiment of the paper, and writes its figures and RESULTS.md.

  Runs that have a result are not repeated, so that a killed study goes on, and
  experiments share runs. The flags after --plan-only go to the trainer.
  """

  name: Annotated[Name, tyro.conf.Positional] = 'all'
  """Experiment; report only writes figures and RESULTS.md from the results."""

  scale: Literal['nano', 'micro', 'small', 'medium'] = 'nano'
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
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog='python -m examples.study')
  with exit_on_error():
    study(settings)


def study(settings: Settings) -> None:
  """Makes the runs that are missing, and the report.

  Raises:
    UsageError: If a setting is wrong, or results are of another text.
  """
  if settings.jobs is not None and settings.jobs < 1:
    raise UsageError(f'--jobs must be at least 1, got {settings.jobs}.')
  scale = _scale(settings)
  folder = settings.results or _FOLDER / 'results' / settings.scale
  store = Store(folder)
  if settings.name != 'report':
    _make_runs(settings, scale, store)
  if settings.plan_only:
    return
  is_committed = settings.scale == 'nano' and settings.results is None
  for path in report.write(
    _FOLDER if is_committed else folder, settings.scale, scale, store
  ):
    hardware.say(f'wrote {path}')


def _make_runs(settings: Settings, scale: Scale, store: Store) -> None:
  name = settings.name
  count = count_runs(_plan(name, scale), store.result)
  hardware.say(f'{name}, {settings.scale}: {_cost(count, store)}')
  if settings.plan_only:
    return
  first = scale.run('merit', scale.largest_batch, scale.rates['merit'])
  store.check_text(load_tokens(first.config).sha256)
  is_small = settings.scale == 'nano'
  jobs = settings.jobs or (len(os.sched_getaffinity(0)) if is_small else 1)
  with Runner(store, settings.work, jobs, count) as runner:
    carry_out(_plan(name, scale), runner)


def _plan(name: str, scale: Scale) -> Plan[Any]:
  plans = report.EXPERIMENTS
  names = plans if name == 'all' else [name]
  return together(*(plans[x].plan(scale) for x in names))


def _cost(count: int, store: Store) -> str:
  """Returns how many runs are to be made, and how long that takes."""
  done = store.read_all()
  text = f'{len(done)} runs done, about {count} to make'
  if not done:
    return f'{text}; how long one takes is known after the first'
  seconds = statistics.median(x['seconds'] for x in done)
  return f'{text}, of {seconds:.0f} s: {count * seconds / 3600:.1f} core hours'


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
