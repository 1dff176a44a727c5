"""Numbers for TensorBoard, which a run can do without."""

import contextlib
from pathlib import Path
import time
from typing import Any
import warnings

from examples.gpt2.run.metrics import scalars
from examples.gpt2.storage import Mirror


class Events:
  """Writes the metrics of steps; warns of the first error, and then stops.

  In a store, they are there after ``upload`` and at the end.
  """

  def __init__(self, folder: Path, done: int):
    """Opens a file, which outdates what others have after the steps done."""
    from tensorboardX.event_file_writer import (  # noqa: PLC0415  Optional.
      EventsWriter,
    )
    from tensorboardX.proto import event_pb2  # noqa: PLC0415

    self._event = event_pb2.Event
    self._writer: Any = None
    self._mirror = Mirror(folder)
    try:
      self._mirror.folder.mkdir(parents=True, exist_ok=True)
      # Not SummaryWriter: an error ends its thread, and then the run waits for
      # it for ever.
      self._writer = EventsWriter(str(self._mirror.folder / 'events'))
    except OSError as error:
      self._give_up(error)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(step=done + 1, session_log=start)

  def __enter__(self) -> 'Events':
    return self

  def __exit__(self, *_: object) -> None:
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.close()
      self.upload()

  def upload(self) -> None:
    """Copies the numbers so far to a store, if they are to be there."""
    try:
      self._mirror.upload()
    except OSError as error:
      self._give_up(error)

  def add(self, metrics: dict[str, Any]) -> None:
    """Writes each number of a step's metrics, by its path."""
    values = [
      {'tag': name, 'simple_value': value}
      for name, value in scalars(metrics).items()
    ]
    self._write(step=metrics['step'], summary={'value': values})

  def _write(self, **content: Any) -> None:
    if self._writer is None:
      return
    event = self._event(wall_time=time.time(), **content)
    try:
      self._writer.write_event(event)
      self._writer.flush()
    except OSError as error:
      self._give_up(error)

  def _give_up(self, error: OSError) -> None:
    self._writer = None
    warnings.warn(f'TensorBoard gets no more numbers: {error}', stacklevel=2)
