"""The comparison at a large batch: its plan, rules, trials and report."""

import dataclasses
import math
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import time

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from examples import pretrain
from examples.study import corpus, large_batch, rules, trainer
from examples.study.analysis import large_batch as report
from examples.study.settings import PRESETS, Settings, Trial
import merit_optax

_ROOT = Path(__file__).parents[2]
_DRY = PRESETS['dry-run'][1]


def _run_plan(settings: Settings, loss) -> dict[Trial, float]:
  """Returns the losses of all trials, in the order of the plan."""
  losses: dict[Trial, float] = {}
  for trial in large_batch.plan(settings, losses):
    losses[trial] = loss(trial)
  return losses


@given(optimum=st.floats(-5.4, 5.4), diverges=st.integers(-2, 9))
def test_stage_a_brackets_the_best_rate(optimum: float, diverges: int):
  settings = dataclasses.replace(_DRY, rules=('merit',), large_batch=0)

  def loss(trial: Trial) -> float:
    return math.inf if trial.power > diverges else abs(trial.power - optimum)

  losses = _run_plan(settings, loss)
  by_power = {trial.power: x for trial, x in losses.items()}
  best = min(by_power, key=lambda power: by_power[power])
  assert {-2, -1, 0, 1, 2} <= set(by_power)
  assert {best - 1, best + 1} <= set(by_power)
  assert by_power[best] == min(
    loss(Trial('merit', x, 0, 1)) for x in range(-6, 7)
  )


def test_stage_b_takes_the_best_rates_in_order():
  best = {'merit': 1, 'muon': 0, 'adamw': -1, 'lamb': 0}
  losses = _run_plan(_DRY, lambda trial: abs(trial.power - best[trial.rule]))
  large = [
    (trial.rule, trial.power, trial.seed)
    for trial in losses
    if trial.batch_tokens == _DRY.large_batch
  ]
  assert large == [
    ('merit', 1, 1), ('muon', 0, 1), ('adamw', -1, 1), ('lamb', 0, 1),
    ('merit', 2, 1), ('muon', 1, 1), ('merit', 1, 2), ('adamw', -1, 2),
  ]  # fmt: skip


@pytest.fixture(scope='module')
def params():
  config = trainer.model_config(_DRY)
  return jax.jit(pretrain.init_params, static_argnums=0)(config)


def _update(rule: str, params, rate: float = 0.1):
  """Returns the second update, since the first of each Adam is a sign."""
  optimizer = rules.make_optimizer(rule, rate, _DRY)

  @jax.jit
  def steps(params):
    state = optimizer.init(params)
    for seed in range(2):
      leaves, structure = jax.tree.flatten(params)
      keys = jax.random.split(jax.random.key(seed), len(leaves))
      gradients = [
        jax.random.normal(key, x.shape)
        for key, x in zip(keys, leaves, strict=True)
      ]
      updates, state = optimizer.update(
        jax.tree.unflatten(structure, gradients), state, params
      )
    return updates

  return steps(params)


def test_all_but_hidden_matrices_get_the_same_update(params):
  hidden = merit_optax.hidden_matrices(params)
  updates = {rule: _update(rule, params) for rule in _DRY.rules}
  others = _update('merit', params, rate=0.2)
  assert sum(jax.tree.leaves(hidden)) == 4
  for rule, update in updates.items():
    jax.tree.map(
      lambda is_hidden, x, y, rule=rule: np.testing.assert_equal(
        np.array_equal(x, y), not is_hidden or rule == 'merit'
      ),
      hidden,
      update,
      updates['merit'],
    )
  # Only the rate of hidden matrices is a rule's.
  jax.tree.map(
    lambda is_hidden, x, y: np.testing.assert_allclose(
      y, x * (2 if is_hidden else 1), rtol=1e-5
    ),
    hidden,
    updates['merit'],
    others,
  )


def _by_hand(rule: str, gradients: list, w: np.ndarray) -> np.ndarray:
  """Returns the second direction of a stack of matrices, in NumPy."""
  m = v = np.zeros_like(w)
  for step, g in enumerate(gradients, 1):
    m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
    corrected = m / (1 - 0.8**step), v / (1 - 0.95**step)
  if rule == 'merit':
    z = m / (np.sqrt(v) + 1e-6) + 0.01 * w
    ratios = [
      np.abs(w).max(axes, keepdims=True) / np.abs(z).max(axes, keepdims=True)
      for axes in ((1, 2), 1, 2)
    ]
    z = np.clip(np.max(np.broadcast_arrays(*ratios), 0) * z, -1, 1)
  else:
    z = corrected[0] / (np.sqrt(corrected[1]) + 1e-6)
    z += w * {'adamw': 0.1, 'lamb': 0.01}[rule]
    if rule == 'lamb':
      norms = [np.sqrt((x**2).sum((1, 2), keepdims=True)) for x in (w, z)]
      z = norms[0] / norms[1] * z
  return z


@pytest.mark.parametrize('rule', ['merit', 'lamb', 'adamw'])
@pytest.mark.parametrize('size', [0.01, 100.0])
def test_updates_are_those_of_the_formulas(rule: str, size: float):
  rng = np.random.default_rng(0)
  w = 3 * rng.standard_normal((2, 4, 6))
  gradients = [size * k * rng.standard_normal(w.shape) for k in (1, 3)]
  optimizer = rules.make_optimizer(rule, 0.1, _DRY)
  params = {'mlp_up': jnp.asarray(w), 'bias': jnp.zeros(3)}
  state = optimizer.init(params)
  clipped = []
  for gradient in gradients:
    tree = {'mlp_up': jnp.asarray(gradient), 'bias': jnp.full(3, size)}
    norm = np.sqrt((gradient**2).sum() + 3 * size**2)
    clipped.append(gradient / max(1, norm))
    updates, state = optimizer.update(tree, state, params)
  rate = 2 / (0.3 * _DRY.steps)
  expected = -0.1 * rate * _by_hand(rule, clipped, w)
  np.testing.assert_allclose(updates['mlp_up'], expected, rtol=1e-4, atol=1e-7)
  # Equal gradients of the clipped sizes 1 and 1/3: Adam's step is about 1.
  assert 0.5 * 0.004 * rate < -updates['bias'][0] < 1.2 * 0.004 * rate


def test_sizes_of_updates(params):
  """MERIT's by the largest weight, Muon's as in its formula."""
  rate = 0.1 * 2 / (0.3 * _DRY.steps)  # Of the second step.
  kernel = params['blocks']['up']['kernel']
  merit, muon = (
    _update(rule, params)['blocks']['up']['kernel']
    for rule in ('merit', 'muon')
  )
  largest = np.abs(kernel).max((1, 2))
  np.testing.assert_array_less(
    np.abs(merit).max((1, 2)), rate * largest * (1 + 1e-6)
  )
  # Singular values of 0.7 to 1.2, times 0.2 sqrt(64); and the decay.
  sizes = np.linalg.svd(np.asarray(muon + rate * 0.1 * kernel))[1]
  assert 0.6 < sizes.min() / (1.6 * rate) < sizes.max() / (1.6 * rate) < 1.3


def test_the_schedule_rises_and_falls_on_lines():
  steps, rate = 10, 0.5
  settings = dataclasses.replace(_DRY, steps=steps)
  optimizer = rules.make_optimizer('adamw', rate, settings)
  weights = {'mlp': jnp.zeros((1, 2, 2)), 'bias': jnp.zeros(2)}
  state = optimizer.init(weights)
  sizes = []
  for _ in range(steps):
    ones = jax.tree.map(jnp.ones_like, weights)
    updates, state = optimizer.update(ones, state, weights)
    sizes.append(float(-updates['mlp'][0, 0, 0]))
  # A constant gradient gives Adam's update of 1 in each step.
  expected = rate * np.interp(range(1, steps + 1), [0, 3, 11], [0, 1, 0])
  np.testing.assert_allclose(sizes, expected, rtol=1e-4)


def test_largest_logits_are_those_of_the_softmax(params):
  config = trainer.model_config(_DRY)
  tokens = jax.random.randint(jax.random.key(1), (3, 17), 0, 256)
  model = pretrain.make_model(params, config)
  block = jax.tree.map(lambda x: x[0], params['blocks'])
  with jax.set_mesh(pretrain.make_mesh(config)):
    found = trainer.max_logits(params, tokens, config)
  x = model.embed(tokens[:, :-1])
  norm = (x - x.mean(-1, keepdims=True)) / np.sqrt(
    x.var(-1, keepdims=True) + 1e-5
  )
  qkv = norm @ block['qkv']['kernel'] + block['qkv']['bias']
  qkv = qkv.reshape(3, 16, 2, 3, 8)
  query, key = qkv[..., 0, :], qkv[..., 1, :]
  logits = np.einsum('bqhk,bshk->bhqs', query, key) / np.sqrt(8)
  visible = np.tri(16, dtype=bool)
  assert found.shape == (2,)
  np.testing.assert_allclose(found[0], logits[..., visible].max(), rtol=1e-5)


def test_micro_batches_do_not_change_losses():
  losses = []
  for micro_batch in (256, 128):
    settings = dataclasses.replace(
      _DRY, micro_batch=micro_batch, fsdp=8, steps=4
    )
    with jax.set_mesh(pretrain.make_mesh(trainer.model_config(settings))):
      run = trainer.Trainer(settings).run(Trial('merit', 0, 0, 1024))
    losses.append(run['train_losses'])
    assert run['evaluations'][-1]['step'] == 4
  assert losses[0][-1] < losses[0][0]
  np.testing.assert_allclose(*losses, rtol=0, atol=2e-4)


def test_a_run_that_diverges_ends_and_is_told_so():
  settings = dataclasses.replace(_DRY, steps=8)
  with jax.set_mesh(pretrain.make_mesh(trainer.model_config(settings))):
    run = trainer.Trainer(settings).run(Trial('adamw', 100, 0, 256))
  assert run['loss'] is None
  assert len(run['train_losses']) < 8


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'micro_batch': 100}, 'micro_batch must be a multiple of 16, got 100'),
    ({'small_batch': 300}, 'small_batch must be a multiple of 256, got 300'),
    ({'large_batch': 300}, 'large_batch must be a multiple of 256, got 300'),
    ({'eval_tokens': 512}, 'eval_tokens must be a multiple of 1024, got 512'),
    ({'data': Path('nowhere')}, 'nowhere has no train.bin. To build'),
  ],
)
def test_wrong_settings_are_refused(changes, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    large_batch.check(dataclasses.replace(_DRY, **changes))


def _command(results: Path, *flags: str) -> list[str]:
  return [
    sys.executable, '-m', 'examples.study.large_batch', 'dry-run',
    '--results', str(results), '--rules', 'merit', 'muon', '--steps', '4',
    *flags,
  ]  # fmt: skip


def _losses(path: Path) -> list[tuple[Trial, list[float]]]:
  return [
    (Trial(**x['trial']), x['train_losses']) for x in large_batch.read(path)
  ]


def test_a_killed_plan_goes_on_where_it_stopped(tmp_path):
  whole, killed = tmp_path / 'whole.jsonl', tmp_path / 'killed.jsonl'
  subprocess.run(_command(whole), check=True, cwd=_ROOT)
  process = subprocess.Popen(_command(killed), cwd=_ROOT)
  while len(large_batch.read(killed)) < 3:
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  first = killed.read_text()
  # No time is left for another one.
  subprocess.run(_command(killed, '--minutes', '0'), check=True, cwd=_ROOT)
  assert killed.read_text() == first
  subprocess.run(_command(killed), check=True, cwd=_ROOT)
  assert killed.read_text().startswith(first)
  assert len(first.splitlines()) < len(_losses(whole))
  assert _losses(killed) == _losses(whole)
  page = tmp_path / 'page.md'
  report.main(['--results', str(killed), '--out', str(page)])
  assert page.read_text().endswith('## Not run yet\n\nNothing.\n')
  assert (tmp_path / 'figures' / 'page.png').stat().st_size > 10_000


def test_a_page_of_stage_a_alone_and_of_mixed_settings(tmp_path):
  results, page = tmp_path / 'results.jsonl', tmp_path / 'page.md'
  lines = PRESETS['gpu'][1].results.read_text().splitlines(True)
  results.write_text(''.join(lines[:6]))
  report.main(['--results', str(results), '--out', str(page)])
  assert 'Stage A' in page.read_text() and 'Stage B' not in page.read_text()
  results.write_text(lines[0] + lines[1].replace('"steps": 236', '"steps": 9'))
  with pytest.raises(ValueError, match='^results must hold trials of the same'):
    report.main(['--results', str(results), '--out', str(page)])


def test_the_page_is_what_the_trials_say(tmp_path):
  page = tmp_path / 'large_batch.md'
  report.main(['--out', str(page)])
  committed = _ROOT / 'examples' / 'study' / 'LARGE_BATCH.md'
  assert page.read_text() == committed.read_text()


@pytest.mark.parametrize('module', [large_batch, corpus, report])
def test_documented_commands_take_their_arguments(module):
  pages = (_ROOT / 'examples' / 'study').glob('*.md')
  text = '\n'.join(page.read_text() for page in pages).replace('\\\n', ' ')
  name = re.escape(module.__name__)
  found = re.findall(rf'python -m {name}([^`\n#]*)', text + module.__doc__)
  assert found
  for flags in found:
    args = shlex.split(flags)
    if module is large_batch:
      tyro.extras.overridable_config_cli(PRESETS, args=args)
    else:
      kind = corpus.Settings if module is corpus else report.Options
      tyro.cli(kind, args=args)


def test_records_of_the_gpu_belong_to_its_preset():
  """So that the command goes on with them."""
  settings = PRESETS['gpu'][1]
  for record in large_batch.read(settings.results):
    data = record['settings']['data']
    assert record['settings'] == large_batch.facts(settings, data)
    assert Trial(**record['trial']).rate(settings) == record['rate']
