"""Rows whose gradient has stopped, under the published rule and remedies."""

import dataclasses
import math
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import ADAMW, KEPT, MERIT, Contender
from examples.study.differences import (
  Difference,
  difference,
  paired_difference,
  sentence,
)
from examples.study.plans import Plan, Result, gather
from examples.study.points import Point, find_rate, measure_seeds
from examples.study.rows import growth, moved, over_live
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Rows without gradient'
_VOCAB = 1024
"""Byte pairs, of which some are rare, and bytes that never occur."""
BASELINE = 'MERIT as published'
# Below, λ max|w| of a first weight would pass: 0.01 × 2.5 × 0.07 at width 64.
# From about 0.3 on, the directions of rows that learn would not.
_MIN_NORMS = 0.01, 0.1
_SHRUNK, _GROWN = 0.5, 2.0
_MOVED = 0.5
"""Length of the change over that of the row, of rows that no text has moved."""
_MANY_SEEDS = 10
"""Fresh seeds of variants that are close to each other."""
MATRICES = 'embedding', 'head'
GROUPS = 'never', 'rare'
_COLORS = {'never': 'tab:red', 'rare': 'tab:blue', 'common': '0.6'}


def _contender(
  name: str, base: Contender = MERIT, arm: str | None = None, **settings: Any
) -> Contender:
  return dataclasses.replace(
    base,
    name=name,
    arm=base.arm if arm is None else arm,
    settings=base.settings | settings,
  )


_REMEDIES = [
  *(_contender(f'min_norm {x:g}', min_norm=x) for x in _MIN_NORMS),
  _contender('decay outside the ratio', arm='adam > merit > clip > decay'),
  # Outside the ratio, λ = 0.01 takes 4 % of a row in a run; inside, 99 %.
  _contender(
    'decay outside the ratio, λ = 0.1',
    arm='adam > merit > clip > decay',
    weight_decay=0.1,
  ),
  _contender('norms of matrices kept', arm='adam > merit > clip > keep l2'),
]
VARIANTS = {
  x.name: x
  for x in (
    _contender(BASELINE),
    *_REMEDIES,
    _contender(f'{BASELINE}, λ = 0', weight_decay=0.0),
    _contender(
      f'min_norm {_MIN_NORMS[0]:g}, λ = 0',
      min_norm=_MIN_NORMS[0],
      weight_decay=0.0,
    ),
    ADAMW,
    KEPT,
  )
}
"""What is compared, by name."""
_FEW_SEEDS = 'norms of matrices kept', ADAMW.name, KEPT.name
"""Those whose rows or losses are far from the others."""


class Rows(NamedTuple):
  """What came out of a variant.

  Attributes:
    point: Its losses.
    results: Of the fresh seeds, with what was measured.
  """

  point: Point
  results: list[Result]


Outcome = dict[str, Rows]
"""By variant."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose rates, those of remedies around the published rule's."""
  own = yield from gather(
    {
      x: _find_rate(scale, VARIANTS[x])
      for x in (BASELINE, ADAMW.name, KEPT.name)
    }
  )
  start = own[BASELINE].learning_rate
  others = yield from gather(
    {
      name: _find_rate(scale, x, start=start, stride=1)
      for name, x in VARIANTS.items()
      if name not in own
    }
  )
  rates = own | others
  return (
    yield from gather(
      {x.name: _judge(scale, x, rates[x.name]) for x in VARIANTS.values()}
    )
  )


def _find_rate(
  scale: Scale, contender: Contender, **options: Any
) -> Plan[Tuned]:
  """Plans a tuning by one seed."""
  return find_rate(
    scale,
    contender,
    scale.batch_size,
    seeds=scale.tuning_seeds[:1],
    **options,
    **_settings(scale),
  )


def _judge(scale: Scale, contender: Contender, tuned: Tuned) -> Plan[Rows]:
  size = scale.batch_size
  is_close = contender.name not in _FEW_SEEDS and scale.num_seeds > 1
  results = yield from measure_seeds(
    scale,
    contender,
    size,
    tuned.learning_rate,
    'rows',
    _MANY_SEEDS if is_close else scale.num_seeds,
    **_settings(scale),
  )
  losses = tuple(result.loss for result in results)
  return Rows(Point(contender.name, size, tuned, losses), results)


def _settings(scale: Scale) -> dict[str, Any]:
  vocab = scale.run('adamw', scale.batch_size, 1.0).config.vocab_size
  return {'untied_head': True, 'vocab_size': max(vocab, _VOCAB)}


def keeps(rows: Rows, group: str) -> bool:
  """Whether rows of the embedding stay what they were, or come to live ones.

  All but a twentieth of them keep half of their norm, and half of them are at
  most twice as long as live rows. Of those that the text never moves, half have
  moved by less than half of their length.
  """
  found = growth(rows.results, 'embedding', group)
  over = over_live(rows.results, 'embedding', group)
  change = moved(rows.results, 'embedding', group)
  if found is None or over is None or change is None:
    return False
  if math.isinf(rows.point.mean) or (group == 'never' and change > _MOVED):
    return False
  return found[0] >= _SHRUNK and over <= _GROWN


def compare(outcome: Outcome, name: str) -> Difference:
  """Returns the loss of a variant over that of the published rule.

  MERIT's variants share a seed's luck with it.
  """
  has_luck = VARIANTS[name].optimizer == MERIT.optimizer
  compare_points = paired_difference if has_luck else difference
  return compare_points(outcome[name].point, outcome[BASELINE].point)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns losses and norms by group, and which ``min_norm`` to take."""
  tables = [
    render.markdown(
      [_row(name, rows, matrix) for name, rows in outcome.items()]
    )
    for matrix in MATRICES
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.batch_size}, an untied head, byte pairs, usual warm-up '
      'and b1 (so that AdamW is there for its rows, not for its loss). λ is '
      '0.01 unless said; one seed has chosen the rates. Of rows of tokens '
      'that a run has never seen, or in less than one step of ten (rare; most '
      f'of them in a few steps only; {_count_rows(outcome)}): the norm at the '
      'end over that at the start, its median and in brackets its 5th and 95th '
      'percentile; then the norm over that of all other rows; then the length '
      'of the change over that of the row at the start; all medians over '
      'seeds. These tokens hardly occur in the validation text either, so the '
      'losses show what a remedy costs the other tokens, not what these gain. '
      'The embedding:',
      tables[0],
      'The head, whose rows get a gradient from the softmax in any case, that '
      'vanishes for tokens which do not occur:',
      tables[1],
      *(
        sentence(name, BASELINE, compare(outcome, name))
        for name in outcome
        if name != BASELINE
      ),
      _advice(outcome),
    ]
  )


def _count_rows(outcome: Outcome) -> str:
  """Returns how many rows there are of each group."""
  measured = [x.measured for x in outcome[BASELINE].results if x.measured]
  if not measured:
    return 'their numbers are not known'
  groups = measured[0]['embedding']
  listed = ', '.join(f'{groups[x]["rows"]} {x}' for x in groups)
  return f'with the first seed {listed}'


def _row(name: str, rows: Rows, matrix: str) -> dict[str, str]:
  row = {'optimizer': name}
  if matrix == MATRICES[0]:
    row['loss'] = render.format_with_rate(rows.point)
  return row | {group: _format(rows.results, matrix, group) for group in GROUPS}


def _format(results: list[Result], matrix: str, group: str) -> str:
  found = growth(results, matrix, group)
  over = over_live(results, matrix, group)
  if found is None or over is None:
    return 'not known'
  low, middle, high = found
  change = moved(results, matrix, group)
  return (
    f'{middle:.3g} [{low:.3g}, {high:.3g}], {over:.3g} of live rows, moved '
    f'{change:.3g}'
  )


def _advice(outcome: Outcome) -> str:
  """Returns the smallest ``min_norm`` that holds rows, and what it costs."""
  kept = {
    name: [group for group in GROUPS if keeps(rows, group)]
    for name, rows in outcome.items()
  }
  holding = [
    name for name, groups in kept.items() if len(groups) == len(GROUPS)
  ]
  if len(kept[BASELINE]) == len(GROUPS):
    return (
      f'{BASELINE} held the rows of the embedding here as well, so nothing '
      'speaks for another default.'
    )
  if all(math.isinf(rows.point.mean) for rows in outcome.values()):
    return 'Of these rows nothing is known: seeds diverged.'
  if not holding:
    return (
      'Nothing that was tried holds the rows of the embedding: with rare '
      'tokens, tie the head.'
    )
  held = f'Rows of the embedding are held by: {"; ".join(holding)}. '
  names = [f'min_norm {x:g}' for x in _MIN_NORMS]
  chosen = next((x for x in names if x in holding), None)
  if chosen is None:
    return (
      f'{held}No min_norm that was tried is enough at λ = 0.01: with rare '
      'tokens and an untied head take one of those; as the default, min_norm '
      'would not remove the flaw.'
    )
  found = compare(outcome, chosen)
  return f'{held}With rare tokens and an untied head, {_verdict(chosen, found)}'


def _verdict(chosen: str, found: Difference) -> str:
  """Returns whether to take a setting that holds rows, by the loss."""
  if math.isnan(found.high):
    return f'try {chosen}: what it costs is not known ({found}).'
  if found.low > 0:
    return (
      f'take {chosen} where these rows matter, but not as the default: it '
      f'costs loss ({found}).'
    )
  if found.high < 0:
    return (
      f'take {chosen}, which even lowers the loss ({found}): it is the better '
      'default for such models, but not what the paper published.'
    )
  return (
    f'take {chosen}: it costs nothing that was seen ({found}; '
    f'{found.detectable:.3f} would have been seen in four of five such '
    'experiments). As the default it would depart from the paper for a gain '
    'that no loss has shown.'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws how rows of each group have grown, a panel for each matrix.

  Rows of common tokens show how long the others would have to be to keep up.
  """
  del scale
  result, (panels,) = render.panels(1, len(MATRICES), sharey=True)
  result.set_size_inches(10, 1.2 + 0.4 * len(outcome))
  for matrix, axes in zip(MATRICES, panels, strict=True):
    # Before there is data, since there may be none.
    axes.set_xscale('log')
    render.label_decades(axes.xaxis)
    axes.tick_params('x', labelsize=8)
    for group, color in _COLORS.items():
      _draw(axes, outcome, matrix, group, color)
    axes.axvline(1, color='0.5', lw=1)
    axes.set_xlabel('norm at the end over that at the start')
    axes.set_title(matrix)
  panels[0].invert_yaxis()
  render.legend_below(result, panels[0])
  return result


def _draw(
  axes: Any, outcome: Outcome, matrix: str, group: str, color: str
) -> None:
  """Draws medians, and bars from a twentieth of the rows to all but that."""
  known = {
    name: found
    for name, rows in outcome.items()
    if (found := growth(rows.results, matrix, group))
  }
  axes.errorbar(
    [middle for _, middle, _ in known.values()],
    list(known),
    xerr=[
      [middle - low for low, middle, _ in known.values()],
      [high - middle for _, middle, high in known.values()],
    ],
    fmt='o',
    capsize=3,
    color=color,
    label=group,
  )
