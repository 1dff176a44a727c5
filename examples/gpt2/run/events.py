"""Numbers for TensorBoard, which a run can do without."""

from pathlib import Path
import time
from typing import Any

from examples.gpt2.run.metrics import scalars
from examples.gpt2.run.optional import OptionalPart


class Events(OptionalPart):
  """Writes the metrics of steps.

  In a store, they are there after ``upload`` and at the end.
  """

  def __init__(self, folder: Path, done: int):
    """Opens a file, which outdates what others have after the steps done."""
    from tensorboardX.event_file_writer import (  # noqa: PLC0415  Optional.
      EventsWriter,
    )
    from tensorboardX.proto import event_pb2  # noqa: PLC0415

    super().__init__(folder, 'TensorBoard gets no more numbers: {}')
    self._event = event_pb2.Event
    self._writer: Any = None
    self.attempt(self._open, EventsWriter)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(step=done + 1, session_log=start)

  def _open(self, kind: Any) -> None:
    self.mirror.folder.mkdir(parents=True, exist_ok=True)
    # Not SummaryWriter: an error ends its thread, and then the run waits for it
    # for ever.
    self._writer = kind(str(self.mirror.folder / 'events'))

  def _close(self) -> None:
    self._writer.close()

  def __exit__(self, *_: object) -> None:
    self.attempt(self._close)
    self.upload()

  def add(self, metrics: dict[str, Any]) -> None:
    """Writes each number of a step's metrics, by its path."""
    values = [
      {'tag': name, 'simple_value': value}
      for name, value in scalars(metrics).items()
    ]
    self._write(step=metrics['step'], summary={'value': values})

  def _write(self, **content: Any) -> None:
    self.attempt(self._append, self._event(wall_time=time.time(), **content))

  def _append(self, event: Any) -> None:
    self._writer.write_event(event)
    self._writer.flush()
