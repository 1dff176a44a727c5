"""How Orbax writes and reads arrays, on disks and in object stores."""

from collections.abc import Mapping
import itertools
import os
from pathlib import Path
import re
import textwrap
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.gpt2.run import orbax_s3
from examples.gpt2.storage import is_remote, os_errors

COMMITTED = ocp.path.atomicity.COMMIT_SUCCESS_FILE
"""The last file of a checkpoint, without which one in a store is not whole."""

# How TensorStore's errors of a store begin that say nothing of its objects.
_AWAY = (
  'ABORTED', 'CANCELLED', 'DEADLINE_EXCEEDED', 'INTERNAL', 'PERMISSION_DENIED',
  'RESOURCE_EXHAUSTED', 'UNAUTHENTICATED', 'UNAVAILABLE',
)  # fmt: skip
_NUMBERS = itertools.count()


def make_writer(path: Path) -> ocp.AsyncCheckpointer:
  """Returns what makes one save to a path, in all processes together."""
  _prepare(path)
  # Else it renames folders, which a store would copy.
  commit = ocp.path.atomicity.CommitFileTemporaryPath
  kind = commit if is_remote(path) else None
  # Barriers of named processes end in time if one of these has failed, and with
  # names of their own they are not taken for those of the next save.
  options = ocp.options.MultiprocessingOptions(
    active_processes=set(range(jax.process_count())),
    barrier_sync_key_prefix=f'save_{next(_NUMBERS)}',
  )
  composite = ocp.CompositeOptions(
    multiprocessing_options=options, temporary_path_class=kind
  )
  handler = ocp.CompositeCheckpointHandler(composite_options=composite)
  return ocp.AsyncCheckpointer(
    handler, multiprocessing_options=options, temporary_path_class=kind
  )


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
  """Reads some arrays of a checkpoint, whatever the other processes do."""
  _prepare(path)
  # In a barrier, the others would wait forever for one that failed.
  me = jax.process_index()
  options = ocp.options.MultiprocessingOptions(me, active_processes={me})
  handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
  args = ocp.args.PyTreeRestore(
    dict(like),
    restore_args=ocp.checkpoint_utils.construct_restore_args(dict(like)),
    partial_restore=True,
  )
  with (
    os_errors(),
    ocp.Checkpointer(handler, multiprocessing_options=options) as reader,
  ):
    return reader.restore(path / 'state', args=args)


def _prepare(path: Path) -> None:
  if os.fspath(path).startswith('s3:'):
    orbax_s3.install()


def root_cause(error: BaseException) -> BaseException:
  """Returns the first of the errors that Orbax and TensorStore wrap."""
  while error.__cause__:
    error = error.__cause__
  if isinstance(error, ValueError) and str(error).startswith(_AWAY):
    return OSError(str(error))
  code = re.search(r"os_error_code='(\d+)'", str(error))
  if not code:
    return error
  return OSError(int(code[1]), f'{os.strerror(int(code[1]))}: {error}')


def describe(error: BaseException) -> str:
  """Returns what an error of Orbax comes from, as a line of text."""
  cause = root_cause(error)
  # Errors of TensorStore go on for pages.
  return textwrap.shorten(f'{type(cause).__name__}: {cause}', 300)
