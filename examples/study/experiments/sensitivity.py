"""Whether the order holds with another warm-up, b1, or rate of the rest."""

import dataclasses
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import (
  ADAMW,
  CONTENDERS,
  KEPT,
  LAMB,
  MERIT,
  MUON,
  Contender,
)
from examples.study.differences import difference, sentence
from examples.study.experiments import batch_scaling
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, find_rates, judge
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Warm-up, momentum, and the rate of the rest'
AS_IT_IS = 'as it is'
_LONG_WARMUP = 0.3
_WARMUP = f'warm-up {_LONG_WARMUP:.0%}'
_B1 = (0.8, 0.9, 0.95)
_COMPARED = ((MERIT, ADAMW), (MERIT, LAMB), (MUON, ADAMW), (KEPT, MUON))


class Varied(NamedTuple):
  """What was tried of a contender at a batch size.

  Attributes:
    tunings: Tunings of one seed, by what is varied.
    point: The best of them, judged by fresh seeds.
  """

  tunings: dict[str, Tuned]
  point: Point


Outcome = dict[tuple[str, int], Varied]
"""What was tried, by contender and batch size."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the variants at the two largest batches."""
  return gather(
    {
      (x.name, size): _plan_variants(scale, x, size)
      for x in CONTENDERS
      for size in scale.batch_sizes[-2:]
    }
  )


def _plan_variants(
  scale: Scale, contender: Contender, size: int
) -> Plan[Varied]:
  rates = yield from find_rates(scale, contender)
  usual, seed = rates[size], scale.tuning_seeds[0]
  of_the_seed = {
    rate: {seed: losses[seed]} for rate, losses in usual.by_seed.items()
  }
  tunings = {AS_IT_IS: Tuned(of_the_seed, usual.learning_rate)}
  tried = variants(contender)
  tunings |= yield from _tune(scale, tried, size, usual.learning_rate)
  both = combine(contender, tunings)
  start = tunings[_best(tunings)].learning_rate
  tunings |= yield from _tune(scale, both, size, start)
  tried |= both | {AS_IT_IS: contender}
  best = _best(tunings)
  seeds = batch_scaling.num_seeds(scale, size)
  point = yield from judge(scale, tried[best], size, tunings[best], seeds)
  return Varied(tunings, point)


def variants(contender: Contender) -> dict[str, Contender]:
  """Returns what is tried of a contender, by name."""
  usual = 0.95 if contender.optimizer == 'muon' else 0.9
  found = {_WARMUP: _with(contender, warmup_share=_LONG_WARMUP)}
  found |= {f'b1 {x:g}': _with(contender, b1=x) for x in _B1 if x != usual}
  for factor in (0.25, 4.0):
    name = f'rest at {factor:g} ×'
    if contender is MUON:
      found[name] = _with(contender, adam_rate=factor)
    elif contender is KEPT:
      arm, rate = contender.arm.rsplit(' ', 1)
      found[name] = dataclasses.replace(
        contender, arm=f'{arm} {factor * float(rate):.3g}'
      )
  return found


def combine(
  contender: Contender, tunings: dict[str, Tuned]
) -> dict[str, Contender]:
  """Returns a long warm-up with the best b1, if each lowers the loss alone."""
  usual = tunings[AS_IT_IS].loss
  better = [
    min(names, key=lambda name: tunings[name].loss)
    for names in ([_WARMUP], [x for x in tunings if x.startswith('b1')])
  ]
  if any(tunings[name].loss >= usual for name in better):
    return {}
  tried = variants(contender)
  settings = [tried[name].settings for name in better]
  return {' and '.join(better): _with(contender, **settings[0] | settings[1])}


def _with(contender: Contender, **settings: Any) -> Contender:
  return dataclasses.replace(contender, settings=contender.settings | settings)


def _tune(
  scale: Scale, tried: dict[str, Contender], size: int, start: float
) -> Plan[dict[str, Tuned]]:
  return gather(
    {
      name: find_rate(
        scale, x, size, start=start, stride=1, seeds=scale.tuning_seeds[:1]
      )
      for name, x in tried.items()
    }
  )


def _best(tunings: dict[str, Tuned]) -> str:
  return min(tunings, key=lambda name: tunings[name].loss)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of the variants, and how the best of each compare."""
  parts = [
    'As it is: a warm-up of 10 %; b1 of 0.9, with Muon 0.95; the rest at the '
    'rate of the table of compositions, with Muon at the rate of the hidden '
    'matrices. Losses of one seed, with the learning rate, chosen for each, in '
    'brackets. Fresh seeds judge the best of each optimizer.'
  ]
  for size in scale.batch_sizes[-2:]:
    own = {x.name: outcome[x.name, size] for x in CONTENDERS}
    parts += [
      f'Batch {size}:',
      render.markdown([_row(name, x) for name, x in own.items()]),
      *(
        'Each at its best: '
        + sentence(
          x.name, y.name, difference(own[x.name].point, own[y.name].point)
        )
        for x, y in _COMPARED
      ),
    ]
  return '\n\n'.join(parts)


def _row(name: str, varied: Varied) -> dict[str, str]:
  tunings = varied.tunings
  return {
    'optimizer': name,
    AS_IT_IS: _format(tunings[AS_IT_IS]),
    'otherwise': '; '.join(
      f'{variant}: {_format(tuned)}'
      for variant, tuned in tunings.items()
      if variant != AS_IT_IS
    ),
    'best': _best(tunings),
    'fresh seeds': render.format_point(varied.point),
  }


def _format(tuned: Tuned) -> str:
  return (
    f'{render.format_loss(tuned.loss)} ({render.format_learning_rate(tuned)})'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws what each variant gains or loses, a panel for each batch."""
  sizes = scale.batch_sizes[-2:]
  result, (row,) = render.panels(1, len(sizes), sharey=True)
  result.set_size_inches(9, 4.5)
  for size, axes in zip(sizes, row, strict=True):
    for x in CONTENDERS:
      tunings = outcome[x.name, size].tunings
      usual = tunings[AS_IT_IS].loss
      others = {k: v for k, v in tunings.items() if k != AS_IT_IS}
      axes.plot(
        [tuned.loss - usual for tuned in others.values()],
        [f'{x.name}: {name}' for name in others],
        'o',
        color=render.COLORS[x.name],
      )
    axes.axvline(0, color='0.5', lw=1)
    axes.set_xlabel('validation loss over that as it is')
    axes.set_title(f'batch {size}')
  row[0].invert_yaxis()
  return result
