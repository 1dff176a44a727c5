import math
from pathlib import Path

import pytest

from examples.study import claims, report
from examples.study.plans import carry_out, together
from examples.study.points import Point
from examples.study.runs import Store
from examples.study.scales import SCALES
from examples.study.tuning import Tuned

_STUDY = Path(report.__file__).parent
_BEST = {'adamw': 4e-3, 'lamb': 2e-2, 'merit': 3e-2, 'muon': 1e-2}
_FLOOR = {'adamw': 2.0, 'lamb': 1.9, 'merit': 1.8, 'muon': 1.85}


def _make_up(run):
  """Returns what a run could have left."""
  config = run.config
  distance = math.log2(config.learning_rate / _BEST[config.optimizer])
  loss = _FLOOR[config.optimizer] + 0.1 * distance**2 + 0.003 * config.seed
  layers = [[10.0 * loss, 20.0, 30.0], [40.0, None, 60.0 * loss]]
  watched = {
    'step': [1, 2], 'max_attention_logit': layers, 'attention_entropy': layers,
  }  # fmt: skip
  if config.optimizer == 'merit':
    watched['clipped'] = [[0.0, 0.01, 0.02], [0.03, 0.02, 0.11]]
  return {
    'loss': None if distance > 3 else loss,
    'watched': watched,
    'seconds': 60.0,
    'corpus_sha256': 'c' * 64,
    'versions': {'python': '3', 'jax': '1', 'optax': '2'},
  }


@pytest.fixture(scope='module')
def made_up(tmp_path_factory):
  """Results of all runs of a study, made up."""
  store = Store(tmp_path_factory.mktemp('results'))
  scale = SCALES['nano']

  def run_all(runs):
    for run in runs:
      store.write(run, _make_up(run))
    return [store.result(run) for run in runs]

  plans = (module.plan(scale) for module in report.EXPERIMENTS.values())
  carry_out(together(*plans), run_all)
  return store


def test_a_whole_study_is_reported(made_up, tmp_path):
  files = report.write(tmp_path, 'nano', SCALES['nano'], made_up)
  text = (tmp_path / 'RESULTS.md').read_text()
  assert 'Not complete' not in text
  row = next(x for x in text.splitlines() if 'MERIT beats LAMB' in x)
  assert row.endswith('| reproduced |')
  for module in report.EXPERIMENTS.values():
    assert f'## {module.TITLE}' in text
  assert len(files) == 1 + len(report.EXPERIMENTS)
  for path in files[1:]:
    assert path.stat().st_size > 5000


def test_what_is_not_complete_is_told(tmp_path):
  store = Store(tmp_path / 'results')
  report.write(tmp_path, 'nano', SCALES['nano'], store)
  text = (tmp_path / 'RESULTS.md').read_text()
  assert text.count('Not complete') == len(report.EXPERIMENTS)


def test_the_committed_results_are_up_to_date():
  scale, store = SCALES['nano'], Store(_STUDY / 'results' / 'nano')
  outcomes = report.read_outcomes(scale, store)
  expected = report.text('nano', scale, store, outcomes)
  assert (_STUDY / 'RESULTS.md').read_text() == expected


def _point(*losses):
  return Point('MERIT', 128, Tuned({1.0: losses[0]}), {0.0: losses[0]}, losses)


@pytest.mark.parametrize(
  'first, second, verdict',
  [
    ((1.0, 1.01, 0.99), (1.1, 1.11, 1.09), 'reproduced'),
    ((1.1, 1.11, 1.09), (1.0, 1.01, 0.99), 'contradicted'),
    ((1.0, 1.1, 0.9), (1.05, 1.15, 0.95), 'not at this scale'),
    # The same to within what the grid of rates decides.
    ((1.0, 1.0, 1.0), (1.004, 1.004, 1.004), 'not at this scale'),
    ((1.0, 1.0), (math.inf, 1.0), 'reproduced'),
    ((math.inf, 1.0), (1.0, 1.0), 'not at this scale'),
  ],
)
def test_differences_count_beyond_their_error(first, second, verdict):
  assert claims.compare(_point(*first), _point(*second)) == verdict
