"""The training step, and its update alone, compiled for a mesh."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from examples.gpt2.config import Config
from examples.gpt2.devices import hardware
from examples.gpt2.devices.chips import Chip
from examples.gpt2.devices.sharding import batch_sharding
from examples.gpt2.run.step import Trainer, TrainState
from examples.plan import hlo, roofline, traffic
from examples.plan.collectives import Collective, by_kind, collectives

_DAY = 86400
_LEAST_EFFORT = {'exec_time_optimization_effort': -1.0}


class Figures(NamedTuple):
  """What a compiled program moves.

  Attributes:
    hbm_bytes: Bytes that a device moves to and from its memory.
    collectives: What devices send to each other.
  """

  hbm_bytes: int
  collectives: list[Collective]


def figures(compiled: jax.stages.Compiled) -> Figures:
  """Reads what a compiled program moves."""
  program = hlo.parse(compiled.as_text())
  return Figures(traffic.hbm_bytes(program), collectives(program))


def batch_shape(config: Config, trainer: Trainer) -> jax.ShapeDtypeStruct:
  """Returns the shape of the tokens of a step."""
  size = config.micro_batch_size
  shape = config.batch_size // size, size, config.context_length + 1
  return jax.ShapeDtypeStruct(
    shape, np.int32, sharding=batch_sharding(trainer.mesh)
  )


def compile_step(
  config: Config, trainer: Trainer, *, quick: bool = False
) -> jax.stages.Compiled:
  """Compiles a step of training.

  Args:
    config: Resolved settings.
    trainer: Trainer on the mesh to compile for.
    quick: Whether the TPU compiler is to make the least effort.
  """
  with jax.set_mesh(trainer.mesh):
    batch = batch_shape(config, trainer)
    lowered = trainer.step.lower(trainer.shapes, batch)
    return lowered.compile(compiler_options=_LEAST_EFFORT if quick else None)


def compile_update(trainer: Trainer) -> jax.stages.Compiled:
  """Compiles the optimizer's part of a step: the update and its application."""

  def update(state: TrainState, gradients: Any) -> TrainState:
    updates, opt_state = trainer.optimizer.update(
      gradients, state.opt_state, state.params
    )
    return TrainState(optax.apply_updates(state.params, updates), opt_state)

  shardings = jax.tree.map(lambda x: x.sharding, trainer.shapes)
  step = jax.jit(update, donate_argnums=0, out_shardings=shardings)
  with jax.set_mesh(trainer.mesh):
    return step.lower(trainer.shapes, trainer.shapes.params).compile()


def measure_step(
  config: Config, trainer: Trainer, chip: Chip, *, quick: bool = False
) -> dict[str, Any]:
  """Compiles the step and returns its figures, as JSON values."""
  compiled = compile_step(config, trainer, quick=quick)
  return {
    'memory': memory(config, trainer, compiled, chip),
    **_step(config, trainer, chip, figures(compiled)),
  }


def measure_update(trainer: Trainer, chip: Chip) -> dict[str, Any]:
  """Compiles the update alone and returns its figures, as JSON values."""
  found = figures(compile_update(trainer))
  # Its arithmetic is next to nothing, and not of matrix products.
  devices = list(trainer.mesh.devices.flat)
  times = roofline.estimate(chip, devices, 0.0, *found)
  held = sum(
    math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(trainer.shapes.params)
  )
  return {
    **_moved(found),
    'hbm_bytes_per_parameter': found.hbm_bytes / held,
    'estimate': _times(times),
  }


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a device that a program needs, arguments included."""
  stats = compiled.memory_analysis()
  return (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    - stats.alias_size_in_bytes
    + stats.temp_size_in_bytes
  )


def memory(
  config: Config, trainer: Trainer, compiled: jax.stages.Compiled, chip: Chip
) -> dict[str, Any]:
  """Returns the bytes of a device by what they hold."""
  stats = compiled.memory_analysis()
  params = hardware.bytes_per_device(trainer.shapes.params)
  parts = {
    'parameters': params,
    'optimizer_state': hardware.bytes_per_device(trainer.shapes) - params,
    'batch': hardware.bytes_per_device(batch_shape(config, trainer)),
    'temporaries': stats.temp_size_in_bytes,
    'program': stats.generated_code_size_in_bytes,
  }
  # Padding of arguments, and results that take no argument's place.
  rest = peak_bytes(compiled) + parts['program'] - sum(parts.values())
  needed = sum(parts.values()) + rest
  return parts | {
    'padding': rest,
    'needed': needed,
    'available': chip.hbm,
    'fits': needed <= chip.hbm,
  }


def _step(
  config: Config, trainer: Trainer, chip: Chip, found: Figures
) -> dict[str, Any]:
  """Returns FLOPs, traffic, collectives and the estimate of a step."""
  per_token = hardware.flops_per_token(
    trainer.model_config, trainer.shapes.params
  )
  again = roofline.recomputed_flops(trainer.model_config, per_token)
  tokens = config.batch_size * config.context_length
  devices = list(trainer.mesh.devices.flat)
  flops = tokens * (per_token + again) / len(devices)
  times = roofline.estimate(chip, devices, flops, *found)
  rate = tokens / times.seconds
  return {
    'model_flops': tokens * per_token,
    'executed_flops_per_device': flops,
    **_moved(found),
    'estimate': _times(times)
    | {
      'mfu': rate * per_token / (chip.flops * len(devices)),
      'tokens_per_second': rate,
      'days': times.seconds * config.steps / _DAY,
    },
  }


def _moved(found: Figures) -> dict[str, Any]:
  return {
    'hbm_bytes_per_device': found.hbm_bytes,
    'collectives': by_kind(found.collectives),
    'bytes_sent_per_device': sum(x.sent_bytes for x in found.collectives),
    'largest_collectives': [
      x._asdict() | {'groups': x.groups[:1], 'sent_bytes': x.sent_bytes}
      for x in sorted(found.collectives, key=lambda x: -x.sent_bytes)[:5]
    ],
  }


def _times(times: roofline.Estimate) -> dict[str, Any]:
  return times._asdict() | {
    'seconds': times.seconds,
    'seconds_without_overlap': times.seconds_without_overlap,
    'bound': times.bound,
  }
