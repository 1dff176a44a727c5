"""The training step, and its update alone, compiled and measured for a mesh."""

from collections.abc import Sequence
import functools
from typing import Any

import jax

from examples.gpt2 import hardware, memory, sharding
from examples.gpt2.config import Config, by_name, resolve
from examples.gpt2.data.batches import batch_shape
from examples.gpt2.hardware import Chip
from examples.gpt2.step import Trainer
from examples.plan import flops, hlo, roofline
from examples.plan.collectives import by_kind, collectives
from examples.plan.flops import Product
from examples.plan.hlo import Computation
from examples.plan.passes import bfloat16_flops
from examples.plan.traffic import hbm_bytes

_DAY = 86400
_SETTINGS = (
  'preset', 'optimizer', 'dtype', 'remat', 'context_length', 'batch_size',
  'micro_batch_size', 'steps',
)  # fmt: skip
_LEAST_EFFORT: Any = {'exec_time_optimization_effort': -1.0}
_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16'}


def make_trainer(
  config: Config, devices: list[jax.Device]
) -> tuple[Config, Trainer]:
  """Returns settings and trainer as examples.gpt2.train makes them."""
  mesh = sharding.make_mesh(config.mesh, devices)
  fitted = memory.fit(resolve(config), mesh)
  return fitted, Trainer(fitted, fitted.model.vocab_size, mesh)


def compile_step(
  config: Config, trainer: Trainer, *, quick: bool = False
) -> jax.stages.Compiled:
  """Compiles a step of training, with the least effort if ``quick``."""
  batch = batch_shape(config, trainer.mesh)
  with jax.set_mesh(trainer.mesh):
    lowered = trainer.step.lower(trainer.shapes, batch)
    return lowered.compile(compiler_options=_LEAST_EFFORT if quick else None)


# The step wants its products, and then it is measured itself.
@functools.lru_cache(maxsize=1)
def compile_update(trainer: Trainer) -> jax.stages.Compiled:
  """Compiles the optimizer's part of a step: the update and its application."""
  return _lower_update(trainer).compile()


def _lower_update(trainer: Trainer) -> jax.stages.Lowered:
  with jax.set_mesh(trainer.mesh):
    return trainer.update.lower(trainer.shapes, trainer.shapes.params)


def measure_step(
  config: Config, trainer: Trainer, chip: Chip, *, quick: bool = False
) -> dict[str, Any]:
  """Compiles a step, with the least effort if ``quick``, and measures it.

  Returns JSON values, for :mod:`examples.plan.report`.
  """
  compiled = compile_step(config, trainer, quick=quick)
  tokens = config.batch_size * config.model.context_length
  per_token = trainer.flops_per_token
  products = [_model_product(config, trainer), *_update_products(trainer)]
  step = _measure(_parse(compiled), trainer, chip, products)
  speed = tokens / step['seconds']
  peak = chip.flops * trainer.mesh.size
  return {
    **{name: by_name(config)[name] for name in _SETTINGS},
    'mesh': ','.join(f'{k}={n}' for k, n in trainer.mesh.shape.items()),
    'num_params': trainer.num_params,
    **_memory(config, trainer, chip, compiled),
    **step,
    'model_flops': tokens * per_token,
    'mfu': speed * per_token / peak,
    'tokens_per_second': round(speed),
    'days': step['seconds'] * config.steps / _DAY,
  }


def measure_update(trainer: Trainer, chip: Chip) -> dict[str, Any]:
  """Compiles and measures the optimizer's update alone, as JSON values."""
  program = _parse(compile_update(trainer))
  return _measure(program, trainer, chip, flops.products(program))


def _model_product(config: Config, trainer: Trainer) -> Product:
  """Returns the products of forward and backward pass as if they were one.

  They are known from the model, and kernels written by hand hide some of them.
  """
  per_token = trainer.flops_per_token
  again = roofline.recomputed_flops(trainer.model_config, per_token)
  tokens = config.batch_size * config.model.context_length / trainer.mesh.size
  return Product(
    flops=tokens * (per_token + again),
    executions=1,
    dtypes=(_DTYPES[config.model.dtype],) * 2,
    precision=('default',) * 2,
  )


def _update_products(trainer: Trainer) -> list[Product]:
  """Returns the matrix products of the update, as compiled."""
  # No compiler adds one, so without any there is nothing to wait for.
  if 'dot_general' not in _lower_update(trainer).as_text():
    return []
  return flops.products(_parse(compile_update(trainer)))


def _parse(compiled: jax.stages.Compiled) -> Computation:
  return hlo.parse(compiled.as_text() or '')


def _measure(
  program: Computation,
  trainer: Trainer,
  chip: Chip,
  products: Sequence[Product],
) -> dict[str, Any]:
  """Returns what a program computes, moves and sends, and its roofline."""
  devices = list(trainer.mesh.devices.flat)
  cost = bfloat16_flops(products, chip, devices[0].device_kind)
  moved, found = hbm_bytes(program), collectives(program)
  found.sort(key=lambda x: x.sent_bytes, reverse=True)
  return {
    'flops': flops.total_flops(products),
    'bfloat16_flops': cost,
    'hbm_bytes': moved,
    'sent_bytes': sum(x.sent_bytes for x in found),
    **roofline.estimate(chip, devices, cost, moved, found),
    'collectives': by_kind(found),
    'largest_collectives': [
      x._asdict() | {'group': len(x.group) or 2, 'sent_bytes': x.sent_bytes}
      for x in found[:5]
    ],
  }


def _memory(
  config: Config,
  trainer: Trainer,
  chip: Chip,
  compiled: jax.stages.Compiled,
) -> dict[str, Any]:
  """Returns the bytes of a device by what they hold, and whether they fit."""
  stats = compiled.memory_analysis()
  params = hardware.bytes_per_device(trainer.shapes.params)
  parts = {
    'parameters': params,
    'optimizer_state': hardware.bytes_per_device(trainer.shapes) - params,
    'batch': hardware.bytes_per_device(batch_shape(config, trainer.mesh)),
    'temporaries': stats.temp_size_in_bytes,
    'program': stats.generated_code_size_in_bytes,
  }
  needed = memory.needed_bytes(compiled)
  return {
    # Padding of arguments, and results that take no argument's place.
    'memory': parts | {'padding': needed - sum(parts.values())},
    'needed_bytes': needed,
    'available_bytes': chip.hbm,
    'fits': needed <= chip.hbm,
  }
