"""Whether the order holds with another warm-up, b1, or rate of the rest."""

import dataclasses
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, KEPT, MUON, Contender
from examples.study.plans import Plan, gather
from examples.study.points import find_rate, find_rates
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Warm-up, momentum, and the rate of the rest'
AS_IT_IS = 'as it is'
_LONG_WARMUP = 0.3

Outcome = dict[tuple[str, int], dict[str, Tuned]]
"""Tunings by contender and batch size, and by what is varied."""


def variants(contender: Contender) -> dict[str, Contender]:
  """Returns what is tried of a contender, by name."""
  b1 = 0.9 if contender.optimizer == 'muon' else 0.95
  found = {
    f'warm-up {_LONG_WARMUP:.0%}': _with(contender, warmup_share=_LONG_WARMUP),
    f'b1 {b1:g}': _with(contender, b1=b1),
  }
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


def _with(contender: Contender, **settings: Any) -> Contender:
  return dataclasses.replace(contender, settings=contender.settings | settings)


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
) -> Plan[dict[str, Tuned]]:
  rates = yield from find_rates(scale, contender)
  usual, seed = rates[size], scale.tuning_seeds[0]
  found = yield from gather(
    {
      name: find_rate(
        scale,
        variant,
        size,
        start=usual.learning_rate,
        stride=1,
        seeds=[seed],
      )
      for name, variant in variants(contender).items()
    }
  )
  of_the_seed = {
    rate: {seed: losses[seed]} for rate, losses in usual.by_seed.items()
  }
  return {AS_IT_IS: Tuned(of_the_seed, usual.learning_rate)} | found


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of the variants, and whether the order holds."""
  parts = [
    'As it is: a warm-up of 10 %; b1 of 0.9, with Muon 0.95; the rest at the '
    'rate of the table of compositions, with Muon at the rate of the hidden '
    'matrices. One seed; in brackets the learning rate, chosen for each.'
  ]
  for size in scale.batch_sizes[-2:]:
    own = {x.name: outcome[x.name, size] for x in CONTENDERS}
    parts += [
      f'Batch {size}:',
      render.markdown([_row(name, x) for name, x in own.items()]),
      _order(own),
    ]
  return '\n\n'.join(parts)


def _row(name: str, tunings: dict[str, Tuned]) -> dict[str, str]:
  return {
    'optimizer': name,
    AS_IT_IS: _format(tunings[AS_IT_IS]),
    'otherwise': '; '.join(
      f'{variant}: {_format(tuned)}'
      for variant, tuned in tunings.items()
      if variant != AS_IT_IS
    ),
  }


def _format(tuned: Tuned) -> str:
  return (
    f'{render.format_loss(tuned.loss)} ({render.format_learning_rate(tuned)})'
  )


def _order(tunings: dict[str, dict[str, Tuned]]) -> str:
  """Returns whether the best variants are in the order of what is usual."""

  def ranked(losses: dict[str, float]) -> list[str]:
    return sorted(losses, key=losses.__getitem__)

  usual = ranked({name: x[AS_IT_IS].loss for name, x in tunings.items()})
  best = ranked(
    {name: min(y.loss for y in x.values()) for name, x in tunings.items()}
  )
  if usual == best:
    return (
      f'Each with its best variant, the order stays {_join(usual)} (one seed).'
    )
  return (
    f'The order is {_join(usual)}; each with its best variant, {_join(best)} '
    '(one seed).'
  )


def _join(names: list[str]) -> str:
  return ' < '.join(names)


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws what each variant gains or loses, a panel for each batch."""
  sizes = scale.batch_sizes[-2:]
  result, (row,) = render.panels(1, len(sizes), sharey=True)
  result.set_size_inches(9, 4.5)
  for size, axes in zip(sizes, row, strict=True):
    for x in CONTENDERS:
      tunings = outcome[x.name, size]
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
