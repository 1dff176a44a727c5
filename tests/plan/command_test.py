"""The planner's command, on emulated devices that pass for a TPU slice."""

from collections.abc import Iterator
import dataclasses
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

from examples.gpt2 import hardware
from examples.gpt2.config import PRESETS, Config, change
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.sharding import AXES
from examples.plan import __main__ as plan, programs, roofline, sweep, topology

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


def test_it_takes_the_flags_of_the_trainer_beside_its_own():
  flags = (
    'xl', '--quick', '--mesh=fsdp=64', '--out', 'plan.json',
    '--steps', '1000', '--topology', 'v5p:4x8x8', '--qk-norm',
  )  # fmt: skip
  settings, config = plan.read(list(flags))
  assert settings == plan.Settings(
    'v5p:4x8x8', quick=True, out=Path('plan.json')
  )
  assert config == dataclasses.replace(
    PRESETS['xl'], mesh='fsdp=64', steps=1000, qk_norm=True
  )


def test_a_sweep_tries_every_mesh_with_the_rematerialization_or_more():
  found = [
    (x.mesh, x.remat) for x in sweep.ways(change(Config(), remat='dots'), 12)
  ]
  assert len(found) == len(set(found)) == 2 * 18
  assert {remat for _, remat in found} == {'dots', 'full'}
  for text, _ in found:
    sizes = dict(axis.split('=') for axis in text.split(','))
    assert list(sizes) == ['data', 'fsdp', 'tensor']
    assert math.prod(map(int, sizes.values())) == 12


@pytest.fixture
def memory_size() -> float:
  """Returns the bytes of a chip of the emulated slice."""
  return 2.0**30


@pytest.fixture
def emulated_slice(
  monkeypatch: pytest.MonkeyPatch, memory_size: float
) -> Iterator[None]:
  """Takes two CPU devices for a TPU slice."""
  estimate = roofline.estimate

  def estimate_in_a_row(
    chip: hardware.Chip, devices: list[jax.Device], *args: Any
  ):
    in_a_row = [types.SimpleNamespace(coords=[i]) for i in range(len(devices))]
    return estimate(chip, in_a_row, *args)

  chip = hardware.Chip(1e12, memory_size, 1e11, 1e10)
  monkeypatch.setattr(topology, 'devices', lambda _: jax.devices()[:2])
  monkeypatch.setattr(roofline, 'estimate', estimate_in_a_row)
  monkeypatch.setattr(hardware, 'find_chip', lambda _: chip)
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
    *_TINY, '--mesh', 'fsdp=2', '--optimizer', 'muon', '--dtype', 'bfloat16',
    '--out', str(out),
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
  """Sweeps over two devices, with what the compiler may say of a size."""
  config = dataclasses.replace(
    PRESETS['demo'], num_layers=1, batch_size=16, remat='full', **settings
  )
  return sweep.measure_all(
    config,
    jax.devices()[:2],
    lambda config, _: measure(config.micro_batch_size),
  )


def _measure_or_raise(size: int) -> dict[str, Any]:
  if size > 2:
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 3G of 1G')
  return {'fits': True, 'seconds_without_overlap': 1.0, 'size': size}


def _measure(size: int) -> dict[str, Any]:
  return {'fits': size <= 2, 'seconds_without_overlap': 1.0, 'size': size}


def test_a_sweep_takes_the_largest_micro_batch_that_fits():
  for measure in (_measure, _measure_or_raise):
    for given, expected in ((None, 2), (8, 2), (1, 1)):
      rows = _sweep(measure, micro_batch_size=given)['rows']
      assert [row['size'] for row in rows] == [expected] * 3


def test_a_sweep_says_what_no_micro_batch_mends():
  def measure(size: int) -> dict[str, Any]:
    return _measure(size) | {'fits': False}

  rows = _sweep(measure)['rows']
  assert [(row['size'], row['fits']) for row in rows] == [(1, False)] * 3
  found = _sweep(lambda size: _measure_or_raise(size + 2))
  assert found['rows'] == []
  (names,) = found['left_out'].values()
  assert names == [f'{mesh} full' for mesh in sweep.meshes(2)]


@pytest.mark.usefixtures('emulated_slice')
@pytest.mark.parametrize('memory_size', [2.0**15])
def test_a_plan_that_does_not_fit_is_printed_and_has_a_status(
  tmp_path: Path, capsys
):
  out = tmp_path / 'plan.json'
  with pytest.raises(SystemExit) as error:
    plan.main([*_TINY, '--out', str(out)])
  assert error.value.code == 4
  assert not json.loads(out.read_text())['fits']
  told = capsys.readouterr()
  assert re.search(r'fits +False', told.out)
  assert re.search(r'needs .* of a device that has 32 KiB', told.err)
  plan.main([
    *_TINY, '--sweep', '--remat', 'full', '--batch-size', '4',
    '--out', str(out),
  ])  # fmt: skip
  assert 'None fits: try more devices' in capsys.readouterr().out
  rows = json.loads(out.read_text())['rows']
  assert [row['micro_batch_size'] for row in rows] == [1] * 3
  seconds = [row['seconds_without_overlap'] for row in rows]
  assert seconds == sorted(seconds)


@pytest.mark.parametrize('platform', ['tpu', None])
def test_attention_is_that_of_the_mesh(platform: str | None):
  device = platform and AbstractDevice(
    device_kind='chip', num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,) * 3, AXES, abstract_device=device)
  query = jax.ShapeDtypeStruct((1, 128, 1, 64), 'float32')
  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.make_jaxpr(causal_attention)(query, query, query)
  assert ('pallas_call' in str(program)) == (platform == 'tpu')
