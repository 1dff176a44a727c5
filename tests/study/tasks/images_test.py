import dataclasses
import sys

from flax import nnx
import jax
import numpy as np
import pytest
from sklearn import datasets

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import by_path
from examples.gpt2.optim.optimizers import hidden_or_others
from examples.study.contenders import ADAMW, CONTENDERS, KEPT
from examples.study.experiments import beyond_gpt
from examples.study.tasks import digits, images
from examples.study.tasks.classifiers import MIXERS, Classifier

_SCALE = dataclasses.replace(beyond_gpt._IMAGES, steps=4)
_SCALE = dataclasses.replace(
  _SCALE, settings=_SCALE.settings | dict(num_layers=1, width=8)
)


def _run(contender=ADAMW, task='mixer', rate=0.02, **changes):
  return contender.run(_SCALE, 512, rate, init_std=1.0, task=task, **changes)


def test_every_image_is_in_one_part_and_whole():
  train, test = digits.load_digits()
  assert (len(train.labels), len(test.labels)) == (1437, 360)
  pixels, labels = datasets.load_digits(return_X_y=True)
  patches = np.concatenate([train.patches, test.patches])
  grid = patches.reshape(-1, 4, 4, 2, 2).swapaxes(2, 3).reshape(-1, 64)

  def ordered(x, y):
    return sorted(map(tuple, np.column_stack([x, y]).tolist()))

  found = np.concatenate([train.labels, test.labels])
  assert ordered((grid + 1) * 8, found) == ordered(pixels, labels)


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  with pytest.raises(UsageError, match='scikit-learn: pip install'):
    digits.load_digits()


def test_attention_ignores_the_order_of_patches_and_an_mlp_does_not():
  patches = digits.load_digits()[1].patches[:8]
  for task, is_ordered in (('vit', False), ('mixer', True)):
    model = Classifier(_run().config, MIXERS[task], rngs=nnx.Rngs(0))
    model.positions.embedding.set_value(0 * model.positions.embedding[...])
    logits, others = (jax.jit(model)(x) for x in (patches, patches[:, ::-1]))
    assert np.allclose(logits, others, atol=1e-4) != is_ordered


@pytest.mark.parametrize('task', MIXERS)
def test_hidden_matrices_are_the_kernels_of_blocks(task):
  config = _run().config
  model = nnx.eval_shape(
    lambda: Classifier(config, MIXERS[task], rngs=nnx.Rngs(0))
  )
  params = nnx.as_pure(nnx.state(model))
  labels = by_path(hidden_or_others(params, config.qkv))
  hidden = {name for name, label in labels.items() if label == 'hidden'}
  kernels = {x for x in by_path(params) if x.endswith('kernel')}
  assert hidden == {x for x in kernels if x.startswith('blocks')}
  assert len(hidden) == {'vit': 6, 'mixer': 4}[task]


def test_hidden_matrices_start_by_their_inputs():
  config = dataclasses.replace(_run().config, width=64, init_std=2.0)
  model = Classifier(config, MIXERS['vit'], rngs=nnx.Rngs(0))
  for name, kernel in by_path(nnx.as_pure(nnx.state(model))).items():
    if name.startswith('blocks') and name.endswith('kernel'):
      inputs = 16 * 16 if 'down' in name else 64
      assert kernel.std() * inputs**0.5 == pytest.approx(2, rel=0.1), name


def test_a_run_depends_on_its_seed_alone():
  first, again, other = (
    images.train(_run(seed=seed))['loss'] for seed in (0, 0, 1)
  )
  assert first == again != other
  # That of a guess is 2.3.
  assert 0 < first < 2.5


def test_a_run_that_diverges_has_no_loss():
  assert images.train(_run(rate=1e30))['loss'] is None


@pytest.mark.slow
@pytest.mark.parametrize('task', MIXERS)
@pytest.mark.parametrize('contender', CONTENDERS, ids=lambda x: x.optimizer)
def test_every_optimizer_learns(contender, task):
  scale = dataclasses.replace(_SCALE, steps=40)
  run = contender.run(
    scale, 512, contender.start, init_std=1.0, task=task, seed=0
  )
  found = images.train(run)
  # Those of a guess are 2.3 and 0.9.
  assert found['loss'] < 2
  assert found['diagnostics']['test_errors'][0] < 0.7


def test_the_order_takes_each_image_once_a_step():
  order_SB = images._order(_run(KEPT).config, 1437)
  assert order_SB.shape == (4, 512)
  assert all(len(set(row)) == 512 for row in order_SB)
  assert len(set(order_SB.ravel())) > 1000
