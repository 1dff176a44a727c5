import math
from pathlib import Path
import re

import pytest

from examples.study import claims, report, verdicts
from examples.study.contenders import CONTENDERS, KEPT
from examples.study.experiments import (
  batch_scaling,
  compositions,
  curvature,
  hyperparameters,
  steps_to_loss,
)
from examples.study.plans import Result, execute, gather
from examples.study.points import Point
from examples.study.scales import SCALES
from examples.study.store import Store
from examples.study.tasks.classifiers import MIXERS
from examples.study.tuning import Tuned

_STUDY = Path(report.__file__).parent
_BEST = {'adamw': 1e-2, 'lamb': 2e-2, 'merit': 3e-2, 'muon': 2e-2}
_FLOOR = {'adamw': 2.0, 'lamb': 1.9, 'merit': 1.8, 'muon': 1.7}


def _make_up(run, *, has_diverged=False):
  """Returns what a run could have left."""
  config = run.config
  more = math.log(config.steps / 305)
  distance = math.log2(config.learning_rate / _BEST[config.optimizer]) + more
  loss = _FLOOR[config.optimizer] + 0.1 * distance**2 - 0.3 * more
  loss += 0.003 * (config.seed % 7)
  layers = [[10.0 * loss, 20.0, 30.0], [40.0, 50.0, 60.0 * loss]]
  if has_diverged or not run.with_diagnostics:
    layers = []
  diagnostics = {
    'step': [1, 2][: len(layers)],
    'max_attention_logit': layers,
    'attention_entropy': list(layers),
  }
  if config.optimizer == 'merit':
    clipped = [[0.0, 0.01, 0.02], [0.03, 0.02, 0.11]]
    diagnostics['clipped'] = clipped[: len(layers)]
  if run.task in MIXERS:
    for name in ('test_loss', 'test_errors'):
      diagnostics[name] = [None if has_diverged else loss / 10]
  return {
    **run.label,
    'loss': None if has_diverged else loss,
    'config': {},
    'diagnostics': diagnostics,
    'measured': None if has_diverged else _make_up_measured(run, loss),
    'seconds': 60.0,
    'corpus_sha256': None if run.task in MIXERS else 'c' * 64,
    'versions': {'python': '3', 'jax': '1', 'optax': '2'},
  }


def _make_up_measured(run, loss):
  """Returns what a run could have measured."""
  if run.measure == 'rows':
    group = {'rows': 50, 'growth': [0.2, 0.4, 0.9], 'norm': loss, 'moved': 0.1}
    is_held = run.config.min_norm or run.config.optimizer != 'merit'
    held = group | {'growth': [0.9, 1.0, 1.1]}
    groups = {
      'never': held if is_held else group, 'rare': held, 'common': group,
    }  # fmt: skip
    return {'embedding': groups, 'head': groups}
  names = [*curvature.QUANTITIES, 'preconditioned_eigenvalue']
  errors = {'residual': 1e-3, 'trace_error': 0.5}
  return dict.fromkeys(names, 10 * loss**2) | errors


def _fill(store, diverges):
  """Makes up results of all runs of a study."""
  scale = SCALES['nano']

  def run_all(runs):
    for run in runs:
      record = _make_up(run, has_diverged=diverges(run))
      store.records[run.key] = record
    return store.results(runs)

  experiments = report.EXPERIMENTS
  execute(gather({x: experiments[x].plan(scale) for x in experiments}), run_all)
  return store


_DIVERGENCES = {
  'none': lambda run: False,
  'all': lambda run: True,
  'merit': lambda run: run.config.optimizer == 'merit',
  'rivals': lambda run: run.config.optimizer != 'merit',
  'some seeds': lambda run: run.config.seed == 2,
  'high rates': lambda run: run.config.learning_rate > 0.04,
  'with diagnostics': lambda run: run.with_diagnostics,
}


def _text(store, name='nano'):
  scale = SCALES[name]
  larger = report.read_larger(name, store.path.parent)
  return report.text(name, scale, *report.read_outcomes(scale, store), larger)


@pytest.mark.parametrize('name', _DIVERGENCES)
def test_a_study_with_runs_that_diverged_is_reported(name, tmp_path):
  text = _text(_fill(Store(tmp_path / 'nano.jsonl'), _DIVERGENCES[name]))
  assert 'Not complete' not in text
  assert 'nan' not in text.replace('nano', '')
  verdicts = {
    'none': 'reproduced', 'merit': 'contradicted', 'rivals': 'reproduced',
  }  # fmt: skip
  if verdict := verdicts.get(name):
    row = next(x for x in text.splitlines() if 'MERIT beats AdamW' in x)
    assert row.endswith(f'| {verdict} |')


def test_the_first_page_tells_what_holds_at_a_larger_scale(tmp_path):
  nano = _fill(Store(tmp_path / 'nano.jsonl'), _DIVERGENCES['none'])
  assert 'At scale mini' not in _text(nano)
  mini = Store(tmp_path / 'mini.jsonl')

  def run_all(runs):
    for run in runs:
      mini.add(_make_up(run))
    return mini.results(runs)

  execute(batch_scaling.plan(SCALES['mini']), run_all)
  # 0.4 / √366 is 0.021; fewer steps than 150 start at 0.033.
  row = r'\| MERIT \| \d\.\d+ \(0\.0297, 1\.4 ×\) \| \d\.\d+ \(0\.066, 2 ×\) \|'
  text = _text(nano)
  assert re.search(row, text)
  # The chain without ratios, at the rates of that with them.
  assert re.search(r'\| Muon, norms kept \| \d\.\d+ \(', text)


def test_losses_and_logits_that_explode_are_reported(tmp_path):
  store = _fill(Store(tmp_path / 'nano.jsonl'), _DIVERGENCES['none'])
  for record in store.records.values():
    if record['diagnostics']['step'] and record['learning_rate'] > 0.05:
      record['loss'] = 2e8 if record['optimizer'] == 'lamb' else 5.0
      record['diagnostics']['max_attention_logit'][-1] = [3e29] * 3
  text = _text(store)
  # Of a run that ends there, nobody asks how far away.
  assert 'diverged (not finite)' in text
  assert '5.000 (3e+29)' in text
  assert max(map(len, re.findall(r'\d+', text))) < 20


@pytest.mark.parametrize(
  'name',
  [
    'some seeds',
    *(pytest.param(x, marks=pytest.mark.slow) for x in ('all', 'none')),
  ],
)
def test_figures_are_drawn(name, tmp_path):
  store = _fill(Store(tmp_path / 'nano.jsonl'), _DIVERGENCES[name])
  _, *figures, summary = report.write(tmp_path, 'nano', SCALES['nano'], store)
  text = (tmp_path / 'RESULTS.md').read_text()
  assert text == _text(store)
  assert f'(figures/{summary.name})' in text
  assert summary.stat().st_size > 5000
  for path, module in zip(figures, report.EXPERIMENTS.values(), strict=True):
    assert (
      f'## {module.TITLE}\n\n![{module.TITLE}](figures/{path.name})' in text
    )
    assert path.stat().st_size > 5000


def test_the_rate_is_fitted_to_the_number_of_steps():
  rates = [(x, 0.02 * (x / 1000) ** -0.7) for x in (305, 610, 2441)]
  assert hyperparameters.fit_rate(rates) == pytest.approx((0.02, -0.7))


def _steps_to_loss(loss_of_steps):
  """Returns what is found out if the loss depends on steps and seed alone."""
  scale, asked = SCALES['nano'], []

  def run_all(runs):
    asked.extend(runs)
    return [
      Result(
        loss_of_steps(run.config.steps) + 0.01 * (run.config.seed == 2), {}
      )
      for run in runs
    ]

  return execute(steps_to_loss.plan(scale), run_all), asked


@pytest.mark.parametrize(
  ('loss', 'inverse'),
  [
    (lambda x: 4 - 0.4 * math.log(x), lambda y: math.exp((4 - y) / 0.4)),
    (lambda x: 1 + 9 * x**-0.45, lambda y: ((y - 1) / 9) ** (1 / -0.45)),
    # Short runs blow up.
    (
      lambda x: math.inf if x < 100 else 4 - 0.4 * math.log(x),
      lambda y: math.exp((4 - y) / 0.4),
    ),
  ],
)
def test_the_steps_to_a_loss_are_found(loss, inverse):
  found, asked = _steps_to_loss(loss)
  assert found.target == pytest.approx(loss(305) + 0.01, abs=0.06)
  for steps in found.steps.values():
    # To within a twentieth, where the nearest loss may be that far off.
    assert steps.by_seed[0] == pytest.approx(inverse(found.target), rel=0.06)
    assert steps.by_seed[1] > steps.by_seed[0]
    assert len(steps.tried) <= 5
    full = 2_500_000 / 64 / steps.batch_size
    assert all(0.06 * full < x < 4.1 * full for x in steps.tried)
  # Runs of other lengths finish their schedules.
  assert all(run.config.eval_every == run.config.steps for run in asked)


def _text_of_steps(loss_of_steps):
  scale = SCALES['nano']
  return steps_to_loss.section(_steps_to_loss(loss_of_steps)[0], scale)


def test_a_loss_that_is_not_reached_is_told():
  assert 'no loss to aim at' in _text_of_steps(lambda steps: math.inf)
  # Only the length that sets the loss gets there.
  text = _text_of_steps(lambda steps: 3.0 if steps == 305 else 3.5)
  assert '> 612' in text
  assert 'MERIT: not known;' in text
  # At batch 256 the loss stays where it is.
  text = _text_of_steps(
    lambda steps: 4 - 0.4 * math.log(steps) if steps > 200 else 3.0
  )
  assert '< ' not in text


def test_contenders_are_those_of_the_compositions():
  # So that they share runs.
  found = compositions.COMPOSITIONS
  shared = [x for x in CONTENDERS if x.name in found]
  assert len(shared) == 3
  assert all(found[x.name] == x for x in shared)
  assert KEPT in shared


def test_what_is_not_complete_is_told(tmp_path):
  text = _text(Store(tmp_path / 'nano.jsonl'))
  names = ', '.join(report.EXPERIMENTS)
  assert f'Not complete, since runs are missing: {names}.' in text
  assert '## ' not in text


@pytest.mark.parametrize(
  ('scale', 'page'),
  [('nano', 'RESULTS.md'), ('mini', 'results/mini/RESULTS.md')],
)
def test_the_committed_results_are_up_to_date(scale, page):
  expected = _text(Store(_STUDY / 'results' / f'{scale}.jsonl'), scale)
  assert (_STUDY / page).read_text() == expected


def _intervals(text: str) -> set[tuple[float, ...]]:
  """Returns differences with their intervals, whichever way they are taken."""
  number = r'([+-]?\d\.\d{3})'
  found = set()
  for match in re.findall(rf'{number}\s\[{number},\s{number}\]', text):
    mean, low, high = map(float, match)
    found |= {(mean, low, high), (-mean, -high, -low)}
  return found


@pytest.mark.parametrize(
  ('page', 'num_intervals'),
  [
    ('README.md', 0),
    ('docs/which_optimizer.md', 10),
    ('docs/hyperparameters.md', 10),
  ],
)
def test_pages_say_what_the_results_say(page, num_intervals):
  text = (_STUDY.parents[1] / page).read_text()
  # Losses, with their deviation or the largest attention logit.
  quoted = re.findall(r'\d\.\d{3} (?:± \d\.\d{3}|\([\d,]+\))', text)
  assert len(quoted) > 5
  results = (_STUDY / 'RESULTS.md').read_text()
  assert [x for x in quoted if x not in results] == []
  assert len(_intervals(text)) >= num_intervals
  assert _intervals(text) - _intervals(results) == set()


def _point(*losses, at_edge=False):
  rates = {1.0: {0: 9.0}, 2.0: {0: 1.0}} | ({} if at_edge else {4.0: {0: 9.0}})
  return Point('MERIT', 128, Tuned(rates, 2.0), losses)


@pytest.mark.parametrize(
  ('first', 'second', 'verdict'),
  [
    ((1.0, 1.01, 0.99), (1.1, 1.11, 1.09), 'reproduced'),
    ((1.1, 1.11, 1.09), (1.0, 1.01, 0.99), 'contradicted'),
    ((1.0, 1.1, 0.9), (1.05, 1.15, 0.95), 'no difference seen (0.3'),
    ((1.0, 1.0), (math.inf, math.inf), 'reproduced'),
    ((math.inf, math.inf), (1.0, 1.0), 'contradicted'),
    ((2.0, 2.0), (1.0, math.inf), 'no verdict: seeds diverged'),
    ((math.inf, math.inf), (math.inf, math.inf), 'no verdict'),
    # Of one seed, nobody knows the error.
    ((1.0,), (2.0,), 'no verdict of one seed'),
    ((1.0,), (math.inf,), 'no verdict'),
  ],
)
def test_verdicts_are_those_of_intervals(first, second, verdict):
  found = verdicts.compare(_point(*first), _point(*second))
  assert found.startswith(verdict)


def test_a_loser_that_is_not_tuned_to_the_end_loses_in_part():
  better, worse = (1.0, 1.01, 0.99), (1.1, 1.11, 1.09)
  assert (
    verdicts.compare(_point(*better), _point(*worse, at_edge=True)) == 'partly'
  )
  assert verdicts.compare(_point(*better, at_edge=True), _point(*worse)) == (
    'reproduced'
  )
  # Nor is the paper contradicted by such a loser, or supported.
  assert verdicts.compare(_point(*worse, at_edge=True), _point(*better)) == (
    'partly'
  )


def _with_logits(*logits):
  """Returns results of seeds, with the largest logit of the last layer."""
  return [
    Result(1.0, {'max_attention_logit': [[1.0, logit]]}) for logit in logits
  ]


@pytest.mark.parametrize(
  ('adamw', 'verdict'),
  [((100.0, 90.0), 'reproduced'), ((100.0, 20.0), 'partly')],
)
def test_logits_differ_if_those_of_all_seeds_do(adamw, verdict):
  logits = {'AdamW': adamw, 'LAMB': (90.0, 95.0), 'MERIT': (50.0, 52.0)}
  outcome = {
    (name, bound, factor): _with_logits(*values)
    for name, values in logits.items()
    for bound in ('none', 'QK-norm')
    for factor in (1, 2, 4)
  }
  table = claims.table({'attention-logits': outcome}, SCALES['nano'])
  row = next(x for x in table.splitlines() if 'smallest attention' in x)
  assert row.endswith(f'| {verdict} |')
