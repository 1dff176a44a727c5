"""What is tuned, and how: learning rates, and one setting after the other."""

from examples.study.tuning.cases import (
  Case,
  find_rates,
  scale_rate,
)
from examples.study.tuning.coordinates import best
from examples.study.tuning.plans import (
  Plan,
  count_trials,
  execute,
  gather,
  gather_lists,
)
from examples.study.tuning.stages import (
  B1,
  compare_all,
  initial_weights,
  tune_stage,
  warmup_and_b1,
)

__all__ = [
  'B1', 'Case', 'Plan', 'best', 'compare_all', 'count_trials', 'execute',
  'find_rates', 'gather', 'gather_lists', 'initial_weights', 'scale_rate',
  'tune_stage', 'warmup_and_b1',
]  # fmt: skip
