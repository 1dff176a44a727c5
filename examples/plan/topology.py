"""Devices that are not there, to compile for: TPU slices, hosts of GPUs."""

import importlib.metadata
import importlib.util
import os

import jax
from jax.experimental import topologies

from examples.gpt2.config import UsageError
from examples.plan import gpus

_FORMS = 'v4:2x2x4, v5e:4x4, v5e:16x16, v5p:2x2x4, v5p:4x8x8, v6e:16x16'
# Keeps libtpu from asking the metadata server, which is not there, and lets
# several processes compile at once, since there is no chip to share.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_MIN_LOG_LEVEL': '3',
}


def devices(name: str) -> list[jax.Device]:
  """Returns the devices of a topology, for compilation only.

  To be called before the process uses a device: it keeps jax to the CPU. Raises
  ``UsageError`` if the compiler is missing, or there is no such topology.
  """
  return gpus.devices(name) if gpus.is_gpu(name) else _tpus(name)


def compiler(name: str) -> dict[str, str]:
  """Returns the package that compiles for a topology, and its version."""
  package = 'jax-cuda12-plugin' if gpus.is_gpu(name) else 'libtpu'
  return {package: importlib.metadata.version(package)}


def _tpus(name: str) -> list[jax.Device]:
  """Returns the devices of a TPU topology, for compilation only.

  To be called before the process uses a device: it keeps jax to the CPU, since
  jax would start libtpu wherever it is installed. Raises ``UsageError`` if
  libtpu is missing, or there is no such topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise UsageError(
      "the TPU compiler is missing: pip install -e '.[pod]', or "
      f"'{requirement()}', the one that jax {jax.__version__} was built for."
    )
  jax.config.update('jax_platforms', 'cpu')
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  # Or v4 would be listed by core, of which jax makes no mesh.
  options = {'chip_config_name': 'megacore'} if name.startswith('v4') else {}
  try:
    return list(topologies.get_topology_desc(name, 'tpu', **options).devices)
  except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
    reason = str(error).splitlines()[0]
    raise UsageError(
      f'--topology {name}: {reason}. Forms that work: {_FORMS}; extents are '
      f'whole hosts, 2x2 chips each. Of GPUs: {gpus.FORMS}.'
    ) from error


def requirement() -> str:
  """Returns the libtpu that this jax asks for, as pip takes it."""
  names = importlib.metadata.requires('jax') or ()
  found = [name for name in names if name.startswith('libtpu')]
  return found[0].partition(';')[0].strip() if found else 'libtpu'
