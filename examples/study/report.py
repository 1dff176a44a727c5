"""Writes RESULTS.md and its figures from the results of runs."""

from collections import Counter
from pathlib import Path
import statistics
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from examples.study import claims, summary
from examples.study.experiments import (
  ablation,
  attention_logits,
  batch_ramp,
  batch_scaling,
  beyond_gpt,
  clip_threshold,
  compositions,
  curvature,
  hyperparameters,
  initialization,
  llama,
  mechanism,
  rate_tolerance,
  sensitivity,
  stale_rows,
  steps_to_loss,
  tuned_initialization,
  weight_decay,
  width_depth,
)
from examples.study.plans import Result, Run, count_runs, execute
from examples.study.scales import SCALES, Scale
from examples.study.store import Store

EXPERIMENTS: dict[str, Any] = {
  'batch-scaling': batch_scaling,
  'steps-to-loss': steps_to_loss,
  'compositions': compositions,
  'attention-logits': attention_logits,
  'mechanism': mechanism,
  'initialization': initialization,
  'sensitivity': sensitivity,
  'tuned-initialization': tuned_initialization,
  'weight-decay': weight_decay,
  'beyond-gpt': beyond_gpt,
  'batch-ramp': batch_ramp,
  'hyperparameters': hyperparameters,
  'rate-tolerance': rate_tolerance,
  'ablation': ablation,
  'clip-threshold': clip_threshold,
  'curvature': curvature,
  'stale-rows': stale_rows,
  'llama': llama,
  'width-depth': width_depth,
}
"""Modules with ``plan``, ``section``, ``figure`` and ``TITLE``, by name."""
_LARGER = {'nano': 'mini'}
"""The scale that the first page also shows, by that of the report."""


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
  outcomes, records = read_outcomes(scale, store)
  figures = folder / 'figures'
  figures.mkdir(parents=True, exist_ok=True)
  path = folder / 'RESULTS.md'
  larger = read_larger(name, store.path.parent)
  path.write_text(text(name, scale, outcomes, records, larger))
  drawn = [
    _save(
      figures / f'{experiment}.png', EXPERIMENTS[experiment].figure(x, scale)
    )
    for experiment, x in outcomes.items()
  ]
  if summary.has_figure(outcomes):
    drawn.append(
      _save(figures / 'summary.png', summary.figure(outcomes, scale))
    )
  return [path, *drawn]


def read_outcomes(
  scale: Scale, store: Store
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Returns what experiments found out, of those whose runs are all there.

  Returns:
    What they found out, by name, and the records of their runs.
  """
  used: dict[str, dict[str, Any]] = {}

  def read(runs: list[Run]) -> list[Result]:
    used.update((run.key, store.records[run.key]) for run in runs)
    return store.results(runs)

  outcomes = {
    name: execute(experiment.plan(scale), read)
    for name, experiment in EXPERIMENTS.items()
    if not count_runs(experiment.plan(scale), store.result)
  }
  return outcomes, list(used.values())


def read_larger(name: str, results: Path) -> summary.Larger | None:
  """Returns what came out at the next scale, if all its runs are there.

  Args:
    name: Name of the scale of the report.
    results: Folder of the results.
  """
  if name not in _LARGER:
    return None
  larger = _LARGER[name]
  scale, store = SCALES[larger], Store(results / f'{larger}.jsonl')
  if count_runs(batch_scaling.plan(scale), store.result):
    return None
  outcome = execute(batch_scaling.plan(scale), store.results)
  return summary.Larger(larger, scale, outcome)


def text(
  name: str,
  scale: Scale,
  outcomes: dict[str, Any],
  records: list[dict[str, Any]],
  larger: summary.Larger | None = None,
) -> str:
  """Returns the text of RESULTS.md.

  Args:
    name: Name of the scale.
    scale: Size of the study.
    outcomes: What experiments found out, of those that are complete.
    records: Records of their runs.
    larger: What came out at a larger scale.
  """
  parts = [
    f'# Results at scale {name}',
    f'Written by `python -m examples.study report --scale {name}` from the '
    'results of runs. The README of examples/study describes the protocol. '
    'Intervals are those of 95 % for a difference of means.',
  ]
  if records:
    parts += [summary.page(outcomes, scale, larger), _provenance(records)]
    if table := claims.table(outcomes, scale):
      parts += ['## The claims of the paper', table]
  for experiment, outcome in outcomes.items():
    module = EXPERIMENTS[experiment]
    parts += [
      f'## {module.TITLE}',
      f'![{module.TITLE}](figures/{experiment}.png)',
      module.section(outcome, scale),
    ]
  if missing := [x for x in EXPERIMENTS if x not in outcomes]:
    parts.append(f'Not complete, since runs are missing: {", ".join(missing)}.')
  return '\n\n'.join(filter(None, parts)) + '\n'


def _provenance(runs: list[dict[str, Any]]) -> str:
  """Returns how many runs there are, and with what they were trained."""
  versions = Counter(
    ', '.join(
      f'{name} {run["versions"][name]}' for name in ('python', 'jax', 'optax')
    )
    for run in runs
  )
  seconds = [run['seconds'] for run in runs]
  texts = [run['corpus_sha256'] for run in runs]
  return (
    f'{len(runs)} runs, of which {sum(x["loss"] is None for x in runs)} '
    f'diverged; {statistics.median(seconds):.0f} s each (median), '
    f'{sum(seconds) / 3600:.1f} hours in all. Made with '
    + '; '.join(versions)
    + f'. Text: sha256 {next(filter(None, texts))[:16]}.'
  )


def _save(path: Path, figure: Figure) -> Path:
  figure.savefig(path, dpi=100)
  plt.close(figure)
  return path
