"""Curvature at the end of training, at a small and at a large batch."""

from collections.abc import Callable
import math
import statistics
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study import render, variants
from examples.study.contenders import ADAMW, KEPT, MERIT, MUON, Contender
from examples.study.differences import Difference, contrast_samples
from examples.study.experiments import (
  sensitivity,
  tuned_initialization,
)
from examples.study.plans import Plan, Result, gather
from examples.study.points import measure_seeds
from examples.study.scales import Scale

TITLE = 'Curvature at the end'
CONTENDERS = (ADAMW, MERIT, MUON, KEPT)
_MEASURES = {x.name: 'preconditioned curvature' for x in (ADAMW, MUON)}
SCALE_FREE = 'scale-free'
QUANTITIES = {
  'top_eigenvalue': 'top eigenvalue',
  'trace': 'trace',
  'relative_eigenvalue': SCALE_FREE,
}
"""Names of what is compared, by that in the records."""
_PRECONDITIONED = 'preconditioned_eigenvalue'
SMALLER = f'{MERIT.name}, weights in proportion to the width'
"""The same from initial weights that were not tuned: what their size does."""


class Ends(NamedTuple):
  """The ends of runs of fresh seeds.

  Attributes:
    learning_rate: Peak learning rate.
    results: What was measured, of each seed.
  """

  learning_rate: float
  results: list[Result]

  @property
  def losses(self) -> list[float]:
    """Validation loss of each seed, infinite where it diverged."""
    return [x.loss for x in self.results]

  def values(self, name: str) -> list[float]:
    """Returns a quantity of each seed, infinite where there is none."""
    found = [(result.measured or {}).get(name) for result in self.results]
    return [math.inf if x is None else x for x in found]


Outcome = dict[tuple[str, int], Ends]
"""Ends by contender and batch size."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to measure runs with all that suits an optimizer at each batch."""
  return (
    yield from gather(
      {
        (x.name, size): _plan_ends(scale, x, size)
        for x in CONTENDERS
        for size in sizes(scale)
      }
      | {
        (SMALLER, size): _plan_ends(scale, MERIT, size, sensitivity.plan_best)
        for size in sizes(scale)
      }
    )
  )


def _plan_ends(
  scale: Scale,
  contender: Contender,
  size: int,
  plan_best: Callable[
    [Scale, Contender, int], Plan[variants.Varied]
  ] = tuned_initialization.plan_best,
) -> Plan[Ends]:
  varied = yield from plan_best(scale, contender, size)
  learning_rate = varied.point.tuned.learning_rate
  results = yield from measure_seeds(
    scale,
    varied.best,
    size,
    learning_rate,
    _MEASURES.get(contender.name, 'curvature'),
    scale.seeds_at(scale.batch_sizes[-1]),
  )
  return Ends(learning_rate, results)


def sizes(scale: Scale) -> list[int]:
  """Returns the batch sizes, the smallest first."""
  return sorted({scale.batch_sizes[0], scale.batch_size, scale.batch_sizes[-1]})


def factor(first: list[float], second: list[float]) -> Difference:
  """Compares the logarithms of two samples; infinite where one has none."""

  def logarithms(sample: list[float]) -> list[float]:
    return [math.log(x) if x > 0 else math.inf for x in sample]

  if not all(0 < x < math.inf for x in [*first, *second]):
    return Difference(math.inf, *[math.nan] * 3)
  return contrast_samples([logarithms(first)], [logarithms(second)])


def format_factor(found: Difference) -> str:
  """Returns a factor as text, with its interval if it has one."""
  if not math.isfinite(found.mean):
    return 'not known'
  if math.isnan(found.high):
    return f'{math.exp(found.mean):.3g} × (one seed)'
  low, high = math.exp(found.low), math.exp(found.high)
  text = f'{math.exp(found.mean):.3g} × [{low:.3g}, {high:.3g}]'
  if found.low > 0 or found.high < 0:
    return text
  seen = math.exp(found.detectable)
  return f'{text} ({seen:.3g} × would have been seen)'


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns what was measured, who is flatter, and whether it pays."""
  rows = [
    _row(name, size, outcome[name, size])
    for size in sizes(scale)
    for name in (*(x.name for x in CONTENDERS), SMALLER)
  ]
  return '\n\n'.join(
    [
      'Warm-up, b1, initial weights and learning rate that suit an optimizer '
      'best at a batch. The Hessian H of the training loss at the final '
      'weights, on a fixed sample of 128 training sequences: its top '
      'eigenvalue (48 Lanczos iterations) and trace (Hutchinson, 24 vectors). '
      'Twice the weights may make the same function with a quarter of the '
      'eigenvalue, so a small one need not be a flat minimum; the scale-free '
      'one is that of D H D, D = diag(|w|), for steps in parts of each weight. '
      'Preconditioned: of '
      'P^-1/2 H P^-1/2 times the peak learning rate, where P^-1 times the '
      'gradient is the step at a learning rate of 1, diag(√v) + ε for AdamW '
      'and S for each hidden matrix of Muon, whose momentum is S times what is '
      'orthogonal; gradients of a small batch are noisier and enlarge P, so '
      'that it compares within a batch only. Mean and standard deviation over '
      'seeds:',
      render.markdown(rows),
      _errors(outcome),
      *(
        _compare(outcome, size, name, MERIT.name)
        for name in (ADAMW.name, SMALLER)
        for size in sizes(scale)
      ),
      *(_name_flatter(outcome, size) for size in sizes(scale)),
      _advice(outcome, scale),
    ]
  )


def _row(name: str, size: int, ends: Ends) -> dict[str, str]:
  row = {
    'optimizer': name,
    'batch': str(size),
    'loss': _format(ends.losses, render.format_loss, 'diverged'),
  } | {title: _format(ends.values(key)) for key, title in QUANTITIES.items()}
  has = name in _MEASURES
  found = [ends.learning_rate * x for x in ends.values(_PRECONDITIONED)]
  return row | {'preconditioned': _format(found) if has else ''}


def _format_number(x: float) -> str:
  return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def _format(
  sample: list[float],
  form: Callable[[float], str] = _format_number,
  unknown: str = 'not known',
) -> str:
  if not all(map(math.isfinite, sample)):
    return unknown
  text = form(statistics.mean(sample))
  if len(sample) < 2:
    return f'{text} (one seed)'
  return f'{text} ± {form(statistics.stdev(sample))}'


def _errors(outcome: Outcome) -> str:
  """Returns how far estimates may be off."""
  found = [
    result.measured
    for ends in outcome.values()
    for result in ends.results
    if result.measured and None not in result.measured.values()
  ]
  if not found:
    return 'No run has an end to measure.'
  residual = max(y for x in found for k, y in x.items() if 'residual' in k)
  error = max(x['trace_error'] / abs(x['trace']) for x in found)
  return (
    f'Top eigenvalues are known to {residual:.2g} of their size or better '
    f'(residuals), traces to {error:.2g} (standard errors).'
  )


def _compare(outcome: Outcome, size: int, first: str, second: str) -> str:
  """Returns how much sharper one's end is than another's."""
  found = {
    title: factor(*(outcome[x, size].values(name) for x in (first, second)))
    for name, title in QUANTITIES.items()
  }
  return (
    f'Batch {size}, {first} over {second}: '
    + '; '.join(f'{title} {format_factor(x)}' for title, x in found.items())
    + '.'
  )


def _name_flatter(outcome: Outcome, size: int) -> str:
  """Returns who is flatter than what has the lowest loss."""
  best = _best(outcome, size)
  if best is None:
    return f'At batch {size} too few runs have an end to compare.'
  listed = '; '.join(
    f'{title}: {_flatter(x)}'
    for title, x in _over_others(outcome, best, size).items()
  )
  return (
    f'At batch {size} {best} has the lowest loss. Beyond the noise of seeds, '
    f'the ends of these are flatter, by {listed}.'
  )


def _best(outcome: Outcome, size: int) -> str | None:
  """Returns what has the lowest loss; None if there is none to compare."""
  losses = {
    x.name: statistics.mean(outcome[x.name, size].losses) for x in CONTENDERS
  }
  finite = {name: x for name, x in losses.items() if math.isfinite(x)}
  return min(finite, key=finite.__getitem__) if len(finite) > 1 else None


def _over_others(
  outcome: Outcome, best: str, size: int
) -> dict[str, dict[str, Difference]]:
  """Returns factors over each other contender, by quantity."""
  ends = {x.name: outcome[x.name, size] for x in CONTENDERS}
  return {
    title: {
      other: factor(ends[best].values(name), ends[other].values(name))
      for other in ends
      if other != best
    }
    for name, title in QUANTITIES.items()
  }


def _advice(outcome: Outcome, scale: Scale) -> str:
  """Returns whether to choose an optimizer by how flat its ends are."""
  best = {size: _best(outcome, size) for size in sizes(scale)}
  factors = [
    found
    for size, name in best.items()
    if name is not None
    for by_name in _over_others(outcome, name, size).values()
    for found in by_name.values()
  ]
  if not factors:
    return 'Of flatness nothing is known.'
  if any(x.low > 0 for x in factors):
    return (
      'So choose an optimizer by the loss, not by how flat its minima are: by '
      'one measure at least, the lowest loss is not at the flattest end.'
    )
  if any(math.isnan(x.high) for x in factors):
    return 'What is known of flatness does not speak against the lowest loss.'
  return 'So flatness does not speak against the lowest loss.'


def _flatter(factors: dict[str, Difference]) -> str:
  """Returns whose ends are flatter, and of which that is not known."""
  flatter = [name for name, x in factors.items() if x.low > 0]
  unknown = [name for name, x in factors.items() if math.isnan(x.high)]
  text = ', '.join(flatter) or 'none'
  return f'{text} (not known: {", ".join(unknown)})' if unknown else text


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws each quantity over the batch, a panel for each."""
  batch_sizes = sizes(scale)
  result, (row,) = render.panels(1, len(QUANTITIES))
  for (name, title), axes in zip(QUANTITIES.items(), row, strict=True):
    # Before there is data, since there may be none.
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    render.label_decades(axes.yaxis)
    for contender in CONTENDERS:
      _draw(axes, outcome, contender.name, batch_sizes, name)
    _draw(axes, outcome, SMALLER, batch_sizes, name, marker='x', color='k')
    axes.set_xticks(batch_sizes, map(str, batch_sizes))
    axes.set_xlabel('global batch, sequences')
    axes.set_title(title)
  render.legend_below(result, row[0])
  return result


def _draw(
  axes: Any,
  outcome: Outcome,
  contender: str,
  batch_sizes: list[int],
  name: str,
  **options: Any,
) -> None:
  points = [
    (size, x)
    for size in batch_sizes
    for x in outcome[contender, size].values(name)
    if 0 < x < math.inf
  ]
  axes.plot(
    [size for size, _ in points],
    [x for _, x in points],
    **(dict(marker='o', color=render.COLORS.get(contender)) | options),
    linestyle='none',
    alpha=0.7,
    label=contender,
  )
