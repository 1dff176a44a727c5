"""Whether the order of optimizers holds beyond causal language models."""

import dataclasses
import math
import statistics
from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, Contender
from examples.study.differences import leaders
from examples.study.experiments import batch_scaling, tuned_initialization
from examples.study.plans import Plan, Result, Run, gather
from examples.study.points import Point, find_rate, judge
from examples.study.scales import Scale
from examples.study.tasks.digits import NUM_PATCHES
from examples.study.tuning import Tuned, select

TITLE = 'Beyond GPT: a masked language model, a ViT and an MLP-Mixer'
GPT, MASKED = 'GPT', 'masked language model'
MODELS = {'ViT': 'vit', 'MLP-Mixer': 'mixer'}
"""Tasks on images, by name."""
_BATCH_SIZE, _STEPS = 512, 40
_SEEDS = 10
_CLIFF = 0.3
"""Seeds deviate by up to 0.1 here, so that a rise of 0.1 may be noise."""
_SIZES = (1.0, 2.0)
"""Deviations of hidden matrices at the start, over one by the root of fan-in;
the norms that are kept are those of the start, so their size is tuned too."""
_IMAGES = Scale(
  settings=dict(
    num_layers=2, num_heads=4, width=32, context_length=NUM_PATCHES
  ),
  tokens=_BATCH_SIZE * NUM_PATCHES * _STEPS,
  batch_sizes=(_BATCH_SIZE,),
  batch_size=_BATCH_SIZE,
  widths=(32,),
  has_few_steps=True,
)
"""The digits, at every scale of the study; a patch is a token."""


@dataclasses.dataclass(frozen=True)
class Judged:
  """What came out on images.

  Attributes:
    name: Name of the contender.
    size: Size of the initial weights that was chosen, out of _SIZES.
    tuned: Training losses by learning rate, at that size.
    results: Of fresh seeds.
  """

  name: str
  size: float
  tuned: Tuned
  results: list[Result]

  @property
  def training(self) -> Point:
    """Training losses."""
    return self._point([x.loss for x in self.results])

  @property
  def test(self) -> Point:
    """Test losses of the same runs."""
    return self._point(self._last('test_loss', math.inf))

  @property
  def errors(self) -> float:
    """Mean share of test images that are classified wrongly."""
    return statistics.mean(self._last('test_errors', 1.0))

  def _point(self, losses: list[float]) -> Point:
    return Point(self.name, _BATCH_SIZE, self.tuned, tuple(losses))

  def _last(self, name: str, otherwise: float) -> list[float]:
    """Returns a number of each seed, another where it is not finite."""
    found = [x.diagnostics[name][-1] for x in self.results]
    return [otherwise if x is None else x for x in found]


class Outcome(NamedTuple):
  """Points by name of the text's task and contender; images alike."""

  text: dict[tuple[str, str], Point]
  images: dict[tuple[str, str], Judged]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans all contenders on all tasks."""
  found = yield from gather(
    {
      'text': gather({x.name: _plan_text(scale, x) for x in CONTENDERS}),
      'images': gather(
        {
          (model, x.name): _plan_images(scale, x, task)
          for model, task in MODELS.items()
          for x in CONTENDERS
        }
      ),
    }
  )
  text = {
    (task, name): point
    for name, points in found['text'].items()
    for task, point in points.items()
  }
  return Outcome(text, found['images'])


def _plan_text(scale: Scale, contender: Contender) -> Plan[dict[str, Point]]:
  """Plans the masked language model from the rate of the causal one."""
  size = scale.batch_size
  gpt = yield from tuned_initialization.plan_best(scale, contender, size)
  tuned = yield from find_rate(
    scale,
    gpt.best,
    size,
    start=gpt.point.tuned.learning_rate,
    stride=1,
    cliff=_CLIFF,
    task='masked',
  )
  num_seeds = scale.seeds_at(size)
  masked = yield from judge(
    scale, gpt.best, size, tuned, num_seeds, task='masked'
  )
  return {GPT: gpt.point, MASKED: masked}


def _plan_images(scale: Scale, contender: Contender, task: str) -> Plan[Judged]:
  own = dataclasses.replace(_IMAGES, steps=scale.steps)

  def run(learning_rate: float, seed: int, size: float) -> Run:
    return contender.run(
      own, _BATCH_SIZE, learning_rate, seed=seed, init_std=size, task=task
    )

  tunings: dict[float, Tuned] = yield from gather(
    {
      size: select(
        lambda rate, seed, size=size: run(rate, seed, size),
        contender.start,
        own.tuning_seeds,
        own.stride,
        _CLIFF,
      )
      for size in _SIZES
    }
  )
  size = min(tunings, key=lambda x: tunings[x].loss)
  tuned = tunings[size]
  results = yield [
    run(tuned.learning_rate, seed, size) for seed in range(1, _SEEDS + 1)
  ]
  return Judged(contender.name, size, tuned, results)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, the order on each task, and which to take."""
  criteria = _criteria(outcome)
  return '\n\n'.join(
    [
      'The masked language model has the layers, text and tokens of the GPT, '
      f'batch {scale.batch_size}, but attends to both sides, and predicts the '
      '15 % of the tokens that are masked. Warm-up, b1 and initial weights are '
      'those that suit an optimizer best with the GPT. Mean and standard '
      'deviation over seeds, and the learning rate:',
      render.markdown(_text_rows(outcome)),
      f'ViT and MLP-Mixer: {_IMAGES.settings["num_layers"]} layers of width '
      f'{_IMAGES.settings["width"]} from Flax, on the 1,437 training images of '
      f'scikit-learn’s digits, batch {_BATCH_SIZE}, {_STEPS} steps. '
      'Initialization by fan-in; each optimizer chooses its rate, and whether '
      'hidden matrices start at once or twice that size, by the training loss '
      'of tuning seeds; warm-up and b1 are those that suited it best in the '
      f'fewest steps of the GPT. {_SEEDS} fresh seeds of weights and order '
      'judge, on one random split, whose test images are of writers who '
      'are in the training set too: intervals hold for these 360 test images.',
      render.markdown(_image_rows(outcome)),
      *(
        f'{name}: {batch_scaling.in_order(points)}'
        for name, points in criteria.items()
      ),
      _advice(criteria),
    ]
  )


def _text_rows(outcome: Outcome) -> list[dict[str, str]]:
  return [
    {'optimizer': x.name}
    | {
      task: render.format_with_rate(outcome.text[task, x.name])
      for task in (GPT, MASKED)
    }
    for x in CONTENDERS
  ]


def _image_rows(outcome: Outcome) -> list[dict[str, str]]:
  return [
    {
      'model': model,
      'optimizer': name,
      'training loss': render.format_point(found.training),
      'test loss': render.format_point(found.test),
      'test errors': f'{found.errors:.1%}',
      'learning rate': render.format_learning_rate(found.tuned),
      'size': f'{found.size:g}',
    }
    for (model, name), found in outcome.images.items()
  ]


def _criteria(outcome: Outcome) -> dict[str, list[Point]]:
  """Returns the points of all contenders by what is compared."""
  found = {
    'Masked language model': [outcome.text[MASKED, x.name] for x in CONTENDERS]
  }
  for model in MODELS:
    judged = [outcome.images[model, x.name] for x in CONTENDERS]
    found[f'{model}, training'] = [x.training for x in judged]
    found[f'{model}, test'] = [x.test for x in judged]
  return found


def _advice(criteria: dict[str, list[Point]]) -> str:
  """Returns which to take for other models than GPT, in one sentence."""
  best = {
    x: [y.name for y in leaders(points)] for x, points in criteria.items()
  }
  everywhere = [
    x.name
    for x in CONTENDERS
    if all(x.name in names for names in best.values())
  ]
  if everywhere:
    most = {
      x.name: count
      for x in CONTENDERS
      if len(best) // 2
      < (count := sum(x.name in names for names in best.values()))
      < len(best)
    }
    listed = ', '.join(f'{x} in {count}' for x, count in most.items())
    also = f' (of these {len(best)} comparisons, also {listed})' if most else ''
    return (
      f'For other models than GPT take {" or ".join(everywhere)}: the lowest '
      'loss, or one that cannot be told from it, in training and test of all '
      f'of these models{also}.'
    )
  listed = '; '.join(
    f'{name}: {" or ".join(names) or "a seed of each diverged"}'
    for name, names in best.items()
  )
  return (
    'For other models than GPT no optimizer is the best throughout, so choose '
    f'by the model ({listed}).'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each model."""
  del scale
  tunings = {
    MASKED: {x.name: outcome.text[MASKED, x.name].tuned for x in CONTENDERS}
  } | {
    model: {x.name: outcome.images[model, x.name].tuned for x in CONTENDERS}
    for model in MODELS
  }
  result = render.draw_tunings(tunings, sharey=False)
  for axes in result.axes[1:]:
    axes.set_ylabel('training loss')
  return result
