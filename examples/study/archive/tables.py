"""The tables of the experiments that are closed."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import statistics
from typing import Any, NamedTuple

from examples.study.analysis.intervals import (
  Difference,
  contrast,
  difference,
  paired_difference,
)
from examples.study.analysis.tables import (
  Rows,
  Tables,
  compare,
  format_detectable,
  format_sample,
  loss,
  loss_and_rate,
  pivot,
  rate,
  select,
  tuned_loss_and_rate,
  values,
)
from examples.study.optimizers import (
  ADAMW,
  LAMB,
  MERIT,
  MUON,
  PAIRS,
  WITH_RATIOS,
)
from examples.study.points import Point
from examples.study.trial import Result

_PAIRS = [(x.name, y.name) for x, y in PAIRS]


class Closed(NamedTuple):
  """An experiment that is closed.

  Attributes:
    title: Its title.
    text: What was run.
    tables: Function from its points to its tables.
  """

  title: str
  text: str
  tables: Callable[[list[Point]], Tables]


def _mechanism(points: list[Point]) -> Tables:
  pairs = [(MERIT.name, ADAMW.name), (MERIT.name, LAMB.name)]
  return {
    'losses': pivot(points, ['model'], 'optimizer', {'': loss_and_rate}),
    **compare(points, pairs, 'model'),
    'change of the difference': [
      {
        'difference': f'{first} − {second}',
        'attention minus mean of values': str(
          _interaction(
            points,
            ('optimizer', first, second),
            ('model', 'attention', 'mean of values'),
          )
        ),
      }
      for first, second in pairs
    ],
  }


def _interaction(
  points: list[Point], one: tuple[str, Any, Any], other: tuple[str, Any, Any]
) -> Difference:
  """Returns the difference of differences along two labels.

  Args:
    points: The points.
    one: A label and two of its values, the second subtracted from the first.
    other: Another such, along which that changes.
  """
  (label, first, second), (along, here, there) = one, other

  def losses(x: Any, y: Any) -> tuple[float, ...]:
    (point,) = select(points, **{label: x, along: y})
    return point.losses

  return contrast(
    [losses(first, here), losses(second, there)],
    [losses(second, here), losses(first, there)],
  )


def _initialization(points: list[Point]) -> Tables:
  pairs = [(MERIT.name, ADAMW.name), (MERIT.name, MUON.name)]
  return {
    'losses': pivot(points, ['optimizer'], 'std', {'': loss_and_rate}),
    **compare(points, pairs, 'std'),
  }


def _weight_decay(points: list[Point]) -> Tables:
  best = select(points, role='best')
  tried = sorted(
    select(points, role='tried'),
    key=lambda x: (x['batch'], float(x['variant'].split()[1])),
  )
  changed = [x for x in best if x['variant'] not in ('λ 0.01', 'none')]
  usual = {
    (x['optimizer'], x['batch']): x for x in select(points, role='usual')
  }

  def change(point: Point) -> str:
    other = usual[point['optimizer'], point['batch']]
    found = paired_difference(point, other)
    return f'{point["variant"]}: {found}'

  return {
    'losses': pivot(best, ['optimizer'], 'batch'),
    **compare(best, _PAIRS, 'batch'),
    'tried': pivot(
      tried, ['batch', 'optimizer'], 'variant', {'': tuned_loss_and_rate}
    ),
    'changes with fresh seeds': pivot(
      changed, ['optimizer'], 'batch', {'': change}
    ),
    'mean changes': _mean_changes(changed, usual),
  }


def _mean_changes(
  changed: list[Point], usual: dict[tuple[str, int], Point]
) -> Rows:
  """Returns the mean change of a weight decay chosen at several batches."""
  groups: dict[tuple[str, str], list[Point]] = {}
  for point in changed:
    groups.setdefault((point['optimizer'], point['variant']), []).append(point)
  return [
    {
      'optimizer': name,
      'weight decay': variant,
      'batches': ', '.join(f'{x["batch"]}' for x in points),
      'change': str(contrast([_changes(points, usual)], [])),
    }
    for (name, variant), points in groups.items()
    if len(points) > 1
  ]


def _changes(
  points: list[Point], usual: dict[tuple[str, int], Point]
) -> list[float]:
  """Returns the change of each fresh seed."""
  return [
    one - other
    for point in points
    for one, other in zip(
      point.losses,
      usual[point['optimizer'], point['batch']].losses,
      strict=True,
    )
  ]


def _beyond_gpt(points: list[Point]) -> Tables:
  images = [x for x in points if x['model'] in ('ViT', 'MLP-Mixer')]
  text = [x for x in points if x not in images]
  criteria = [x.labelled(criterion=x['model']) for x in text]
  for point in images:
    model = point['model']
    criteria += [
      point.labelled(criterion=f'{model}, training'),
      _test_losses(point).labelled(criterion=f'{model}, test'),
    ]
  own = [(WITH_RATIOS.name, x.name) for x in (MERIT, ADAMW)]
  return {
    'text': pivot(text, ['optimizer'], 'model', {'': loss_and_rate}),
    'images': pivot(
      images,
      ['model', 'optimizer'],
      cells={
        'training loss': loss,
        'test loss': lambda x: loss(_test_losses(x)),
        'test errors': _test_errors,
        'learning rate': rate,
        'size': lambda x: f'{x["size"]:g}',
      },
    ),
    **compare(criteria, [*_PAIRS, *own], 'criterion'),
  }


def _test_losses(point: Point) -> Point:
  """Returns a point of images with the test losses of the same trials."""

  def tested(result: Result) -> Result:
    test_loss = result.diagnostics['test_loss'][-1]
    return dataclasses.replace(result, loss=test_loss)

  return dataclasses.replace(point, fresh=tuple(map(tested, point.fresh)))


def _test_errors(point: Point) -> str:
  shares = [x.diagnostics['test_errors'][-1] for x in point.fresh]
  return f'{statistics.mean(shares):.1%}'


def _batch_ramp(points: list[Point]) -> Tables:
  by_way = {(x['start'], x['then']): x for x in points}
  stay = points[0]
  start = stay['start']
  rows = []
  for name in (ADAMW.name, MERIT.name, MUON.name, WITH_RATIOS.name):
    large = f'{name}, batch 256'
    taken, fresh = (
      by_way[start, x] for x in (large, f'{large}, fresh moments')
    )
    rows.append(
      {
        'then': large,
        f'minus {start} throughout': str(difference(taken, stay)),
        'detectable': format_detectable(difference(taken, stay)),
        'minus batch 256 throughout': str(difference(taken, by_way[large, ''])),
        'minus fresh moments': str(paired_difference(taken, fresh)),
      }
    )
  return {
    'losses': pivot(
      points,
      ['start', 'then'],
      cells={
        'steps': lambda x: f'{x["steps"]:,}',
        'loss': loss,
        f'minus {start}': lambda x: (
          '' if x is stay else str(difference(x, stay))
        ),
        'learning rate': rate,
      },
    ),
    'differences': rows,
  }


_QUANTITIES = {
  'top eigenvalue': 'top_eigenvalue',
  'trace': 'trace',
  'scale-free': 'relative_eigenvalue',
}
_PRECONDITIONED = 'preconditioned_eigenvalue'
_SMALLER = f'{MERIT.name}, weights in proportion to the width'


def _curvature(points: list[Point]) -> Tables:
  def quantity(name: str) -> Callable[[Point], str]:
    return lambda x: format_sample(_measured(x, name), _format_number)

  def preconditioned(point: Point) -> str:
    if _PRECONDITIONED not in point.fresh[0].measured:
      return ''
    rates = [x.learning_rate for x in point.fresh]
    found = zip(rates, _measured(point, _PRECONDITIONED), strict=True)
    return format_sample([x * y for x, y in found], _format_number)

  cells = {'loss': loss} | {x: quantity(y) for x, y in _QUANTITIES.items()}
  results = [result.measured for point in points for result in point.fresh]
  residuals = [y for x in results for k, y in x.items() if 'residual' in k]
  errors = [x['trace_error'] / abs(x['trace']) for x in results]
  return {
    'losses and curvature': pivot(
      points,
      ['optimizer', 'batch'],
      cells=cells | {'preconditioned': preconditioned},
    ),
    'factors over MERIT': [
      {'optimizer': name, 'batch': f'{size}'}
      | {x: _factor(points, name, size, y) for x, y in _QUANTITIES.items()}
      for name in (ADAMW.name, _SMALLER)
      for size in values(points, 'batch')
    ],
    'largest relative errors': [
      {'eigenvalues': f'{max(residuals):.2g}', 'traces': f'{max(errors):.2g}'}
    ],
  }


def _measured(point: Point, name: str) -> list[float]:
  return [x.measured[name] for x in point.fresh]


def _format_number(x: float) -> str:
  return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def _factor(points: list[Point], name: str, size: int, quantity: str) -> str:
  """Returns a quantity over that of MERIT, with its interval."""

  def logarithms(optimizer: str) -> list[float]:
    (point,) = select(points, optimizer=optimizer, batch=size)
    return [math.log(x) for x in _measured(point, quantity)]

  found = contrast([logarithms(name)], [logarithms(MERIT.name)])
  mean, low, high, detectable = map(math.exp, found)
  text = f'{mean:.3g} × [{low:.3g}, {high:.3g}]'
  if low <= 1 <= high:
    text += f', {detectable:.3g} × detectable'
  return text


_PUBLISHED = 'MERIT as published'
_OTHERS = (ADAMW.name, WITH_RATIOS.name)


def _stale_rows(points: list[Point]) -> Tables:
  pairs = [(x['optimizer'], _PUBLISHED) for x in points[1:]]
  groups = points[0].fresh[0].measured['embedding']
  return {
    'rows of the first seed': [
      {name: f'{group["rows"]}' for name, group in groups.items()}
    ],
    'losses': pivot(points, ['optimizer'], cells={'loss': loss_and_rate}),
    **{
      f'rows of the {matrix}': pivot(
        points,
        ['optimizer'],
        cells={
          group: lambda x, m=matrix, g=group: _rows(x, m, g)
          for group in ('never', 'rare')
        },
      )
      for matrix in ('embedding', 'head')
    },
    **compare(
      points, pairs, 'batch', paired=lambda first, _: first not in _OTHERS
    ),
  }


def _rows(point: Point, matrix: str, group: str) -> str:
  """Returns what became of rows: medians over seeds."""
  found = [x.measured[matrix] for x in point.fresh]
  found = [x for x in found if group in x]
  low, middle, high = map(
    statistics.median, zip(*(x[group]['growth'] for x in found), strict=True)
  )
  over = statistics.median(
    x[group]['norm'] / x['common']['norm'] for x in found
  )
  moved = statistics.median(x[group]['moved'] for x in found)
  return (
    f'{middle:.3g} [{low:.3g}, {high:.3g}], {over:.3g} of live rows, moved '
    f'{moved:.3g}'
  )


def _width_depth(points: list[Point]) -> Tables:
  own = select(points, role='own rate')
  carried = [x for x in points if x not in own]
  names, shapes = values(own, 'optimizer'), ('1 × 112', '3 × 64', '12 × 32')
  ordered = [
    point
    for name in names
    for shape in shapes
    for point in select(own, optimizer=name, shape=shape)
  ]
  changes = {
    name: _interaction(
      select(own, optimizer=name),
      ('batch', 256, 16),
      ('shape', shapes[-1], shapes[0]),
    )
    for name in names
  }
  return {
    'losses': pivot(
      ordered, ['optimizer', 'shape'], 'batch', {'': loss_and_rate}
    ),
    'rise from batch 16 to 256': [
      {'optimizer': name}
      | {shape: str(_rise(own, name, shape)) for shape in shapes}
      | {
        'deep minus wide': str(changes[name]),
        'detectable': format_detectable(changes[name]),
      }
      for name in names
    ],
    'cost of the rates of 3 × 64': pivot(
      carried, ['optimizer'], 'shape', {'': lambda x: _carried_cost(x, own)}
    ),
  }


def _rise(own: list[Point], name: str, shape: str) -> Difference:
  small, large = sorted(
    select(own, optimizer=name, shape=shape), key=lambda x: x['batch']
  )
  return difference(large, small)


def _carried_cost(point: Point, own: Sequence[Point]) -> str:
  labels = {x: point[x] for x in ('optimizer', 'shape', 'batch')}
  (chosen,) = select(own, **labels)
  return str(paired_difference(point, chosen))


ARCHIVE: dict[str, Closed] = {
  'mechanism': Closed(
    'Mechanism: without attention logits',
    """Batch 128, usual settings. In the control (mean of values), queries and
    keys are zero and stay so: each token takes the mean of the values so far.
    Five seeds, and the learning rate.""",
    _mechanism,
  ),
  'initialization': Closed(
    'Initialization',
    """Batch 128, usual warm-up and b1. Standard deviations of the initial
    weights: GPT-2 small’s 0.02, and once and twice its proportion to the width,
    0.0693 here. Three seeds, and the learning rate.""",
    _initialization,
  ),
  'weight-decay': Closed(
    'Weight decay tuned too',
    """As the comparison with everything tuned, and each optimizer with the
    weight decay λ that suits it best at a batch: 0, 0.01, 0.1, 0.3 or 1, the
    next one on either side of the best so far, from 0.01 on (Hyperball: without
    any). All parameters decay, gains and biases too. What was tried has losses
    of one seed, and the learning rate, which is chosen for each (at the smaller
    batches only if it is at most 0.02 worse at the rate of the best one). Where
    that seed chose another λ than 0.01: how it changes the losses of fresh
    seeds, seed by seed.""",
    _weight_decay,
  ),
  'beyond-gpt': Closed(
    'Beyond GPT: a masked language model, a ViT and an MLP-Mixer',
    """The masked language model has the layers, text and tokens of the GPT,
    batch 128, but attends to both sides, and predicts the 15 % of the tokens
    that are masked; warm-up, b1 and initial weights are those that suit an
    optimizer best with the GPT; five seeds. Its learning rates were first
    chosen with an instability margin of 0.1, as everywhere; the margin was
    raised to 0.3 after these results had been seen, because seeds deviate by up
    to 0.1 here. That moved the rates of MERIT and of Hyperball, and with it a
    conclusion, so that both are shown. ViT and MLP-Mixer: 2 layers of width 32,
    on the 1,437 training images of scikit-learn’s digits, batch 512, 40 steps;
    learning rate, and hidden matrices of once or twice the size by fan-in,
    chosen by the training loss of two seeds; ten seeds judge, on one random
    split with 360 test images.""",
    _beyond_gpt,
  ),
  'batch-ramp': Closed(
    'Small batch, then large',
    """AdamW at batch 16 for half of the tokens, half-way down its schedule;
    then another optimizer or batch for the other half, with a warm-up and a
    cosine to zero of its own, whose peak is tuned. Weights and moments are
    taken over (Muon: the first moment as its momentum), or moments start at
    zero (fresh). Warm-up, b1 and initial weights are those that suit an
    optimizer best at the batch throughout.""",
    _batch_ramp,
  ),
  'curvature': Closed(
    'Curvature at the end',
    """Everything tuned. The Hessian H of the training loss at the final
    weights, on a fixed sample of 128 training sequences: its top eigenvalue (48
    Lanczos iterations) and trace (Hutchinson, 24 vectors). Scale-free: of
    D H D, D = diag(|w|), for steps in parts of each weight. Preconditioned: of
    P^-1/2 H P^-1/2 times the peak learning rate, where P^-1 times the gradient
    is the step at a learning rate of 1; it compares within a batch only. Five
    seeds.""",
    _curvature,
  ),
  'stale-rows': Closed(
    'Rows without gradient',
    """Batch 128, an untied head, byte pairs, usual warm-up and b1; λ is 0.01
    unless said; one seed has chosen the rates. Of rows of tokens that a run has
    never seen, or in less than one step of ten (rare): the norm at the end over
    that at the start, its median and in brackets its 5th and 95th percentile;
    then the norm over that of all other rows; then the length of the change
    over that of the row at the start; all medians over seeds. These tokens
    hardly occur in the validation text either, so the losses show what a remedy
    costs the other tokens. Variants of MERIT are compared with the published
    rule seed by seed.""",
    _stale_rows,
  ),
  'width-depth': Closed(
    'Wide and deep',
    """Layers × width at about equal parameters in the layers. The rates of
    other shapes than 3 × 64 were chosen by one seed, around those of 3 × 64,
    whose warm-up, b1 and initial weights (in proportion to the width) they
    take. The cost of the rates of 3 × 64 is at batch 256, seed by seed.""",
    _width_depth,
  ),
}
"""The experiments by the names that their commands had."""
