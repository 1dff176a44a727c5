import math
from unittest import mock

import numpy as np

from examples.gpt2.run import loop


def test_an_infinite_loss_of_weight_0_is_logged_and_ends_no_run():
  tokens = np.zeros((2, 1, 17), np.int32)
  measured = iter([np.full((2, 1), 2.0), np.full((2, 1), np.inf)])
  programs = mock.Mock(
    sequence_losses={tokens.shape: lambda *_: next(measured)}
  )
  log = mock.MagicMock()
  steps = loop._Steps(
    config=None,
    programs=programs,
    evaluations=[
      loop._Evaluation('held out', 1.0, tokens, 2),
      loop._Evaluation('other', 0.0, tokens, 2),
    ],
    model=None,
    make_batch=None,
    folder=None,
    checkpoints=None,
    log=log,
    stop=None,
    state=mock.Mock(),
    taken=4,
  )
  assert steps._evaluate(4) == 2.0
  losses = {'held out': 2.0, 'other': math.inf}
  log.finish_step.assert_called_once_with(
    {'val_loss': 2.0, 'val_losses': losses}
  )
