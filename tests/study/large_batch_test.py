"""The experiments at large batches: plan, rules, trials and report."""

import dataclasses
import inspect
import json
import math
import os
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

from examples.gpt2.model import as_module
from examples.gpt2.sharding import make_mesh
from examples.study import corpus, large_batch, report, rules, trainer
from examples.study.settings import PRESETS, Settings, Trial
import merit_optax
from tests.merit_optax.arrays import oracle_ratios, oracle_scale

_ROOT = Path(__file__).parents[2]
_DRY = PRESETS['dry-run'][1]


def _run_plan(settings: Settings, loss) -> dict[Trial, float]:
  """Returns the losses of all trials, in the order of the plan."""
  losses: dict[Trial, float] = {}
  for trial in large_batch.plan(settings, losses):
    losses[trial] = loss(trial)
  return losses


@given(optimum=st.floats(-4.4, 3.9), diverges=st.integers(-1, 9))
def test_tuning_brackets_the_best_rate_at_each_batch(
  optimum: float, diverges: int
):
  settings = dataclasses.replace(_DRY, rules=('merit',), seeds=(1,))
  shift = {256: 0.0, 1024: 0.5}

  def loss(trial: Trial) -> float:
    best = optimum + shift[trial.batch_tokens]
    return math.inf if trial.power > diverges else abs(trial.power - best)

  losses = _run_plan(settings, loss)
  for batch in settings.batches:
    by_power = large_batch.tried(losses, 'merit', batch)
    chosen, is_close = large_batch.choose(by_power)
    assert {-1, 0, 1, chosen - 1, chosen + 1} <= set(by_power)
    lowest = min(loss(Trial('merit', x, 0, batch)) for x in range(-6, 7))
    assert by_power[chosen] <= lowest + large_batch.REPEATABLE
    near = [x for x in by_power.values() if x <= lowest + 0.003]
    assert is_close == (len(near) > 1)
    fresh = [x for x in losses if x.seed and x.batch_tokens == batch]
    assert fresh == [Trial('merit', chosen, 1, batch)]


def test_a_close_choice_takes_the_smaller_rate():
  assert large_batch.choose({0: 2.0, 1: 1.9981, 2: 1.998}) == (0, True)
  assert large_batch.choose({0: 2.0, 1: 1.9969, 2: 1.999}) == (1, True)
  assert large_batch.choose({0: 2.0, 1: 1.99, 2: math.inf}) == (1, False)


def test_near_rates_are_taken_with_the_other_seeds_too():
  settings = dataclasses.replace(
    _DRY, rules=('merit',), batches=(256,), seeds=(1, 2), near=0.02
  )
  of_seed_0 = {-1: 2.5, 0: 2.0, 1: 2.015}
  losses = {Trial('merit', k, 0, 256): x for k, x in of_seed_0.items()}
  planned = [(x.seed, x.power) for x in large_batch.plan(settings, losses)]
  assert planned[3:] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_seeds_train_at_given_rates():
  settings = dataclasses.replace(
    _DRY, rules=('merit',), batches=(256,), seeds=(0, 1), at=(-1, 2)
  )
  large_batch.check(settings)
  planned = [(x.seed, x.power) for x in large_batch.plan(settings, {})]
  assert planned == [(0, -1), (0, 2), (1, -1), (1, 2)]


@pytest.fixture(scope='module')
def params():
  config = trainer.model_config(_DRY)
  with jax.set_mesh(make_mesh('')):
    return trainer.init_params(config, 0)


_STEPS = 12


def _make(rule: str, rate: float, steps: int = _STEPS):
  moments = rules.Moments(0.8, 1e-6, 'float32')
  return rules.make_optimizer(rule, rate, steps, 0.3, moments)


def _tree(kernel, bias):
  """Returns parameters of a model of which a kernel and a bias have values."""
  qkv = {'kernel': jnp.zeros((len(kernel), 4, 1, 3, 2))}
  block = {'attention': {'qkv': qkv}, 'mlp': {'up': {'kernel': kernel}}}
  return {'blocks': block, 'final_norm': {'bias': bias}}


def _kernel(tree):
  return tree['blocks']['mlp']['up']['kernel']


def _update(rule: str, params, rate: float = 0.1):
  """Returns the second update, since the first of each Adam is a sign."""
  optimizer = _make(rule, rate)

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


# Ratios, norm and threshold of the clip.
_MERIT = {
  'merit': ('weight row column', 'max', 1),
  'merit-no-clip': ('weight row column', 'max', np.inf),
  'merit-l2': ('weight row column', 'l2', 1),
  'merit-weight-only': ('weight', 'max', 1),
  'merit-no-weight-floor': ('row column', 'max', 1),
}


def _by_hand(rule: str, gradients: list, w: np.ndarray) -> np.ndarray:
  """Returns the second direction of a stack of matrices, in NumPy."""
  m = v = np.zeros_like(w)
  for step, g in enumerate(gradients, 1):
    m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
    corrected = m / (1 - 0.8**step), v / (1 - 0.95**step)
  if rule in _MERIT:
    names, norm, threshold = _MERIT[rule]
    z = m / (np.sqrt(v) + 1e-6) + 0.01 * w
    ratios = oracle_ratios(z, w, (1,), (2,), norm)
    z = oracle_scale(z, [ratios[name] for name in names.split()])
    return np.clip(z, -threshold, threshold)
  z = corrected[0] / (np.sqrt(corrected[1]) + 1e-6)
  z += w * {'adamw': 0.1, 'lamb': 0.01}[rule]
  if rule == 'lamb':
    z = oracle_scale(z, [oracle_ratios(z, w, (1,), (2,), 'l2')['weight']])
  return z


@pytest.mark.parametrize(
  'rule', [x for x in rules.RULES if not x.startswith('muon')]
)
def test_updates_are_those_of_the_formulas(rule: str):
  size = 100.0  # Beyond the clip of the gradients.
  rng = np.random.default_rng(0)
  # Columns of many sizes, so that all ratios and thresholds matter.
  w = rng.standard_normal((2, 4, 6)) * np.geomspace(0.05, 9, 6)
  gradients = [size * k * rng.standard_normal(w.shape) for k in (1, 3)]
  optimizer = _make(rule, 0.1)
  params = _tree(jnp.asarray(w), jnp.zeros(3))
  state = optimizer.init(params)
  clipped = []
  for gradient in gradients:
    tree = _tree(jnp.asarray(gradient), jnp.full(3, size))
    norm = np.sqrt((gradient**2).sum() + 3 * size**2)
    clipped.append(gradient / max(1, norm))
    updates, state = optimizer.update(tree, state, params)
  rate = 2 / (0.3 * _STEPS)
  name = rule.removesuffix('-all')
  directions = {x: _by_hand(x, clipped, w) for x in (name, *_MERIT)}
  assert len({x.tobytes() for x in directions.values()}) == len(directions)
  expected = -0.1 * rate * directions[name]
  np.testing.assert_allclose(_kernel(updates), expected, rtol=1e-4, atol=1e-7)
  if rules.RULES[rule].for_all:
    return
  # Equal gradients of the clipped sizes 1 and 1/3: Adam's step is about 1.
  assert (
    0.5 * 0.004 * rate < -updates['final_norm']['bias'][0] < 1.2 * 0.004 * rate
  )


@pytest.mark.parametrize(
  'rule', ['muon', 'muon-bfloat16', 'muon-polar-express', 'muon-heads']
)
def test_updates_of_muon_are_nearly_orthogonal(rule, params):
  rate = 0.1 * 2 / (0.3 * _STEPS)  # Of the second step.
  kernel, muon = _kernel(params), _kernel(_update(rule, params))
  # Singular values of 0.7 to 1.2, times 0.2 sqrt(64); and the decay.
  sizes = np.linalg.svd(np.asarray(muon + rate * 0.1 * kernel))[1]
  assert 0.6 < sizes.min() / (1.6 * rate) < sizes.max() / (1.6 * rate) < 1.3


def _qkv(tree):
  return tree['blocks']['attention']['qkv']['kernel']


def test_heads_have_matrices_of_their_own(params):
  rate = 0.1 * 2 / (0.3 * _STEPS)
  whole, heads = (
    np.asarray(_qkv(_update(x, params)) + rate * 0.1 * _qkv(params))
    for x in ('muon', 'muon-heads')
  )
  # Layers, inputs, heads, query or key or value, features of a head.
  apart = np.moveaxis(heads, 1, -2) / (0.2 * math.sqrt(16) * rate)
  sizes = np.linalg.svd(apart)[1]
  assert 0.6 < sizes.min() < sizes.max() < 1.3
  together = whole.reshape(*whole.shape[:2], -1) / (0.2 * math.sqrt(48) * rate)
  sizes = np.linalg.svd(together)[1]
  assert 0.6 < sizes.min() < sizes.max() < 1.3


def test_neurons_take_steps_of_one_size(params):
  tree = {'blocks': {'attention': {'qkv': {'kernel': _qkv(params)}}}}
  transform = rules.scale_by_neuron()
  state = transform.init(tree)
  first, state = transform.update(tree, state)
  before, after = (_qkv(x).reshape(2, 16, -1) for x in (tree, first))
  sizes = np.linalg.norm(after, axis=1)
  mean = np.broadcast_to(sizes.mean(1, keepdims=True), sizes.shape)
  np.testing.assert_allclose(sizes, mean, rtol=1e-3)
  norms = [np.linalg.norm(x, axis=(1, 2)) for x in (before, after)]
  np.testing.assert_allclose(*norms, rtol=1e-4)
  # The second moments are of both steps.
  double = jax.tree.map(lambda x: 2 * x, tree)
  second, _ = transform.update(double, state)
  np.testing.assert_allclose(_qkv(second), 2 * _qkv(first), rtol=1e-4)


def test_cautious_decay_leaves_weights_that_grow():
  w = jnp.array([1.0, -1.0, 1.0, 0.0])
  u = jnp.array([0.5, 0.5, -0.5, 0.5])
  transform = rules.cautious_decay(0.1)
  updates, _ = transform.update(u, transform.init(w), w)
  # The learning rate turns the sign: 0.5 shrinks a weight of 1.
  np.testing.assert_allclose(updates, [0.6, 0.5, -0.5, 0.5])


@pytest.mark.parametrize(
  'rule', ['muon-hyperball', 'muon-hyperball-decay', 'muon-hyperball-sqrt']
)
def test_hyperball_keeps_the_norms_of_matrices(rule, params):
  before = _qkv(params).reshape(2, -1)
  update = _qkv(_update(rule, params)).reshape(2, -1)
  norms = [np.linalg.norm(x, axis=1) for x in (before, before + update)]
  np.testing.assert_allclose(*norms, rtol=1e-5)
  # A chord of the circle; two of 3.6 steps of warm-up are done.
  step = np.linalg.norm(update, axis=1) / norms[0]
  np.testing.assert_allclose(step, 0.1 * 2 / (0.3 * _STEPS), rtol=0.01)


def test_adam_beside_hyperball_may_decay(params):
  plain, decayed = (
    _update(x, params) for x in ('muon-hyperball', 'muon-hyperball-decay')
  )
  rate = 0.004 * 2 / (0.3 * _STEPS)
  jax.tree.map(
    lambda is_hidden, x, y, w: np.testing.assert_allclose(
      y, x if is_hidden else x - rate * 0.1 * w, rtol=1e-4, atol=1e-7
    ),
    merit_optax.hidden_matrices(params),
    plain,
    decayed,
    params,
  )


def test_a_fall_by_the_root_starts_at_the_end_of_warm_up():
  steps, sizes = 10, []
  optimizer = _make('muon-hyperball-sqrt', 0.5, steps)
  weights = _tree(jnp.ones((1, 2, 2)), jnp.zeros(2))
  state = optimizer.init(weights)
  for _ in range(steps):
    ones = jax.tree.map(jnp.ones_like, weights)
    updates, state = optimizer.update(ones, state, weights)
    sizes.append(float(-updates['final_norm']['bias'][0]))
  line = np.interp(range(1, steps + 1), [0, 3, 11], [0, 1, 0])
  root = 1 - np.sqrt(1 - line)
  expected = 0.004 * np.where(np.arange(1, 11) < 3, line, root)
  np.testing.assert_allclose(sizes, expected, rtol=1e-4)


def test_the_schedule_rises_and_falls_on_lines():
  steps, rate = 10, 0.5
  optimizer = _make('adamw', rate, steps)
  weights = _tree(jnp.zeros((1, 2, 2)), jnp.zeros(2))
  state = optimizer.init(weights)
  sizes = []
  for _ in range(steps):
    ones = jax.tree.map(jnp.ones_like, weights)
    updates, state = optimizer.update(ones, state, weights)
    sizes.append(float(-_kernel(updates)[0, 0, 0]))
  # A constant gradient gives Adam's update of 1 in each step.
  expected = rate * np.interp(range(1, steps + 1), [0, 3, 11], [0, 1, 0])
  np.testing.assert_allclose(sizes, expected, rtol=1e-4)


def test_largest_logits_are_those_of_the_softmax(params):
  config = trainer.model_config(_DRY)
  tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)
  model = as_module(config, params)
  block = jax.tree.map(lambda x: x[0], params['blocks'])
  with jax.set_mesh(make_mesh('')):
    found = trainer.max_logits(params, tokens[None], config)
  x = model.token_embedding(tokens[:, :-1])
  x += model.position_embedding(np.arange(16))
  norm = (x - x.mean(-1, keepdims=True)) / np.sqrt(
    x.var(-1, keepdims=True) + 1e-5
  )
  layer = block['attention']['qkv']
  qkv = np.einsum('btd,dhxk->bthxk', norm, layer['kernel']) + layer['bias']
  query, key = qkv[..., 0, :], qkv[..., 1, :]
  logits = np.einsum('bqhk,bshk->bhqs', query, key) / np.sqrt(8)
  visible = np.tri(16, dtype=bool)
  assert found.shape == (2,)
  np.testing.assert_allclose(found[0], logits[..., visible].max(), rtol=1e-5)


def _run(trial: Trial, **changes) -> dict:
  settings = dataclasses.replace(_DRY, **changes)
  with jax.set_mesh(make_mesh(settings.mesh)):
    return trainer.Trainer(settings).run(trial)


def test_micro_batches_and_meshes_do_not_change_losses():
  trial = Trial('merit', 0, 0, 1024)
  runs = [
    _run(trial, tokens=4096, micro_batch=size, mesh=mesh)
    for size, mesh in ((128, ''), (32, ''), (32, 'fsdp=8'))
  ]
  first = runs[0]['train_losses']
  assert first[-1] < first[0]
  for run in runs[1:]:
    np.testing.assert_allclose(run['train_losses'], first, atol=2e-4)
    assert run['loss'] == pytest.approx(runs[0]['loss'], abs=2e-4)


def test_peaks_of_logits_are_of_every_second_step():
  run = _run(Trial('adamw', 2, 0, 256))
  assert len(run['logits']) == 6 and len(run['train_losses']) == 12
  assert max(run['peak_logits']) == max(run['logits'])
  assert max(run['final_logits']) == run['logits'][-1]


def test_weights_of_the_last_fifth_are_averaged(monkeypatch):
  trial = Trial('adamw', 0, 0, 256)
  run = _run(trial)
  assert abs(run['average_loss'] - run['loss']) < 0.2
  assert run['average_loss'] != run['loss']
  monkeypatch.setattr(trainer, '_TAIL', 1 / 12)  # The last step alone.
  assert _run(trial)['average_loss'] == run['loss']


def test_a_run_that_diverges_ends_and_is_told_so():
  run = _run(Trial('adamw', 100, 0, 256))
  assert run['loss'] is None
  assert len(run['train_losses']) < 12


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'batches': (300,)}, r'batches must be multiples of 16 and 256, got \[30'),
    ({'eval_tokens': 500}, r'eval_tokens must be multiples of 256, got \[500'),
    ({'tokens': 512}, 'tokens must be at least a batch, got 512'),
    ({'seeds': (0, 1)}, 'powers must be two or more, and seeds without 0'),
    ({'data': 'nowhere'}, 'there is no nowhere. To build token files'),
  ],
)
def test_wrong_settings_are_refused(changes, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    large_batch.check(dataclasses.replace(_DRY, **changes))


def _command(results: Path, *flags: str) -> list[str]:
  return [
    sys.executable, '-m', 'examples.study.large_batch', 'dry-run',
    '--results', str(results), '--rules', 'merit', 'muon', '--tokens', '1024',
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
  report.write(killed, page)
  assert '| `muon` |' in page.read_text()
  assert (tmp_path / 'page.png').stat().st_size > 10_000


def _record(trial: Trial, loss: float, **settings) -> str:
  facts = large_batch.facts(_DRY, 'some')
  return json.dumps(
    {
      'trial': dataclasses.asdict(trial),
      'rate': trial.rate(_DRY),
      'settings': facts | settings,
      'loss': loss,
      'peak_logits': [9 + trial.seed, 7.0],
      'final_logits': [5.0, 6],
    }
  )


def test_a_page_has_losses_differences_logits_and_rates(tmp_path):
  results, page = tmp_path / 'results.jsonl', tmp_path / 'page.md'
  lines = [
    *(_record(Trial('merit', 0, x, 1024), 2.9, b1=0.5) for x in (0, 1)),
    *(
      _record(Trial(rule, power, 0, batch), 2.5 + 0.1 * power + shift)
      for rule, shift in (('merit', 0), ('lamb', 0.2))
      for power in (0, 1)
      for batch in (256, 1024)
    ),
    *(_record(Trial('merit', 0, x, 256), 2 + x / 100) for x in (1, 2)),
    # Another rate with the same seeds, and one with fewer.
    *(_record(Trial('merit', 1, x, 256), 2.2) for x in (1, 2)),
    _record(Trial('merit', -1, 1, 256), 1.0),
    *(_record(Trial('lamb', 0, x, 256), 2.1 + x / 50) for x in (1, 2)),
    _record(Trial('merit', 0, 1, 1024), 2.1),
  ]
  results.write_text('\n'.join(lines))
  page.write_text(
    'Before.\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nAfter.\n'
  )
  report.write(results, page)
  text = page.read_text()
  assert text.startswith('Before.\n') and text.endswith('-->\nAfter.\n')
  rate, of_lamb = (
    f'{Trial(x, 0, 0, 256).rate(_DRY):g}' for x in ('merit', 'lamb')
  )
  assert f'| `merit` | 2.015 ± 0.007 ({rate}) | 2.100 (' in text
  assert f'| `lamb` | 2.130 ± 0.014 ({of_lamb}) | – |' in text
  assert '| `merit, b1=0.5` | – | 2.900 (' in text
  assert '| `lamb` − `merit` | +0.115 [' in text
  assert '| `merit` | 6 | 6 |' in text
  assert f'| `merit` | 256 ({rate}) | **2.500** | 2.600 |' in text
  # Rates double with four times the batch: from the best of 256.
  assert 'Rates carried over' in text
  # Again, with the same result.
  report.write(results, page)
  assert page.read_text() == text


def test_each_committed_trial_has_a_command():
  """So that the whole ladder is one script."""
  printed = subprocess.run(
    ['sh', 'examples/study/ladder.sh'],
    env=os.environ | {'PYTHON': 'echo'},
    cwd=_ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  commands = [shlex.split(line)[2:] for line in printed.splitlines()]
  *ladder, of_report = commands
  assert of_report == []
  planned, files = [], set()
  for args in ladder:
    settings = tyro.extras.overridable_config_cli(PRESETS, args=args)
    lines = large_batch.read(_ROOT / settings.results)
    fixed = large_batch.facts(settings, lines[0]['settings']['data'])
    losses = {
      Trial(**x['trial']): large_batch.loss_of(x)
      for x in lines
      if large_batch.facts_of(x) == fixed
    }
    trials = set()
    for trial in large_batch.plan(settings, losses):
      losses.setdefault(trial, math.inf)
      trials.add(trial)
    planned.append((fixed, trials))
    files.add(_ROOT / settings.results)
  for file in files:
    for x in large_batch.read(file):
      trial, fixed = Trial(**x['trial']), large_batch.facts_of(x)
      assert any(y == fixed and trial in trials for y, trials in planned)
  assert len(files) == 4


def test_pages_say_what_the_trials_say(tmp_path):
  page = _ROOT / 'examples/study/LADDER.md'
  copy = tmp_path / page.name
  copy.write_text(page.read_text())
  report.write(page=copy)
  assert copy.read_text() == page.read_text()


def test_the_rule_in_the_readme_runs(tmp_path, monkeypatch):
  text = (_ROOT / 'examples' / 'study' / 'README.md').read_text()
  (code,) = re.findall(r'^```py\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  ((name, rule),) = eval(f'{{{code}}}', dict(vars(rules))).items()
  monkeypatch.setitem(rules.RULES, name, rule)
  settings = dataclasses.replace(
    _DRY, rules=(name,), batches=(256,), results=tmp_path / 'results.jsonl'
  )
  with jax.set_mesh(make_mesh(settings.mesh)):
    large_batch.run(settings)
  first, *_ = large_batch.read(settings.results)
  assert first['trial']['rule'] == name
  assert first['train_losses'][-1] < first['train_losses'][0] - 0.1
  assert first['device'].endswith('cores') or jax.default_backend() != 'cpu'


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
    elif module is corpus:
      tyro.cli(corpus.Settings, args=args)
    else:
      inspect.signature(report.write).bind(*args)


@pytest.mark.parametrize('preset', ['gpu', 'ladder'])
def test_committed_trials_belong_to_their_preset(preset):
  """So that the command goes on with them."""
  settings = PRESETS[preset][1]
  for record in large_batch.read(settings.results):
    data = record['settings']['data']
    expected = large_batch.facts(settings, data)
    assert large_batch.facts_of(record) == expected
    trial = Trial(**record['trial'])
    assert trial.rate(settings) == record['rate']
