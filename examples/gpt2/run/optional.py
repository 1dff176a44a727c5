"""What a run can do without: TensorBoard, Weights & Biases and traces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
import warnings

from examples.gpt2.storage import Mirror


class OptionalPart:
  """What a run can do without: its first error is a warning, and ends it.

  Attributes:
    mirror: Where it writes its files. In a store, they are there after
      ``upload``.
  """

  def __init__(self, path: Path, warning: str):
    """Names the folder of its files, and the warning, where {} is the error."""
    self.mirror = Mirror(path)
    self._warning = warning
    self._has_failed = False

  def __enter__(self) -> Self:
    return self

  def attempt(self, action: Callable[..., object], *args: Any) -> None:
    """Does something, unless something has failed before."""
    if not self._has_failed:
      self._try(action, *args)

  def upload(self) -> None:
    """Copies the files so far to a store, if they are to be there."""
    self._try(self.mirror.upload)

  def _try(self, action: Callable[..., object], *args: Any) -> None:
    try:
      action(*args)
    except Exception as error:  # Whatever it is: training goes on.
      if not self._has_failed:
        warnings.warn(self._warning.format(error), stacklevel=3)
      self._has_failed = True
