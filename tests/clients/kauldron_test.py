"""Kauldron trains with MERIT, by the recipe of the documentation."""

import dataclasses

import jax
import pytest

pytest.importorskip('kauldron', reason='make test-clients installs it')

from kauldron import kd


@pytest.fixture(scope='module')
def recipe(load_recipe):
  return load_recipe('kauldron_merit.py')


class _Losses(kd.train.metric_writer.NoopWriter):
  """Keeps the losses."""

  def write_step_metrics(self, *, aux, **_):
    _LOSSES.append(float(aux.compute(flatten=True).loss_values['losses/loss']))


_LOSSES = []


def test_training(recipe, tmp_path):
  trainer = dataclasses.replace(
    recipe.trainer, workdir=tmp_path, writer=_Losses()
  )
  trainer.train()
  assert len(_LOSSES) >= recipe.STEPS
  assert _LOSSES[-1] < _LOSSES[0] - 0.3, _LOSSES


def test_updates(recipe, gradients_like, assert_merit):
  params = recipe.trainer.init_state().params
  gradients = gradients_like(params)
  optimizer = recipe.trainer.optimizer
  update = jax.jit(optimizer.update)
  _, state = update(gradients, optimizer.init(params), params)
  # The rate is zero in the first step, so look at the second, with new moments.
  state = jax.tree.map(
    lambda new, old: old if new.ndim else new, state, optimizer.init(params)
  )
  updates, _ = update(gradients, state, params)
  assert_merit(
    updates,
    params,
    gradients,
    {
      r'Dense_\d/kernel': 'rc',
      r'(Dense|LayerNorm)_\d/(bias|scale)': 'c',
      '(query|key|value)/kernel': 'rcc',
      '(query|key|value)/bias': 'cc',
      'out/kernel': 'rrc',
      'out/bias': 'c',
    },
    learning_rate=float(recipe.rate(1)),
    weight_decay=0.01,
  )
