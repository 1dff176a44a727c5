"""Kauldron trains with our optimizers, by the recipe of the documentation."""

import dataclasses

import pytest

pytest.importorskip('kauldron', reason='make test-clients installs it')

from kauldron import kd

import merit_optax


@pytest.fixture(scope='module')
def recipe(load_recipe):
  return load_recipe('kauldron_merit')


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


def test_each_optimizer(recipe, load_recipe, assert_like_our_loop, name):
  optimizer = load_recipe('merit_by_name').make(
    name,
    0.02,
    weight_decay=0.01,
    hidden='DotProductAttention_0/.*kernel',
    weight_dimension_numbers=merit_optax.flax_dimension_numbers,
  )
  assert_like_our_loop(
    optimizer,
    name,
    recipe.trainer.init_state().params,
    {
      r'Dense_\d/kernel': 'rc',
      r'(Dense|LayerNorm)_\d/(bias|scale)': 'c',
      '(query|key|value)/kernel': 'rcc',
      '(query|key|value)/bias': 'cc',
      'out/kernel': 'rrc',
      'out/bias': 'c',
    },
    learning_rate=0.02,
    weight_decay=0.01,
    others='Dense_',
  )
