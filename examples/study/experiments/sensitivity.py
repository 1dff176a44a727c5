"""Loss against batch size, with warm-up and b1 tuned for each optimizer too."""

from collections.abc import Callable
import dataclasses
from typing import Any

from matplotlib.figure import Figure

from examples.gpt2.presets import OPTIMIZERS
from examples.study import render
from examples.study.contenders import (
  ADAMW,
  CONTENDERS,
  KEPT,
  LAMB,
  MERIT,
  MUON,
  SIMPLER,
  Contender,
)
from examples.study.differences import (
  Difference,
  difference,
  paired_difference,
  sentence,
)
from examples.study.experiments import batch_scaling
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, find_rates, judge
from examples.study.scales import Scale
from examples.study.tuning import Tuned
from examples.study.variants import (
  Outcome,
  Tunings,
  Varied,
  best,
  format_tuned,
  judged,
  tune,
  with_settings,
)

TITLE = 'Warm-up and b1 tuned too'
AS_IT_IS = 'as it is'
_AS_WITH_RATIOS = 'as with ratios'
_LONG_WARMUP = 0.3
_WARMUP = f'warm-up {_LONG_WARMUP:.0%}'
_B1 = (0.4, 0.6, 0.8, 0.9, 0.95)
_FIRST_B1 = (0.8, 0.9, 0.95)
"""Those that are tried anyway."""
_COMPARED = (
  (MERIT.name, ADAMW.name),
  (MERIT.name, LAMB.name),
  (MUON.name, ADAMW.name),
  (KEPT.name, MUON.name),
  (SIMPLER.name, MUON.name),
  (KEPT.name, SIMPLER.name),
)


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the variants at every batch."""
  return plan_with(plan_best, scale)


def plan_with(
  choose: Callable[[Scale, Contender, int], Plan[Varied]], scale: Scale
) -> Plan[Outcome]:
  """Plans to choose variants at every batch, and norms kept without ratios."""
  found = yield from gather(
    {
      (x.name, size): choose(scale, x, size)
      for x in CONTENDERS
      for size in scale.batch_sizes
    }
  )
  simpler = yield from gather(
    {
      (SIMPLER.name, size): _plan_simpler(scale, found[KEPT.name, size])
      for size in scale.batch_sizes
    }
  )
  return found | simpler


def _plan_simpler(scale: Scale, kept: Varied) -> Plan[Varied]:
  """Plans norms kept without MERIT's ratios, else as with them."""
  size = kept.point.batch_size
  contender = dataclasses.replace(
    kept.best, name=SIMPLER.name, arm=kept.best.arm.replace('merit > ', '')
  )
  tuned = yield from find_rate(
    scale,
    contender,
    size,
    start=kept.point.tuned.learning_rate,
    stride=1,
    seeds=scale.tuning_seeds[:1],
  )
  seeds = scale.seeds_at(size)
  point = yield from judge(scale, contender, size, tuned, seeds)
  return Varied({_AS_WITH_RATIOS: tuned}, contender, point)


def plan_best(scale: Scale, contender: Contender, size: int) -> Plan[Varied]:
  """Plans to tune the variants of a contender at a batch size."""
  rates = yield from find_rates(scale, contender)
  tried = {AS_IT_IS: contender}
  tunings = {AS_IT_IS: _of_one_seed(scale, rates[size])}
  first = other_rates if scale.is_large(size) else variants
  for propose in (first, smaller_b1, smaller_b1, combine):
    proposed = propose(contender, tunings)
    tunings |= yield from tune(scale, proposed, size, tunings[best(tunings)])
    tried |= proposed
  name = best(tunings)
  seeds = scale.seeds_at(size)
  point = yield from judge(scale, tried[name], size, tunings[name], seeds)
  return Varied(tunings, tried[name], point)


def _of_one_seed(scale: Scale, tuned: Tuned) -> Tuned:
  seed = scale.tuning_seeds[0]
  losses = {rate: {seed: x[seed]} for rate, x in tuned.by_seed.items()}
  return Tuned(losses, tuned.learning_rate)


def variants(contender: Contender, tunings: Tunings) -> dict[str, Contender]:
  """Returns what is tried of a contender at every batch, by name."""
  del tunings  # Of no variant yet.
  found = {_WARMUP: with_settings(contender, warmup_share=_LONG_WARMUP)}
  return found | {
    name: with_settings(contender, b1=b1)
    for name, b1 in _names_of_b1(contender).items()
    if b1 in _FIRST_B1 and name != AS_IT_IS
  }


def other_rates(contender: Contender, tunings: Tunings) -> dict[str, Contender]:
  """Returns the same, and other rates of what Adam updates beside Muon."""
  found = variants(contender, tunings)
  for factor in (0.25, 4.0):
    name = f'rest at {factor:g} ×'
    if contender is MUON:
      found[name] = with_settings(contender, adam_rate=factor)
    elif contender is KEPT:
      arm, rate = contender.arm.rsplit(' ', 1)
      found[name] = dataclasses.replace(
        contender, arm=f'{arm} {factor * float(rate):.3g}'
      )
  return found


def smaller_b1(contender: Contender, tunings: Tunings) -> dict[str, Contender]:
  """Returns the next smaller b1, if the smallest tried is the best."""
  names = _names_of_b1(contender)
  lowest = best({x: tunings[x] for x in names if x in tunings})
  smaller = [x for x in names if names[x] < names[lowest]]
  if not smaller or smaller[-1] in tunings:
    return {}
  return {smaller[-1]: with_settings(contender, b1=names[smaller[-1]])}


def combine(contender: Contender, tunings: Tunings) -> dict[str, Contender]:
  """Returns a long warm-up with the best b1, if each lowers the loss alone."""
  names = _names_of_b1(contender)
  lowest = min(
    (x for x in names if x in tunings), key=lambda x: tunings[x].loss
  )
  usual = tunings[AS_IT_IS].loss
  if lowest == AS_IT_IS or tunings[_WARMUP].loss >= usual:
    return {}
  both = with_settings(contender, warmup_share=_LONG_WARMUP, b1=names[lowest])
  return {f'{_WARMUP} and {lowest}': both}


def _names_of_b1(contender: Contender) -> dict[str, float]:
  """Returns the values of b1 by name, the smallest first."""
  usual = OPTIMIZERS[contender.optimizer]['b1']
  return {AS_IT_IS if x == usual else f'b1 {x:g}': x for x in _B1}


def compare(first: Point, second: Point) -> Difference:
  """Compares two points, seed by seed if they differ in the ratios alone."""
  if {first.name, second.name} == {KEPT.name, SIMPLER.name}:
    return paired_difference(first, second)
  return difference(first, second)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of each at its best, and of the variants."""
  return '\n\n'.join(
    [
      'Each optimizer with the warm-up and the b1 that suit it best at a '
      'batch, and with the learning rate for these '
      f'({SIMPLER.name}: as {KEPT.name}, but for the learning rate; these two '
      'are compared seed by seed); mean and standard deviation over fresh '
      'seeds:',
      render.markdown(batch_scaling.loss_rows(judged(outcome), scale)),
      *differences(outcome, scale),
      'What was tried. As it is: a warm-up of 10 %; b1 of 0.9, with Muon '
      '0.95; the rest at the rate of the table of compositions, with Muon at '
      'the rate of the hidden matrices. Losses of one seed, with the learning '
      'rate, chosen for each, in brackets.',
      *(_tried(outcome, size) for size in scale.batch_sizes),
    ]
  )


def differences(outcome: Outcome, scale: Scale) -> list[str]:
  """Returns a sentence for each pair that is compared at a batch."""
  return [
    f'Batch {size}: '
    + sentence(x, y, compare(outcome[x, size].point, outcome[y, size].point))
    for size in scale.batch_sizes
    for x, y in _COMPARED
  ]


def _tried(outcome: Outcome, size: int) -> str:
  rows = [
    _row(name, varied.tunings)
    for (name, batch_size), varied in outcome.items()
    if batch_size == size
  ]
  return f'Batch {size}:\n\n{render.markdown(rows)}'


def _row(name: str, tunings: Tunings) -> dict[str, str]:
  return {
    'optimizer': name,
    AS_IT_IS: format_tuned(tunings[AS_IT_IS]) if AS_IT_IS in tunings else '',
    'otherwise': '; '.join(
      f'{variant}: {format_tuned(tuned)}'
      for variant, tuned in tunings.items()
      if variant != AS_IT_IS
    ),
    'best': best(tunings),
  }


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and what each variant changes at the largest one."""
  result, ((left, right),) = render.panels(1, 2)
  result.set_size_inches(10, 4)
  batch_scaling.draw_losses(left, judged(outcome), scale)
  left.set_title('learning rate, warm-up and b1 tuned, equal tokens')
  size = scale.batch_sizes[-1]
  _draw_changes(
    right, {x.name: outcome[x.name, size].tunings for x in CONTENDERS}
  )
  right.set_title(f'batch {size}, one seed')
  return result


def _draw_changes(axes: Any, tunings: dict[str, Tunings]) -> None:
  """Draws by how much the loss of each variant differs, in rows."""
  names = sorted(
    {x for tried in tunings.values() for x in tried if x != AS_IT_IS},
    key=lambda x: (x.startswith('rest'), x.startswith(_WARMUP), x),
  )
  for i, (name, tried) in enumerate(tunings.items()):
    drawn = [x for x in names if x in tried]
    axes.plot(
      [tried[x].loss - tried[AS_IT_IS].loss for x in drawn],
      # Apart, since some are equal.
      [names.index(x) + 0.12 * (i - 2) for x in drawn],
      'o',
      ms=5,
      color=render.COLORS[name],
    )
  axes.axvline(0, color='0.5', lw=1)
  axes.set_yticks(range(len(names)), names)
  axes.set_xlabel('change of the loss from the usual settings, nats')
  axes.grid(axis='y', lw=0.5)
  axes.invert_yaxis()
