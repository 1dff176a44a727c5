"""The experiments at large batches: plan, rules, trials and report."""

import dataclasses
import json
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
from tests.merit_optax.arrays import oracle_ratios, oracle_scale

_ROOT = Path(__file__).parents[2]
_DRY = PRESETS['dry-run'][1]


def _run_plan(settings: Settings, loss) -> dict[Trial, float]:
  """Returns the losses of all trials, in the order of the plan."""
  losses: dict[Trial, float] = {}
  for trial in large_batch.plan(settings, losses):
    losses[trial] = loss(trial)
  return losses


@given(optimum=st.floats(-5.4, 5.4), diverges=st.integers(-2, 9))
def test_tuning_brackets_the_best_rate(optimum: float, diverges: int):
  settings = dataclasses.replace(_DRY, rules=('merit',), batches=())

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


@pytest.fixture(scope='module')
def params():
  config = trainer.model_config(_DRY)
  return jax.jit(pretrain.init_params, static_argnums=0)(config)


def _update(rule: str, params, rate: float = 0.1):
  """Returns the second update, since the first of each Adam is a sign."""
  optimizer = rules.make_optimizer(rule, rate, _DRY.steps, 'float32')

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
  'merit-clip-0.5': ('weight row column', 'max', 0.5),
  'merit-clip-2': ('weight row column', 'max', 2),
  'merit-clip-5': ('weight row column', 'max', 5),
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


@pytest.mark.parametrize('rule', sorted(set(rules.RULES) - {'muon'}))
def test_updates_are_those_of_the_formulas(rule: str):
  size = 100.0  # Beyond the clip of the gradients.
  rng = np.random.default_rng(0)
  # Columns of many sizes, so that all ratios and thresholds matter.
  w = rng.standard_normal((2, 4, 6)) * np.geomspace(0.05, 9, 6)
  gradients = [size * k * rng.standard_normal(w.shape) for k in (1, 3)]
  optimizer = rules.make_optimizer(rule, 0.1, _DRY.steps, 'float32')
  params = {'mlp_up': jnp.asarray(w), 'bias': jnp.zeros(3)}
  state = optimizer.init(params)
  clipped = []
  for gradient in gradients:
    tree = {'mlp_up': jnp.asarray(gradient), 'bias': jnp.full(3, size)}
    norm = np.sqrt((gradient**2).sum() + 3 * size**2)
    clipped.append(gradient / max(1, norm))
    updates, state = optimizer.update(tree, state, params)
  rate = 2 / (0.3 * _DRY.steps)
  directions = {x: _by_hand(x, clipped, w) for x in (rule, *_MERIT)}
  assert len({x.tobytes() for x in directions.values()}) == len(directions)
  expected = -0.1 * rate * directions[rule]
  np.testing.assert_allclose(updates['mlp_up'], expected, rtol=1e-4, atol=1e-7)
  # Equal gradients of the clipped sizes 1 and 1/3: Adam's step is about 1.
  assert 0.5 * 0.004 * rate < -updates['bias'][0] < 1.2 * 0.004 * rate


def test_updates_of_muon_are_nearly_orthogonal(params):
  rate = 0.1 * 2 / (0.3 * _DRY.steps)  # Of the second step.
  kernel = params['blocks']['mlp']['up']['kernel']
  muon = _update('muon', params)['blocks']['mlp']['up']['kernel']
  # Singular values of 0.7 to 1.2, times 0.2 sqrt(64); and the decay.
  sizes = np.linalg.svd(np.asarray(muon + rate * 0.1 * kernel))[1]
  assert 0.6 < sizes.min() / (1.6 * rate) < sizes.max() / (1.6 * rate) < 1.3


def test_the_schedule_rises_and_falls_on_lines():
  steps, rate = 10, 0.5
  optimizer = rules.make_optimizer('adamw', rate, steps, 'float32')
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
  layer = block['attention']['qkv']
  qkv = np.einsum('btd,dhxk->bthxk', norm, layer['kernel']) + layer['bias']
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
    ({'tuning_batch': 300}, r'batches must be multiples of 256, got \[300, 1'),
    ({'eval_tokens': 512}, r'eval_tokens must be multiples of 1024, got \[5'),
    ({'tokens': 512}, 'tokens must be 0 or a batch at least, got 512'),
    ({'seeds': (0, 1)}, 'powers must not be empty, nor seeds hold 0'),
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
  report.main(['--results', str(killed), '--page', str(page)])
  assert 'has not run' not in page.read_text()
  assert (tmp_path / 'figures/page.png').stat().st_size > 10_000


def _record(trial: Trial, loss: float, **settings) -> str:
  """Returns a line, the loss of which falls to this one."""
  return json.dumps(
    {
      'trial': dataclasses.asdict(trial),
      'rate': trial.rate(_DRY),
      'settings': large_batch.facts(_DRY, 'some') | settings,
      'loss': loss,
      'evaluations': [
        {'step': 6, 'loss': loss + 1, 'max_logits': [9, 7.0]},
        {'step': 12, 'loss': loss, 'max_logits': [5.0, 6]},
      ],
      'train_losses': [loss - 0.25] * 12,
      'corpus_tokens': 1000,
      'device': 'a CPU',
      'versions': {'jax': '0'},
    }
  )


def test_a_page_compares_seeds_one_by_one_and_settings(tmp_path):
  results, page = tmp_path / 'results.jsonl', tmp_path / 'page.md'
  lines = [
    _record(Trial('merit', 0, 0, 256), 2.5),
    _record(Trial('merit', 1, 0, 256), 2.6),
    _record(Trial('lamb', 0, 0, 256), 2.7),
    *(_record(Trial('merit', 0, x, 1024), 2 + x) for x in (1, 2)),
    *(_record(Trial('lamb', 0, x, 1024), 2.1 + 1.25 * x) for x in (1, 2)),
    _record(Trial('merit', 0, 1, 1024), 2.9, qk_norm=True),
  ]
  results.write_text('\n'.join(lines))
  report.main(['--results', str(results), '--page', str(page)])
  text = page.read_text()
  assert '| `merit` | 256 | 0.101 | **2.500** | 2.600 |' in text
  row = '| 1,024 | 0.101 | 2 | 3.500 |  |'
  assert f'| `merit` {row}' in text
  assert '| 0.13 | 2 | 3.975 | +0.475 ± 0.177 |' in text
  assert (
    '| `merit, qk_norm=True` | 1,024 | 0.101 | 1 | 2.900 | -0.100 |' in text
  )
  assert 'Validation losses are 0.25 to 0.25 above' in text
  assert '| `merit` | 5 | 6 |' in text
  results.write_text('\n'.join(lines[:3]))
  report.main(['--results', str(results), '--page', str(page)])
  assert '## Losses' not in page.read_text()
  assert '`lamb` has not run with the chosen rate' in page.read_text()


def test_the_page_is_what_the_trials_say(tmp_path):
  page = tmp_path / 'large_batch.md'
  report.main(['--page', str(page)])
  committed = _ROOT / 'examples' / 'study' / 'LARGE_BATCH.md'
  assert page.read_text() == committed.read_text()


def test_the_rule_in_the_readme_runs(tmp_path, monkeypatch):
  text = (_ROOT / 'examples' / 'study' / 'README.md').read_text()
  (code,) = re.findall(r'^```py\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  ((name, rule),) = eval(f'{{{code}}}', dict(vars(rules))).items()
  monkeypatch.setitem(rules.RULES, name, rule)
  settings = dataclasses.replace(
    _DRY, rules=(name,), powers=(0, 1), results=tmp_path / 'results.jsonl'
  )
  with jax.set_mesh(pretrain.make_mesh(trainer.model_config(settings))):
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
