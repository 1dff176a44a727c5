"""The study with one experiment: two runs of a tiny model.

A script, so that tests can start it as several processes.
"""

import dataclasses
from pathlib import Path

from matplotlib import pyplot

from examples.study import __main__ as command, report


class _TwoRuns:
  TITLE = 'Two learning rates'

  @staticmethod
  def plan(scale):
    return (yield [scale.run('adamw', 8, x) for x in (0.02, 0.01)])

  @staticmethod
  def section(results, scale):
    return ', '.join(f'{result.loss:.3f}' for result in results)

  @staticmethod
  def figure(results, scale):
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
EXPERIMENTS = {'mechanism': _TwoRuns}

if __name__ == '__main__':
  command.SCALES = SCALES
  report.EXPERIMENTS = EXPERIMENTS
  command.main()
