import math

import pytest

from examples.study.experiments import rate_tolerance
from examples.study.experiments.rate_tolerance import CONTENDERS
from examples.study.plans import Result
from examples.study.scales import SCALES


def _outcome(costs):
  """Returns results of two seeds, which end 2 and 3 nats high if tuned."""
  return {
    (x.name, factor): [
      Result(
        seed + costs(rank, factor),
        {'max_attention_logit': [[10.0, seed * factor]]},
      )
      for seed in (2.0, 3.0)
    ]
    for rank, x in enumerate(CONTENDERS)
    for factor in rate_tolerance.FACTORS
  }


def test_costs_are_those_over_the_rate_chosen():
  outcome = _outcome(lambda rank, factor: rank * math.log2(factor) ** 2 / 10)
  first, second, *_ = (x.name for x in CONTENDERS)
  assert rate_tolerance.cost(outcome, first, 4.0) == 0
  assert rate_tolerance.cost(outcome, second, 0.5) == pytest.approx(0.1)
  assert rate_tolerance.cost(outcome, second, 4.0) == pytest.approx(0.4)
  text = rate_tolerance.section(outcome, SCALES['nano'])
  names = [x.name for x in CONTENDERS]
  worst = (f'{name} +{rank / 10:.3f}' for rank, name in enumerate(names))
  assert text.count('| 12 |') == len(CONTENDERS)
  assert text.endswith(f'half and twice the rate: {", ".join(worst)}.')


def test_one_seed_that_diverges_is_told():
  outcome = _outcome(lambda rank, factor: 0.0)
  name = CONTENDERS[0].name
  outcome[name, 2.0][1] = Result(math.inf, {})
  assert rate_tolerance.cost(outcome, name, 2.0) == math.inf
  assert f'{name} diverged.' in rate_tolerance.section(outcome, SCALES['nano'])
