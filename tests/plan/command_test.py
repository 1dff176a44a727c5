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
from unittest import mock

import jax
from jax.sharding import AbstractDevice, AbstractMesh
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices import chips, hardware
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.presets import resolve
from examples.gpt2.run.memory import fit
from examples.plan import (
  __main__ as plan,
  programs,
  report,
  roofline,
  sweep,
  topology,
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
  assert re.search(rf"'libtpu==[\d.*]+', .* jax {jax.__version__}", text), text


def test_a_sweep_tries_every_mesh_with_the_rematerialization_or_more():
  found = [(x.mesh, x.remat) for x in sweep.ways(Config(remat='dots'), 12)]
  assert len(found) == len(set(found)) == 2 * 18
  assert {remat for _, remat in found} == {'dots', 'full'}
  for text, _ in found:
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
@pytest.mark.parametrize(
  'flags', [(), ('--architecture', 'llama', '--untied-head', 'True')]
)
def test_a_plan_is_of_the_step_of_the_trainer(tmp_path: Path, capsys, flags):
  out = tmp_path / 'plan.json'
  plan.main([*_TINY, '--mesh', 'fsdp=2', '--out', str(out), *flags])
  results = json.loads(out.read_text())
  assert (results['batch_size'], results['micro_batch_size']) == (16, 8)
  assert results['model_flops'] == 2 * results['flops']
  assert results['tokens_per_second'] == round(16 * 8 / results['seconds'])
  # A micro-batch takes the parameters of each of two layers.
  assert results['collectives']['all-gather']['executions'] >= 2
  update = results['update']
  assert set(update['collectives']) == {'all-reduce'}
  assert 0 < update['hbm_bytes'] < results['hbm_bytes']
  assert 0 < results['update_share'] < 1
  text = capsys.readouterr().out
  for words in (r'fits +True', 'all-gather', r'mfu +\d', r'libtpu +1.2.3'):
    assert re.search(words, text), text


@pytest.mark.usefixtures('emulated_slice')
def test_products_of_the_update_are_part_of_the_step(tmp_path: Path):
  out = tmp_path / 'plan.json'
  plan.main([
    *_TINY, '--mesh', 'fsdp=2', '--optimizer', 'muon', '--qk-clip', '100',
    '--dtype', 'bfloat16', '--out', str(out),
  ])  # fmt: skip
  results = json.loads(out.read_text())
  update = results['update']
  # Five iterations for four matrices, 16 rows or columns each, of two layers.
  products = 2 * 5 * (2 * 16**2 * (48 + 16 + 64 + 64) + 4 * 16**3)
  # The two devices share them, or both compute them all.
  assert products / 2 <= update['flops'] <= products
  for flops in ('flops', 'bfloat16_flops'):
    assert results[flops] == results['model_flops'] / 2 + update[flops]
  for x in (results, update):
    assert x['compute_seconds'] == pytest.approx(x['bfloat16_flops'] / 1e12)


@pytest.mark.usefixtures('emulated_slice')
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--batch-size', '15'), 'must divide --batch-size 15'),
    (('--mesh', 'fsdp=3'), 'number of devices'),
    (('--sweep',), '--sweep tries every mesh'),
    (('--sweep', '--mesh', '', '--steps', '0'), '--steps must be at least 1'),
    (('--network', '25'), '--network is GB/s of a GPU'),
  ],
)
def test_settings_that_do_not_fit_are_refused(flags, message, capsys):
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--mesh', 'fsdp=2', *flags])
  assert error.value.code == 2
  assert message in capsys.readouterr().err


@pytest.mark.usefixtures('emulated_slice')
def test_a_sweep_says_why_meshes_are_left_out(tmp_path, monkeypatch, capsys):
  # An update without products is not compiled on its own, which takes long.
  monkeypatch.setattr(programs, 'compile_update', None)
  out = tmp_path / 'plan.json'
  plan.main([
    *_TINY, '--sweep', '--batch-size', '1', '--remat', 'full',
    '--out', str(out),
  ])  # fmt: skip
  results = json.loads(out.read_text())
  (best,) = results['rows']
  assert best['mesh'] == 'data=1,fsdp=1,tensor=2'
  left_out = ['data=2,fsdp=1,tensor=1', 'data=1,fsdp=2,tensor=1']
  reason = 'data * fsdp = 2 of --mesh must divide --batch-size 1.'
  assert results['left_out'] == {reason: left_out}
  text = capsys.readouterr().out
  assert f'left out: {reason} ({", ".join(left_out)})' in text
  assert f'--mesh {best["mesh"]} --remat full --micro-batch-size 1' in text


def _sweep(measure, **settings: Any) -> dict[str, Any]:
  """Sweeps over two devices; only the micro-batch decides what is measured."""
  config = resolve(Config(batch_size=16, remat='full', **settings))

  def make(config):
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    return fit(config, mesh), types.SimpleNamespace(mesh=mesh)

  return sweep.measure_all(
    config, 2, make, lambda config, _: measure(config.micro_batch_size)
  )


def _measure_or_raise(size: int) -> dict[str, Any]:
  if size > 2:
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 3G of 1G')
  return {'fits': True, 'seconds_without_overlap': 1.0, 'size': size}


def _measure(size: int) -> dict[str, Any]:
  return {'fits': size <= 2, 'seconds_without_overlap': 1.0, 'size': size}


def test_a_sweep_takes_the_largest_micro_batch_that_fits_or_the_one_given():
  for measure in (_measure, _measure_or_raise):
    rows = _sweep(measure)['rows']
    assert [row['size'] for row in rows] == [2, 2, 2]
  rows = _sweep(_measure, micro_batch_size=8)['rows']
  assert [row['size'] for row in rows] == [8, 8, 8]
  found = _sweep(_measure_or_raise, micro_batch_size=8)
  assert found['rows'] == []
  assert list(found['left_out']) == ['RESOURCE_EXHAUSTED: 3G of 1G']


def test_a_sweep_ranks_what_fits_first_and_then_by_time():
  names = 'fits', 'seconds_without_overlap'
  measured = (False, 1.0), (True, 3.0), (True, 2.0)
  rows = (dict(zip(names, x, strict=True)) for x in measured)
  found = _sweep(lambda _: next(rows), micro_batch_size=8)
  assert [x[names[1]] for x in found['rows']] == [2.0, 3.0, 1.0]


@pytest.mark.usefixtures('emulated_slice')
def test_what_does_not_fit_gets_advice_and_is_left_out_of_a_sweep(
  monkeypatch: pytest.MonkeyPatch, capsys
):
  error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 3G of 1G\nmore')
  monkeypatch.setattr(programs, 'compile_step', mock.Mock(side_effect=error))
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--mesh', 'fsdp=2'])
  assert error.value.code == 4
  text = capsys.readouterr().err
  assert 'out of memory: RESOURCE_EXHAUSTED: 3G of 1G' in text
  assert '--remat dots' in text
  plan.main([*_TINY, '--sweep'])
  text = capsys.readouterr().out
  assert text.count('RESOURCE_EXHAUSTED: 3G of 1G') == 1
  assert 'None fits' in text
  assert all(mesh in text for mesh in sweep.meshes(2))


@pytest.mark.usefixtures('emulated_slice')
def test_a_plan_that_does_not_fit_is_printed_and_has_a_status(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
  sizes = {'needed_bytes': 5 * 2**29, 'available_bytes': 3 * 2**29}
  measured = {'fits': False, **sizes}
  monkeypatch.setattr(plan, '_one', lambda *_: measured)
  monkeypatch.setattr(report, 'one', lambda results: f'table of {results}')
  out = tmp_path / 'plan.json'
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--out', str(out)])
  assert error.value.code == 4
  assert measured.items() <= json.loads(out.read_text()).items()
  told = capsys.readouterr()
  assert 'table of' in told.out
  assert 'needs 2.5 GiB of a device that has 1.5 GiB' in told.err


@pytest.mark.parametrize('platform', ['tpu', 'gpu', None])
def test_attention_is_that_of_the_mesh(platform: str | None, monkeypatch):
  attend = mock.Mock(side_effect=lambda query, *_, **__: query)
  monkeypatch.setattr(jax.nn, 'dot_product_attention', attend)
  device = platform and AbstractDevice(
    device_kind='chip', num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,), ('data',), abstract_device=device)
  query = jax.ShapeDtypeStruct((1, 8, 1, 4), 'float32')
  with jax.sharding.use_abstract_mesh(mesh):
    jax.eval_shape(causal_attention, query, query, query)
  assert attend.called == (platform is not None)
