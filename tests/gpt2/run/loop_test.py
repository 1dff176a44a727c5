import math

from examples.gpt2.run.loop import weighted_mean


def test_an_infinite_loss_of_weight_0_does_not_count():
  assert weighted_mean([2.0, math.inf, 4.0], [1.0, 0.0, 3.0]) == 3.5
  assert weighted_mean([2.0, math.inf], [1.0, 0.5]) == math.inf
