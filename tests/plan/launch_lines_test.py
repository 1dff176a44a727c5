"""Documented commands that name a mesh, up to compilation."""

import json
import math
from pathlib import Path
import re

from examples.plan.__main__ import read

_ROOT = Path(__file__).parents[2]
_PAGES = ('*.md', 'docs/*.md', 'examples/*/README.md')
_COMMAND = re.compile(
  r'-m examples\.(?:gpt2\.train|plan)'
  r'((?: +\w[\w.-]*)?(?:\s+--[\w-]+(?: +(?!-)[^\s`"]+)?)+)'
)
# On emulated devices that have the memory of a v5e chip.
_TRACE = """
import json, sys
import jax
from examples.gpt2.data.batches import batch_shape
from examples.gpt2 import hardware
from examples.plan.__main__ import read
from examples.plan.programs import make_trainer

hardware.memory_bytes = lambda _: 15.75 * 2**30
for flags, num_devices in json.loads(sys.argv[1]).items():
  _, config = read(flags.split())
  config, trainer = make_trainer(config, jax.devices()[:num_devices])
  micro_batches, rows, _ = batch_shape(config, trainer.mesh).shape
  print(micro_batches * rows - config.batch_size)
"""


def _launches() -> dict[str, int]:
  """Returns the flags in the documentation, and how many devices they take."""
  launches = {}
  for path in (path for page in _PAGES for path in _ROOT.glob(page)):
    for flags in _COMMAND.findall(path.read_text().replace('\\\n', ' ')):
      settings, config = read(flags.split())
      sizes = config.mesh
      if '--topology' in flags:
        sizes = settings.topology.partition(':')[2]
      if config.mesh:
        launches[flags] = math.prod(map(int, re.findall(r'\d+', sizes)))
  return launches


def test_documented_launches_fit_their_meshes(run):
  launches = _launches()
  assert {8, 16, 256} <= set(launches.values())
  done = run('-c', _TRACE, json.dumps(launches), JAX_NUM_CPU_DEVICES='256')
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ['0'] * len(launches)
