from dataclasses import replace
import gc
from pathlib import Path
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.run.proof import prove
from examples.gpt2.storage import make_folder
from examples.gpt2.train import main
from tests.gpt2.runs import as_flags, contents, largest_file

_STATE = {'kernel': jax.ShapeDtypeStruct((1000, 250), 'float32')}


def test_a_folder_that_can_hold_checkpoints_stays_empty(place: Path):
  folder = place / 'run' / 'checkpoints'
  make_folder(folder / 'proof-1f')  # What a killed proof left.
  prove(folder, _STATE)
  assert not contents(folder)


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch):
  usage, free = shutil.disk_usage(tmp_path), 1_000_000
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage._replace(free=free))
  prove(tmp_path / 'run' / 'c', _STATE)
  free -= 1
  with pytest.raises(UsageError, match='977 KiB left.* needs 977 KiB') as error:
    prove(tmp_path / 'run' / 'c', _STATE)
  assert f'--out-dir {tmp_path}/run ' in str(error.value)


def test_a_disk_that_cannot_be_written_is_refused(tmp_path: Path):
  message = 'cannot hold a checkpoint.*too large'
  with largest_file(60), pytest.raises(UsageError, match=message):
    prove(tmp_path / 'c', _STATE)
  # Orbax's future has an exception that nobody retrieved. Its log, with a
  # traceback, breaks a syntax tree that Python 3.11 may be parsing when it is
  # collected (python/cpython#106905).
  gc.collect()


def test_a_run_that_cannot_be_saved_does_not_begin(
  tiny: Config, bucket: str, capsys
):
  out_dir = f'{bucket}-not-there/run'
  with pytest.raises(SystemExit) as ended:
    main(as_flags(replace(tiny, out_dir=out_dir)))
  assert ended.value.code == 2
  assert f'out-dir {out_dir} cannot be written' in capsys.readouterr().err
  assert not Path(bucket.partition('/')[0]).exists()


def test_a_run_that_cannot_be_saved_later_ends(
  tiny: Config, monkeypatch, capsys
):
  save = ocp.AsyncCheckpointer.save

  def fail(self: Any, path: Path, *args: Any, **named: Any) -> None:
    if path.name.isdecimal():
      raise OSError(28, 'No space left on device')
    save(self, path, *args, **named)

  monkeypatch.setattr(ocp.AsyncCheckpointer, 'save', fail)
  config = replace(
    tiny, steps=40, eval_every=40, diagnostics_every=0, checkpoint_every=2
  )
  with (
    pytest.warns(RuntimeWarning, match='step 6 is not saved.*No space'),
    pytest.raises(SystemExit) as ended,
  ):
    main(as_flags(config))
  assert ended.value.code == 5
  assert 'last 3 checkpoints could not be saved' in capsys.readouterr().err
  lines = (tiny.out_dir / 'metrics.jsonl').read_text().splitlines()
  assert 6 <= len(lines) <= 10, 'it goes on for ever'


# A folder that both see, and one that each has for itself.
_PROCESSES = """
import sys
import jax
jax.config.update('jax_num_cpu_devices', 1)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.proof import prove
state = {'x': jax.ShapeDtypeStruct((3,), 'float32')}
prove(Path(sys.argv[3], 'shared'), state)
everywhere = NamedSharding(make_mesh(''), P())
with Checkpoints(Path(sys.argv[3], 'shared'), max_to_keep=1) as saved:
  assert saved.save(1, {'x': jax.device_put(np.ones(3, 'float32'), everywhere)})
try:
  prove(Path(sys.argv[3], sys.argv[2], 'own'), state)
except UsageError as error:
  print(error)
else:
  raise AssertionError('not refused')
"""


@pytest.mark.slow
def test_hosts_that_do_not_see_the_same_folder_are_refused(tmp_path, run_pair):
  first, second = run_pair(_PROCESSES, tmp_path)
  assert 'the same folder for all hosts' in first
  assert 'process 1 does not see' in second
