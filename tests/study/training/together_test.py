import dataclasses
from pathlib import Path

import pytest

from examples.study.chains import Chain
from examples.study.optimizers import WITH_RATIOS
from examples.study.scales import Scale
from examples.study.training import together
from examples.study.training.store import Store
from examples.study.training.sweep import Sweep
from examples.study.training.train import train


@pytest.fixture
def scale(scale: Scale) -> Scale:
  return dataclasses.replace(scale, steps=4)


@pytest.mark.parametrize(
  ('optimizer', 'changes'),
  [
    ('merit', {}),
    pytest.param('muon', {'chain': WITH_RATIOS.chain}, marks=pytest.mark.slow),
  ],
)
def test_losses_are_those_of_runs_that_are_trained_alone(
  scale: Scale, tmp_path: Path, optimizer: str, changes: dict
):
  runs = [
    scale.run(optimizer, 8, rate, seed=seed, **changes)
    for rate, seed in ((0.01, 0), (0.1, 3))
  ]
  records = together.train(runs)
  alone = [train(run, tmp_path / 'work') for run in runs]
  for record, expected in zip(records, alone, strict=True):
    assert record['loss'] == pytest.approx(expected['loss'], abs=2e-4)
    assert record['together'] == 2
    same = ('key', 'seed', 'config', 'corpus_sha256', 'parameters')
    assert all(record[x] == expected[x] for x in same)
  assert len({record['loss'] for record in records}) == 2


def test_a_run_that_diverges_leaves_the_others_alone(scale: Scale):
  runs = [scale.run('adamw', 8, rate) for rate in (0.01, 1e30)]
  sound, diverged = together.train(runs)
  assert 4 < sound['loss'] < 7
  assert diverged['loss'] is None
  assert diverged['steps_done'] < sound['steps_done'] == 4


def test_runs_that_differ_otherwise_are_not_trained_together(scale: Scale):
  alike = [scale.run('merit', 8, x, seed=y) for x in (1, 2) for y in (0, 1, 2)]
  alone = [
    scale.run('merit', 16, 1),
    scale.run('adamw', 8, 1),
    scale.run('merit', 8, 1, chain=Chain(('adam',))),
    scale.run('merit', 8, 1, with_diagnostics=True),
    scale.run('merit', 8, 2, with_diagnostics=True),
    scale.run('merit', 8, 1, weight_decay=0.1),
  ]
  found = together.group([*alone, *alike], 4)
  assert found == [*([x] for x in alone), alike[:4], alike[4:]]
  assert together.group(alike, 1) == [[x] for x in alike]


def test_a_runner_trains_them_together(scale: Scale, tmp_path: Path):
  runs = [scale.run('merit', 8, x) for x in (0.01, 0.1)]
  runs.append(scale.run('merit', 16, 0.1))
  store = Store(tmp_path / 'results.jsonl')
  with Sweep(store, tmp_path / 'work', 1, 3, at_once=2) as sweep:
    results = sweep(runs)
  counts = [store.records[run.key].get('together') for run in runs]
  assert counts == [2, 2, None]
  assert Store(store.path).results(runs) == results
