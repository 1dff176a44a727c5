"""The study with one experiment: two runs of a tiny model.

A script, so that tests can start it as several processes.
"""

import dataclasses
from pathlib import Path

from matplotlib import pyplot

from examples.study import __main__ as command
from examples.study.analysis import report
from examples.study.analysis.tables import pivot
from examples.study.points import Point


class _TwoRuns:
  TITLE, TEXT = 'Two learning rates', 'Of one seed.'

  @staticmethod
  def plan(scale):
    results = yield [scale.run('adamw', 8, x) for x in (0.02, 0.01)]
    return [Point({'n': str(i)}, None, (x,)) for i, x in enumerate(results)]

  @staticmethod
  def tables(points):
    return {'losses': [{'loss': x['loss']} for x in pivot(points, ['n'])]}

  @staticmethod
  def figure(points):
    return pyplot.figure()


_SETTINGS = dict(
  cache_dir=Path('cache'), num_layers=1, width=16, num_heads=2,
  context_length=16, eval_sequences=8, unroll=1, vocab_size=257,
  micro_batch_size=None,
)  # fmt: skip
SCALES = {
  name: dataclasses.replace(scale, settings=scale.settings | _SETTINGS)
  for name, scale in command.SCALES.items()
}
EXPERIMENTS = {'batch-scaling': _TwoRuns}

if __name__ == '__main__':
  command.SCALES = SCALES
  command.EXPERIMENTS = report.EXPERIMENTS = EXPERIMENTS
  command.main()
