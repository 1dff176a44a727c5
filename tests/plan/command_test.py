"""The planner's command, on emulated devices that pass for a TPU slice."""

from collections.abc import Iterator
import importlib.metadata
import importlib.util
import json
import math
from pathlib import Path
import re
import types
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices import chips, hardware
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.presets import resolve
from examples.gpt2.run.memory import fit
from examples.gpt2.run.step import Trainer
from examples.plan import (
  __main__ as plan,
  collectives,
  hlo,
  programs,
  roofline,
  sweep,
  topology,
  traffic,
)

_TINY = (
  '--num-layers', '2', '--width', '16', '--num-heads', '2',
  '--context-length', '8', '--vocab-size', '257', '--batch-size', '16',
  '--unroll', '1',
)  # fmt: skip


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(SystemExit) as error:
    plan.main(['--topology', 'v5e:2x2'])
  assert error.value.code == 2
  text = capsys.readouterr().err
  assert "'.[pod]'" in text
  assert topology.requirement() in text
  assert f'jax {jax.__version__}' in text


def test_the_libtpu_that_jax_asks_for_is_found():
  assert topology.requirement().startswith('libtpu==')


def test_a_sweep_tries_every_mesh_once():
  found = sweep.meshes(12)
  assert len(found) == len(set(found)) == 18
  for text in found:
    sizes = dict(axis.split('=') for axis in text.split(','))
    assert list(sizes) == ['data', 'fsdp', 'tensor']
    assert math.prod(map(int, sizes.values())) == 12


@pytest.fixture
def emulated_slice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Takes two CPU devices for a TPU slice of chips with 1 GiB."""
  estimate = roofline.estimate

  def estimate_in_a_row(
    chip: chips.Chip, devices: list[jax.Device], *args: Any
  ):
    in_a_row = [types.SimpleNamespace(coords=[i]) for i in range(len(devices))]
    return estimate(chip, in_a_row, *args)

  chip = chips.Chip(1e12, 2**30, 1e11, 1e10)
  monkeypatch.setattr(topology, 'devices', lambda _: jax.devices()[:2])
  monkeypatch.setattr(roofline, 'estimate', estimate_in_a_row)
  monkeypatch.setattr(chips, 'find', lambda _: chip)
  monkeypatch.setattr(hardware, 'memory_bytes', lambda _: chip.hbm)
  monkeypatch.setattr(importlib.metadata, 'version', lambda _: '1.2.3')
  yield
  jax.config.update('jax_enable_compilation_cache', True)


@pytest.mark.usefixtures('emulated_slice')
def test_a_plan_is_of_the_step_of_the_trainer(tmp_path: Path, capsys):
  out = tmp_path / 'plan.json'
  plan.main([*_TINY, '--mesh', 'fsdp=2', '--out', str(out)])
  results = json.loads(out.read_text())
  assert (results['batch_size'], results['micro_batch_size']) == (16, 8)
  assert results['model_flops'] == 2 * results['flops']
  assert results['tokens_per_second'] == round(16 * 8 / results['seconds'])
  assert sum(results['memory'].values()) == results['needed_bytes']
  # A micro-batch takes the parameters of each of two layers.
  assert results['collectives']['all-gather']['executions'] >= 2
  assert 0 < results['update_share'] < 1
  text = capsys.readouterr().out
  for words in (
    r'micro batch size +8\n', r'fits +True', 'ESTIMATED', 'all-gather',
    r'mfu +\d', r'tokens per second +\d', r'libtpu +1.2.3',
  ):  # fmt: skip
    assert re.search(words, text), text


@pytest.mark.usefixtures('emulated_slice')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_of_the_update_are_part_of_the_step(
  dtype: str, tmp_path: Path, capsys
):
  out = tmp_path / 'plan.json'
  plan.main(
    [*_TINY, '--mesh', 'fsdp=2', '--optimizer', 'muon', '--dtype', dtype]
    + ['--out', str(out)]
  )
  results = json.loads(out.read_text())
  update = results['update']
  # Five iterations for four matrices, 16 rows or columns each, of two layers.
  products = 2 * 16**2 * (48 + 16 + 64 + 64) + 4 * 16**3
  products *= 2 * 5
  # The two devices share them, or both compute them all.
  assert products / 2 <= update['flops'] <= products
  for flops in ('flops', 'bfloat16_flops'):
    assert results[flops] == results['model_flops'] / 2 + update[flops]
  for x in (results, update):
    assert x['compute_seconds'] == pytest.approx(x['bfloat16_flops'] / 1e12)
  assert re.search(r'bfloat16 flops +\S+ +\d', capsys.readouterr().out)


@pytest.mark.usefixtures('emulated_slice')
def test_an_update_without_products_is_not_compiled_for_the_step(monkeypatch):
  monkeypatch.setattr(programs, 'compile_update', None)
  plan.main([*_TINY, '--sweep', '--remat', 'full', '--batch-size', '1'])


@pytest.mark.usefixtures('emulated_slice')
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--batch-size', '15'), 'must divide --batch-size 15'),
    (('--micro-batch-size', '3'), '--micro-batch-size 3 must divide'),
    (('--mesh', 'fsdp=3'), 'number of devices'),
    (('--sweep',), '--sweep tries every mesh'),
  ],
)
def test_what_the_trainer_refuses_is_refused(
  flags: tuple[str, ...], message: str, capsys
):
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--mesh', 'fsdp=2', *flags])
  assert error.value.code == 2
  assert message in capsys.readouterr().err


@pytest.mark.usefixtures('emulated_slice')
def test_a_sweep_says_why_meshes_are_left_out(tmp_path: Path, capsys):
  out = tmp_path / 'plan.json'
  plan.main(
    [*_TINY, '--sweep', '--batch-size', '1', '--remat', 'dots']
    + ['--out', str(out)]
  )
  results = json.loads(out.read_text())
  found = {(row['mesh'], row['remat']) for row in results['rows']}
  assert found == {('data=1,fsdp=1,tensor=2', x) for x in ('dots', 'full')}
  left_out = ['data=2,fsdp=1,tensor=1', 'data=1,fsdp=2,tensor=1']
  reason = 'data * fsdp = 2 of --mesh must divide --batch-size 1.'
  assert results['left_out'] == {reason: left_out}
  text = capsys.readouterr().out
  assert f'left out: {reason} ({", ".join(left_out)})' in text
  best = results['rows'][0]
  assert f'--mesh {best["mesh"]} --remat {best["remat"]} ' in text


@pytest.mark.usefixtures('emulated_slice')
@pytest.mark.parametrize('given', [(), ('--micro-batch-size', '8')])
@pytest.mark.parametrize('raises', [False, True])
def test_a_sweep_takes_a_smaller_micro_batch_where_one_does_not_fit(
  given: tuple[str, ...],
  raises: bool,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
):
  tried = []

  def measure(config: Config, trainer: Trainer, **_: Any) -> dict[str, Any]:
    size = config.micro_batch_size
    tried.append(size)
    if raises and size > 2:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 3G of 1G')
    return dict.fromkeys(
      ('needed_bytes', 'seconds', 'seconds_without_overlap', 'mfu',
       'tokens_per_second'), 1.0
    ) | {'mesh': config.mesh, 'remat': config.remat, 'fits': size <= 2,
         'micro_batch_size': size, 'bound': 'memory'}  # fmt: skip

  monkeypatch.setattr(programs, 'measure_step', measure)
  out = tmp_path / 'plan.json'
  plan.main([*_TINY, '--sweep', '--remat', 'full', '--out', str(out), *given])
  results = json.loads(out.read_text())
  if not given:
    assert {row['micro_batch_size'] for row in results['rows']} == {2}
    assert len(tried) > len(results['rows']) == 3
  elif raises:
    assert not results['rows']
  else:
    assert set(tried) == {8}
    assert not any(row['fits'] for row in results['rows'])


@pytest.mark.usefixtures('emulated_slice')
def test_what_does_not_fit_gets_advice_and_is_left_out_of_a_sweep(
  monkeypatch: pytest.MonkeyPatch, capsys
):
  def run_out_of_memory(*_: Any, **__: Any):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 3G of 1G\nmore')

  monkeypatch.setattr(programs, 'compile_step', run_out_of_memory)
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--mesh', 'fsdp=2'])
  assert error.value.code == 4
  text = capsys.readouterr().err
  assert 'out of memory: RESOURCE_EXHAUSTED: 3G of 1G' in text
  assert '--remat dots' in text
  plan.main([*_TINY, '--sweep'])
  text = capsys.readouterr().out
  assert text.count('RESOURCE_EXHAUSTED: 3G of 1G') == 1
  assert 'flags of the first' not in text
  assert 'None fits' in text
  assert all(mesh in text for mesh in sweep.meshes(2))


@pytest.mark.parametrize('platform', ['tpu', 'gpu', None])
def test_attention_is_that_of_the_mesh(platform: str | None, monkeypatch):
  calls = []
  monkeypatch.setattr(
    jax.nn, 'dot_product_attention', lambda *x, **_: calls.append(x) or x[0]
  )
  device = platform and AbstractDevice(
    device_kind='chip', num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,), ('data',), abstract_device=device)
  query = jax.ShapeDtypeStruct((1, 8, 1, 4), 'float32')
  with jax.sharding.use_abstract_mesh(mesh):
    jax.eval_shape(causal_attention, query, query, query)
  assert bool(calls) == (platform is not None)


@pytest.mark.parametrize('qk_clip', [None, 100.0])
def test_the_update_alone_has_no_gradients(qk_clip: float | None):
  sizes = dict(
    num_layers=1, width=16, num_heads=2, context_length=8, qk_clip=qk_clip
  )
  config = resolve(Config(**sizes, vocab_size=257, unroll=1))
  trainer = Trainer(config, 257, make_mesh('fsdp=8'))
  update, step = (
    hlo.parse(compiled.as_text())
    for compiled in (
      programs.compile_update(trainer),
      programs.compile_step(fit(config, trainer.mesh), trainer),
    )
  )
  assert 0 < traffic.hbm_bytes(update) < traffic.hbm_bytes(step)
  assert {x.kind for x in collectives.collectives(update)} == {'all-reduce'}
