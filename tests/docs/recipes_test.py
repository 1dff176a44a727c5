"""Recipes take the steps of their formulas, calculated in float64."""

from pathlib import Path
import re

import numpy as np
import pytest

from tests.merit_optax.arrays import muon_directions, normal, norms, run

_DOCS = Path(__file__).parents[2] / 'docs'
_STEPS = 5


def _names(page, heading):
  """Returns the names that the first block below a heading defines."""
  text = (_DOCS / page).read_text().split(f'\n{heading}\n', 1)[1]
  code = re.search(r'^```python\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  names = {}
  exec(compile(code[1], heading, 'exec'), names)
  return names


def _trees(shapes):
  """Returns parameters and gradients of these shapes."""
  params, *gradients = (
    {name: normal([seed, i], x) for i, (name, x) in enumerate(shapes.items())}
    for seed in range(1 + _STEPS)
  )
  return params, gradients


def _assert_follows(optimizer, shape, rule):
  """Checks an optimizer of a matrix against a rule in float64.

  The rule is a function from a matrix and its gradients to an iterator over the
  matrix after each step.
  """
  params, gradients = _trees({'mlp_up': shape})
  found = [x.params['mlp_up'] for x in run(optimizer, params, gradients)]
  w, *gs = (np.asarray(x['mlp_up'], np.float64) for x in (params, *gradients))
  for actual, expected in zip(found, rule(w, gs), strict=True):
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_muon_per_head():
  names = _names('kit.md', '### Muon per head')
  optimizer, attention = names['optimizer'], names['attention']
  kernels = {
    f'attn/{name}/kernel': x['kernel'].shape for name, x in attention.items()
  }
  params, gradients = _trees(kernels)
  heads = {'q': names['HEADS'], 'o': names['HEADS']}
  steps = list(run(optimizer, params, gradients))
  for name in params:
    projection = name.split('/')[1][0]
    count, axis = heads.get(projection, names['KEY_HEADS']), projection != 'o'
    per_head = zip(
      *(
        muon_directions(each)
        for each in zip(
          *(np.split(g[name], count, int(axis)) for g in gradients),
          strict=True,
        )
      ),
      strict=True,
    )
    for step, directions in zip(steps, per_head, strict=True):
      expected = [-0.02 * 0.2 * max(q.shape) ** 0.5 * q for q in directions]
      np.testing.assert_allclose(
        step.updates[name], np.concatenate(expected, int(axis)), atol=2e-6
      )
      # As a whole, the matrix takes steps of the size that it would take.
      size = np.sqrt(np.mean(np.square(step.updates[name])))
      assert size == pytest.approx(0.02 * 0.2, rel=0.2)


@pytest.mark.parametrize('shape', [(8, 24), (24, 8)])
def test_normuon_and_cautious_weight_decay(shape):
  def rule(w, gradients):
    v, factor = 0, 0.2 * max(shape) ** 0.5
    for q in muon_directions(gradients):
      v = 0.95 * v + 0.05 * np.mean(q**2, 0)
      scaled = q / np.sqrt(v)
      u = factor * scaled * np.linalg.norm(q) / np.linalg.norm(scaled)
      w = w - 0.02 * (u + 0.1 * np.where(np.sign(u) == np.sign(w), w, 0))
      yield w

  names = _names('kit.md', '### NorMuon and cautious weight decay')
  _assert_follows(names['optimizer'], shape, rule)


def _adam(gradients):
  m = v = 0
  for g in gradients:
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    yield m / (np.sqrt(v) + 1e-6)


def test_decay_beside_hyperball():
  names = _names('recipes.md', '## Decay by name')
  kernels = {f'attn/{x}_proj/kernel': (8, 8) for x in 'qkvo'}
  others = {'attn/gate_scale': (8,), 'router': (8, 4), 'norm/scale': (8,)}
  params, gradients = _trees(kernels | others)
  steps = list(run(names['optimizer'], params, gradients))
  for name in others:
    w, *gs = (np.asarray(x[name], np.float64) for x in (params, *gradients))
    for count, (step, u) in enumerate(zip(steps, _adam(gs), strict=True)):
      decay = 0.02 * (1 - count / names['STEPS'])
      w = w - names['schedule'](count) / 3 * (
        u + (decay if name != 'norm/scale' else 0) * w
      )
      np.testing.assert_allclose(step.params[name], w, atol=2e-6)
  for name in kernels:
    np.testing.assert_allclose(
      norms(steps[-1].params[name], None, 'l2'),
      norms(params[name], None, 'l2'),
      rtol=1e-6,
    )
