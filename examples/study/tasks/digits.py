"""Images of handwritten digits, 8 by 8, that come with scikit-learn.

After Alpaydin and Kaynak, `Optical Recognition of Handwritten Digits
<https://archive.ics.uci.edu/dataset/80>`_, 1998.
"""

from typing import NamedTuple

import numpy as np

from examples.gpt2.config import UsageError

NUM_CLASSES = 10
_SIDE, _PATCH = 8, 2
NUM_PATCHES = (_SIDE // _PATCH) ** 2
"""Patches of an image, which a model takes as tokens."""
PIXELS_PER_PATCH = _PATCH**2
_TEST_IMAGES = 360
_SPLIT_SEED = 0


class Images(NamedTuple):
  """Images, and what they show.

  Attributes:
    patches: float32 in [-1, 1], shape (images, patches, pixels of a patch).
    labels: Digits, int32, shape (images,).
  """

  patches: np.ndarray
  labels: np.ndarray


def load_digits() -> tuple[Images, Images]:
  """Returns 1,437 images to train on and 360 to test, always the same.

  Raises:
    UsageError: If scikit-learn is not installed.
  """
  try:
    from sklearn import datasets  # noqa: PLC0415
  except ImportError as error:
    raise UsageError(
      "The images of beyond-gpt need scikit-learn: pip install -e '.[study]'"
    ) from error
  pixels, labels = datasets.load_digits(return_X_y=True)
  images = Images(
    (_cut(pixels) / 8 - 1).astype(np.float32), labels.astype(np.int32)
  )
  order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
  train, test = np.split(order, [-_TEST_IMAGES])
  return tuple(Images(*(x[part] for x in images)) for part in (train, test))


def _cut(pixels: np.ndarray) -> np.ndarray:
  """Returns the patches of images whose pixels are rows of an array."""
  across = _SIDE // _PATCH
  grid = pixels.reshape(-1, across, _PATCH, across, _PATCH)
  return grid.swapaxes(2, 3).reshape(-1, NUM_PATCHES, PIXELS_PER_PATCH)
