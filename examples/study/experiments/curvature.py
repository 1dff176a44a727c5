"""Curvature at the end of training, at a small and at a large batch."""

from collections.abc import Callable
import math
import statistics
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import ADAMW, KEPT, MERIT, MUON, Contender
from examples.study.differences import Difference, contrast_samples
from examples.study.plans import Plan, Result, gather
from examples.study.points import find_rates, measure_seeds
from examples.study.scales import Scale

TITLE = 'Curvature at the end'
CONTENDERS = (ADAMW, MERIT, MUON, KEPT)
_MEASURES = {x.name: 'preconditioned curvature' for x in (ADAMW, MUON)}
QUANTITIES = {
  'top_eigenvalue': 'top eigenvalue',
  'trace': 'trace',
  'relative_eigenvalue': 'scale-free',
}
"""Names of what is compared, by that in the records."""
_PRECONDITIONED = 'preconditioned_eigenvalue'

Outcome = dict[tuple[str, int], list[Result]]
"""Results of fresh seeds by contender and batch size."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to measure runs at the rates that are chosen for each batch."""
  rates = yield from gather({x.name: find_rates(scale, x) for x in CONTENDERS})
  return (
    yield from gather(
      {
        (x.name, size): measure_seeds(
          scale,
          x,
          size,
          rates[x.name][size].learning_rate,
          _MEASURES.get(x.name, 'curvature'),
        )
        for x in CONTENDERS
        for size in _sizes(scale)
      }
    )
  )


def _sizes(scale: Scale) -> tuple[int, int]:
  return scale.batch_sizes[0], scale.batch_sizes[-1]


def values(results: list[Result], name: str) -> list[float]:
  """Returns a quantity of each seed, infinite where there is none."""
  found = [(result.measured or {}).get(name) for result in results]
  return [math.inf if x is None else x for x in found]


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
    return 'not known, since seeds diverged'
  if math.isnan(found.high):
    return f'{math.exp(found.mean):.3g} × (one seed)'
  low, high = math.exp(found.low), math.exp(found.high)
  return f'{math.exp(found.mean):.3g} × [{low:.3g}, {high:.3g}]'


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns what was measured, who is flatter, and whether it pays."""
  rows = [
    _row(contender, size, outcome[contender.name, size])
    for size in _sizes(scale)
    for contender in CONTENDERS
  ]
  return '\n\n'.join(
    [
      'The Hessian H of the training loss at the final weights, on a fixed '
      'sample of 128 training sequences: its top eigenvalue (24 Lanczos '
      'iterations) and trace (Hutchinson, 24 vectors). Twice the weights may '
      'make the same function with a quarter of the eigenvalue, so a small '
      'one need not be a flat minimum; the scale-free one is that of D H D, '
      'D = diag(|w|), for steps in parts of each weight. Preconditioned: of '
      'P^-1/2 H P^-1/2, where P^-1 times the gradient is the step at a '
      'learning rate of 1, diag(√v) + ε for AdamW and S for each hidden '
      'matrix of Muon, whose momentum is S times what is orthogonal. Mean '
      'and standard deviation over seeds:',
      render.markdown(rows),
      _errors(outcome),
      *(_compare(outcome, size) for size in _sizes(scale)),
      _advice(outcome, _sizes(scale)[1]),
    ]
  )


def _row(
  contender: Contender, size: int, results: list[Result]
) -> dict[str, str]:
  row = {
    'optimizer': contender.name,
    'batch': str(size),
    'loss': _format([x.loss for x in results], render.format_loss),
  } | {
    title: _format(values(results, name)) for name, title in QUANTITIES.items()
  }
  has = contender.name in _MEASURES
  found = _format(values(results, _PRECONDITIONED)) if has else ''
  return row | {'preconditioned': found}


def _format(
  sample: list[float], form: Callable[[float], str] = '{:.3g}'.format
) -> str:
  if not all(map(math.isfinite, sample)):
    return 'diverged'
  text = form(statistics.mean(sample))
  if len(sample) < 2:
    return f'{text} (one seed)'
  return f'{text} ± {statistics.stdev(sample):.2g}'


def _errors(outcome: Outcome) -> str:
  """Returns how far estimates may be off."""
  found = [
    result.measured
    for results in outcome.values()
    for result in results
    if result.measured and None not in result.measured.values()
  ]
  if not found:
    return 'No run has an end to measure.'
  residual = max(x['residual'] for x in found)
  error = max(x['trace_error'] / abs(x['trace']) for x in found)
  return (
    f'Top eigenvalues are known to {residual:.2g} of their size or better '
    f'(residuals), traces to {error:.2g} (standard errors).'
  )


def _compare(outcome: Outcome, size: int) -> str:
  """Returns how much sharper AdamW's end is than MERIT's."""
  found = {
    title: factor(
      values(outcome[ADAMW.name, size], name),
      values(outcome[MERIT.name, size], name),
    )
    for name, title in QUANTITIES.items()
  }
  return (
    f'Batch {size}, {ADAMW.name} over {MERIT.name}: '
    + '; '.join(f'{title} {format_factor(x)}' for title, x in found.items())
    + '.'
  )


def _advice(outcome: Outcome, size: int) -> str:
  """Returns whether the flattest has the lowest loss, and what follows."""
  losses = {
    x.name: statistics.mean(y.loss for y in outcome[x.name, size])
    for x in CONTENDERS
  }
  finite = {name: x for name, x in losses.items() if math.isfinite(x)}
  if len(finite) < 2:
    return f'At batch {size} too few runs have an end to compare.'
  best = min(finite, key=finite.__getitem__)
  flattest = {
    title: min(
      finite, key=lambda x: statistics.mean(values(outcome[x, size], name))
    )
    for name, title in QUANTITIES.items()
  }
  named = ', '.join(f'{x} ({title})' for title, x in flattest.items())
  same = [name == best for name in flattest.values()]
  if all(same):
    verdict = 'loss and flatness choose the same optimizer here.'
  elif any(same):
    verdict = (
      'choose by the loss, since what flatness chooses depends on how it is '
      'measured.'
    )
  else:
    verdict = 'choose by the loss, since flatness chooses another.'
  return (
    f'At batch {size} {best} has the lowest loss, and on the mean the flattest '
    f'ends are those of {named}: {verdict}'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws each quantity over the batch, a panel for each."""
  sizes = _sizes(scale)
  result, (row,) = render.panels(1, len(QUANTITIES))
  for (name, title), axes in zip(QUANTITIES.items(), row, strict=True):
    # Before there is data, since there may be none.
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    render.label_decades(axes.yaxis)
    for contender in CONTENDERS:
      _draw(axes, outcome, contender, sizes, name)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xlabel('global batch, sequences')
    axes.set_title(title)
  row[0].legend(fontsize=7)
  return result


def _draw(
  axes: Any,
  outcome: Outcome,
  contender: Contender,
  sizes: tuple[int, int],
  name: str,
) -> None:
  points = [
    (size, x)
    for size in sizes
    for x in values(outcome[contender.name, size], name)
    if 0 < x < math.inf
  ]
  axes.plot(
    [size for size, _ in points],
    [x for _, x in points],
    'o',
    alpha=0.7,
    color=render.COLORS[contender.name],
    label=contender.name,
  )
