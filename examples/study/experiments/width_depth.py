"""Wide against deep at equal parameters: which tolerates a larger batch."""

import math
import statistics
from typing import NamedTuple

from matplotlib.figure import Figure

from examples.gpt2.model.config import padded_vocab_size
from examples.study import render, variants
from examples.study.contenders import ADAMW, KEPT, MERIT, MUON
from examples.study.differences import (
  Difference,
  contrast,
  difference,
  leaders,
  paired_difference,
)
from examples.study.experiments import (
  tuned_initialization,
)
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, judge
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Wide and deep'
CONTENDERS = (ADAMW, MERIT, MUON, KEPT)
_SMALL = 0.02
"""Nats that the rate of another shape may cost to be said to carry over."""


class Shape(NamedTuple):
  """A shape of the model.

  Attributes:
    num_layers: Transformer blocks.
    width: Features of the residual stream.
    num_heads: Attention heads, as wide as those of the scale's model.
  """

  num_layers: int
  width: int
  num_heads: int

  @property
  def parameters(self) -> int:
    """Weights of the matrices in the layers."""
    return 12 * self.num_layers * self.width**2

  def __str__(self) -> str:
    return f'{self.num_layers} × {self.width}'


class Outcome(NamedTuple):
  """What came out.

  Attributes:
    points: Points by shape, contender and batch size.
    carried: Points at the large batch with the learning rate of the scale's
      model, by shape and contender.
  """

  points: dict[tuple[Shape, str, int], Point]
  carried: dict[tuple[Shape, str], Point]


def shapes(scale: Scale) -> tuple[Shape, Shape, Shape]:
  """Returns a wide shape, that of the scale and a deep one.

  A third of the layers, or four times as many; the width is that which keeps
  the parameters of the layers, rounded to whole heads.
  """
  config = scale.run('adamw', scale.batch_size, 1.0).config
  head_width = config.width // config.num_heads

  def shape(num_layers: int) -> Shape:
    width = config.width * math.sqrt(config.num_layers / num_layers)
    num_heads = round(width / head_width)
    return Shape(num_layers, num_heads * head_width, num_heads)

  layers = config.num_layers
  return shape(max(1, layers // 3)), shape(layers), shape(4 * layers)


def _sizes(scale: Scale) -> tuple[int, int]:
  return scale.batch_sizes[0], scale.batch_sizes[-1]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans the shapes at a small and a large batch, each with its own rate."""
  usual = yield from gather(
    {
      (x.name, size): tuned_initialization.plan_best(scale, x, size)
      for x in CONTENDERS
      for size in _sizes(scale)
    }
  )
  _, own, _ = shapes(scale)
  others = [shape for shape in shapes(scale) if shape != own]
  found = yield from gather(
    {
      (shape, *key): _plan_point(scale, varied, shape)
      for shape in others
      for key, varied in usual.items()
    }
  )
  large = scale.batch_sizes[-1]
  carried = yield from gather(
    {
      (shape, x.name): _judge(
        scale, usual[x.name, large], shape, usual[x.name, large].point.tuned
      )
      for shape in others
      for x in CONTENDERS
    }
  )
  points = variants.judged(usual)
  return Outcome({(own, *x): y for x, y in points.items()} | found, carried)


def _plan_point(
  scale: Scale, usual: variants.Varied, shape: Shape
) -> Plan[Point]:
  """Plans a tuning by one seed around the rate of the scale's model."""
  tuned = yield from find_rate(
    scale,
    usual.best,
    usual.point.batch_size,
    start=usual.point.tuned.learning_rate,
    stride=1,
    seeds=scale.tuning_seeds[:1],
    **shape._asdict(),
  )
  return (yield from _judge(scale, usual, shape, tuned))


def _judge(
  scale: Scale, usual: variants.Varied, shape: Shape, tuned: Tuned
) -> Plan[Point]:
  """Plans the fresh seeds of another shape at a rate that was chosen."""
  size = usual.point.batch_size
  num_seeds = scale.seeds_at(size)
  return judge(scale, usual.best, size, tuned, num_seeds, **shape._asdict())


def rise(outcome: Outcome, shape: Shape, name: str, scale: Scale) -> Difference:
  """Returns the loss at the large batch over that at the small one."""
  small, large = (outcome.points[shape, name, size] for size in _sizes(scale))
  return contrast([large], [small])


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns losses and rates, and which shape loses less at a large batch."""
  small, large = _sizes(scale)
  wide, usual, deep = shapes(scale)
  config = scale.run('adamw', scale.batch_size, 1.0).config
  rows = padded_vocab_size(config.vocab_size)
  sizes = '; '.join(
    f'{x}: {x.parameters:,} in the matrices of layers, '
    f'{rows * x.width:,} in the embedding of tokens'
    for x in (wide, usual, deep)
  )
  return '\n\n'.join(
    [
      f'Layers × width, weights in proportion to the width ({sizes}). A wide '
      'model has the larger embedding, so that losses compare between batches '
      'more fairly than between shapes. The rates of other shapes than '
      f'{usual} were chosen by one seed, around those of {usual}, whose '
      'warm-up and b1 they take, and the deviation of the initial weights over '
      'that in proportion to the width; these may suit them less. Mean and '
      'standard deviation over seeds, and the learning rate:',
      render.markdown(
        [
          _row(outcome, shape, x.name, scale)
          for x in CONTENDERS
          for shape in (wide, usual, deep)
        ]
      ),
      *(_compare(outcome, x.name, scale) for x in CONTENDERS),
      *(_lowest(outcome, size, scale) for size in (small, large)),
      _advice(outcome, scale),
      _carry_over(outcome, scale),
    ]
  )


def _row(
  outcome: Outcome, shape: Shape, name: str, scale: Scale
) -> dict[str, str]:
  small, large = _sizes(scale)
  return {
    'optimizer': name,
    'layers × width': str(shape),
    **{
      f'batch {size}': render.format_with_rate(
        outcome.points[shape, name, size]
      )
      for size in (small, large)
    },
    'rise': str(rise(outcome, shape, name, scale)),
  }


def _change(outcome: Outcome, name: str, scale: Scale) -> Difference:
  """Returns the rise of the deep shape over that of the wide one."""
  small, large = _sizes(scale)
  wide, _, deep = shapes(scale)
  points = outcome.points
  return contrast(
    [points[deep, name, large], points[wide, name, small]],
    [points[deep, name, small], points[wide, name, large]],
  )


def _compare(outcome: Outcome, name: str, scale: Scale) -> str:
  found = _change(outcome, name, scale)
  text = (
    f'{name}: the rise of the deep model over that of the wide one: {found}'
  )
  if math.isnan(found.high):
    return f'{text}.'
  return f'{text}; {found.detectable:.3f} would have been seen.'


def _lowest(outcome: Outcome, size: int, scale: Scale) -> str:
  """Returns the shapes with the lowest loss, or with one that may be as low."""
  listed = []
  for contender in CONTENDERS:
    points = {x: outcome.points[x, contender.name, size] for x in shapes(scale)}
    best = leaders(list(points.values()))
    names = [str(x) for x, point in points.items() if point in best]
    listed.append(f'{contender.name}: {" or ".join(names) or "not known"}')
  return f'Lowest loss at batch {size}: {"; ".join(listed)}.'


def _advice(outcome: Outcome, scale: Scale) -> str:
  """Returns which shape to take for a large batch."""
  wide, _, deep = shapes(scale)
  small, large = _sizes(scale)
  found = {x.name: _change(outcome, x.name, scale) for x in CONTENDERS}
  by_shape = {
    wide: [name for name, x in found.items() if x.low > 0],
    deep: [name for name, x in found.items() if x.high < 0],
  }
  seen = {shape: names for shape, names in by_shape.items() if names}
  unknown = [name for name, x in found.items() if math.isnan(x.high)]
  if len(unknown) == len(found):
    return 'Of wide and deep nothing is known: seeds diverged, or are too few.'
  but = f' (not known with {", ".join(unknown)})' if unknown else ''
  if not seen:
    return (
      f'No difference between wide and deep was seen{but}: choose the shape '
      'for other reasons than the batch.'
    )
  listed = '; '.join(
    f'From batch {small} to {large} the loss of {shape} rises less (with '
    + '; '.join(names)
    + ')'
    for shape, names in seen.items()
  )
  if len(seen) > 1:
    return f'{listed}{but}: the more tolerant shape depends on the optimizer.'
  ((shape, names),) = seen.items()
  word, other = ('wide', 'deep') if shape == wide else ('deep', 'wide')
  rival = deep if shape == wide else wide
  points = outcome.points
  if all(
    difference(points[shape, x, large], points[rival, x, large]).high < 0
    for x in names
  ):
    return (
      f'{listed}{but}, and is lower at {large}: for a large batch take a '
      f'{word} model rather than a {other} one.'
    )
  return (
    f'{listed}{but}, but is not lower at {large} with each: take the shape '
    'with the lower loss there.'
  )


def _carry_over(outcome: Outcome, scale: Scale) -> str:
  """Returns what it costs other shapes to take the usual one's rate."""
  _, usual, _ = shapes(scale)
  large = scale.batch_sizes[-1]
  costs = {
    f'{name}, {shape}': paired_difference(
      point, outcome.points[shape, name, large]
    )
    for (shape, name), point in outcome.carried.items()
  }
  means = [x.mean for x in costs.values()]
  where, most = max(costs.items(), key=lambda item: item[1].mean)
  if not all(map(math.isfinite, means)):
    return (
      f'With the rates of {usual} not all runs of other shapes end at batch '
      f'{large}: choose them again.'
    )
  text = (
    f'At batch {large} the rates of {usual} cost other shapes '
    f'{statistics.mean(means):.3f} nats on the mean of {len(costs)} cases, by '
    f'the same fresh seeds, {min(means):+.3f} at the least, and the most for '
    f'{where} ({most})'
  )
  if any(x.low > _SMALL for x in costs.values()):
    return f'{text}: choose the rate again for another shape.'
  if all(x.high <= _SMALL for x in costs.values()):
    return f'{text}: they carry over.'
  return f'{text}: none costs more than {_SMALL:g} for certain.'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the losses of the shapes, a panel for each contender."""
  result, (row,) = render.panels(1, len(CONTENDERS), sharey=True)
  names = [str(shape) for shape in shapes(scale)]
  for contender, axes in zip(CONTENDERS, row, strict=True):
    for size, style in zip(_sizes(scale), ('o-', 's--'), strict=True):
      points = [outcome.points[x, contender.name, size] for x in shapes(scale)]
      axes.errorbar(
        names,
        [p.mean if math.isfinite(p.mean) else math.nan for p in points],
        [p.std for p in points],
        fmt=style,
        capsize=3,
        color=render.COLORS[contender.name],
        label=f'batch {size}',
      )
    axes.set_title(contender.name, fontsize=8)
    axes.set_xlabel('layers × width')
    axes.legend(fontsize=7)
  row[0].set_ylabel('validation loss')
  return result
