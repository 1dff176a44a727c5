import functools
import json
from pathlib import Path

import pytest

from benchmarks import optimizer_step, train_step
from benchmarks.rounds import Timing, race, ratio


def test_a_ratio_compares_rounds():
  timings = {'a': Timing((2.0, 30.0, 4.0)), 'b': Timing((1.0, 10.0, 2.0))}
  assert ratio(timings, 'a', 'b') == 2.0
  assert timings['a'].median == 4.0


def test_each_contender_has_its_turn_in_each_round():
  turns: list[str] = []
  timings = race({x: functools.partial(turns.append, x) for x in 'abc'}, 4)
  assert all(len(t.seconds) == 4 for t in timings.values())
  first, *rounds = zip(*[iter(turns)] * 3, strict=True)
  assert first == ('a', 'b', 'c')
  assert [sorted(x) for x in rounds] == [['a', 'b', 'c']] * 4
  assert len(set(rounds)) > 1


def test_optimizer_steps_are_compared(tmp_path: Path):
  out = tmp_path / 'results.json'
  names = ['adamw', 'merit', 'whole-muon', 'muon-hyperball']
  optimizer_step.main([
    '--presets', 'demo', '--num-layers', '1',
    '--optimizers', *names,
    '--rounds', '2', '--steps', '1', '--out', str(out),
  ])  # fmt: skip
  results = json.loads(out.read_text())
  rows = {(row['case'], row['optimizer']): row for row in results['rows']}
  for layers in ('stacked', 'unstacked'):
    case = f'demo, 1 layers {layers}'
    assert [name for key, name in rows if key == case] == names
    # Parameters, moments and gradients are read, all but the last written.
    assert rows[case, 'adamw']['bytes_moved_per_parameter'] >= 28
    assert rows[case, 'adamw']['time_ratio'] == 1
  assert results['machine']['versions']['jax']
  assert out.with_suffix('.png').stat().st_size > 1000


def test_where_memory_is_short_steps_are_compiled_only(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
  monkeypatch.setattr(optimizer_step, 'free_memory', lambda: 1e6)
  out = tmp_path / 'results.json'
  optimizer_step.main(['--presets', 'demo', '--num-layers', '1',
    '--layers', 'stacked', '--out', str(out)])  # fmt: skip
  assert 'compiled only' in capsys.readouterr().out
  for row in json.loads(out.read_text())['rows']:
    assert 'seconds' not in row
    assert row['temporary_bytes_per_parameter'] >= 0


@pytest.mark.usefixtures('full_compilation')
def test_merit_keeps_as_much_at_a_time_on_cpu_as_lamb():
  case = optimizer_step.make_case('demo', 'stacked', None)
  merit = optimizer_step.compile_step(
    optimizer_step.make_optimizer('merit'), case
  )
  # Eight bytes, and the norms of rows and columns.
  assert merit.figures['temporary_bytes_per_parameter'] < 8.3


@pytest.mark.slow
def test_training_steps_are_compared(tmp_path: Path):
  out = tmp_path / 'results.json'
  train_step.main([
    '--batch-size', '8', '--optimizers', 'merit', '--rounds', '1',
    '--steps', '1', '--out', str(out),
  ])  # fmt: skip
  results = json.loads(out.read_text())
  rows = results['rows']
  assert 0 < results['reading_seconds'] < rows[0]['seconds_per_step']
  assert rows[0]['tokens_per_second'] > 0
  assert 'diagnostics' in rows[1]['name']
