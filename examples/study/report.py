"""Writes RESULTS.md and its figures from the results of runs."""

from collections import Counter
from pathlib import Path
import statistics
from typing import Any

from matplotlib import pyplot as plt

from examples.study import (
  ablation,
  attention_logits,
  batch_scaling,
  claims,
  clip_threshold,
  hyperparameters,
)
from examples.study.plans import Result, Run, carry_out, count_runs
from examples.study.runs import Store
from examples.study.scales import Scale

EXPERIMENTS: dict[str, Any] = {
  'batch-scaling': batch_scaling,
  'attention-logits': attention_logits,
  'ablation': ablation,
  'clip-threshold': clip_threshold,
  'hyperparameters': hyperparameters,
}
"""Modules with ``plan``, ``section``, ``figure`` and ``TITLE``, by name."""


def write(folder: Path, name: str, scale: Scale, store: Store) -> list[Path]:
  """Writes the report.

  Args:
    folder: Where RESULTS.md and the folder ``figures`` go.
    name: Name of the scale.
    scale: Size of the study.
    store: Results of runs.

  Returns:
    The files written.
  """
  outcomes = read_outcomes(scale, store)
  path = folder / 'RESULTS.md'
  path.write_text(text(name, scale, store, outcomes))
  figures = folder / 'figures'
  figures.mkdir(exist_ok=True)
  return [path] + [
    _draw(figures / f'{experiment}.png', EXPERIMENTS[experiment], x, scale)
    for experiment, x in outcomes.items()
  ]


def read_outcomes(scale: Scale, store: Store) -> dict[str, Any]:
  """Returns what experiments found out, of those whose runs are all there."""

  def read(runs: list[Run]) -> list[Result]:
    found = [store.result(run) for run in runs]
    return [result for result in found if result is not None]

  return {
    name: carry_out(experiment.plan(scale), read)
    for name, experiment in EXPERIMENTS.items()
    if not count_runs(experiment.plan(scale), store.result)
  }


def text(
  name: str, scale: Scale, store: Store, outcomes: dict[str, Any]
) -> str:
  """Returns the text of RESULTS.md."""
  parts = [
    f'# Results at scale {name}',
    f'Written by `python -m examples.study report --scale {name}` from the '
    'results of runs; the [README](README.md) tells how they were made.',
  ]
  if outcomes:
    parts += [claims.table(outcomes, scale), _made(store)]
  for experiment, module in EXPERIMENTS.items():
    parts.append(f'## {module.TITLE}')
    if experiment in outcomes:
      parts += [
        f'![{module.TITLE}](figures/{experiment}.png)',
        module.section(outcomes[experiment], scale),
      ]
    else:
      left = count_runs(module.plan(scale), store.result)
      parts.append(f'Not complete: about {left} runs are to be made.')
  return '\n\n'.join(filter(None, parts)) + '\n'


def _made(store: Store) -> str:
  """Returns how many runs there are, and what they were made with."""
  runs = store.read_all()
  versions = Counter(
    ', '.join(
      f'{name} {run["versions"][name]}' for name in ('python', 'jax', 'optax')
    )
    for run in runs
  )
  seconds = [run['seconds'] for run in runs]
  return (
    f'{len(runs)} runs, of which {sum(x["loss"] is None for x in runs)} '
    f'diverged; {statistics.median(seconds):.0f} s each (median), '
    f'{sum(seconds) / 3600:.1f} hours in all. Made with '
    + '; '.join(versions)
    + f'. Text: sha256 {runs[0]["corpus_sha256"][:16]}.'
  )


def _draw(path: Path, module: Any, outcome: Any, scale: Scale) -> Path:
  figure = module.figure(outcome, scale)
  figure.savefig(path, dpi=100)
  plt.close(figure)
  return path
