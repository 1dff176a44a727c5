"""Teaches Orbax s3://, where it can only write to disks and gs://.

Orbax describes to TensorStore, in one function, where arrays are. TensorStore
reads and writes S3 in the way that it does Google Cloud Storage: what differs
is the description.
"""

import functools
import importlib
import os
from typing import Any

from examples.gpt2.config import UsageError

_SCHEME = 's3:/'


@functools.cache
def install() -> None:
  """Makes Orbax take directories that begin with s3://, in this process."""
  # Not a public module, and needed for nothing but S3.
  try:
    tensorstore_utils = importlib.import_module(
      'orbax.checkpoint._src.serialization.tensorstore_utils'
    )
    describe = tensorstore_utils.build_kvstore_tspec
  except (ImportError, AttributeError) as error:
    raise UsageError(
      f's3:// does not work with this version of orbax-checkpoint ({error}): '
      'install 0.12, or use gs:// or a disk.'
    ) from error

  def describe_any(directory: str, *args: Any, **named: Any) -> dict[str, Any]:
    if not directory.startswith(_SCHEME):
      return describe(directory, *args, **named)
    # Orbax has normalized the path, and the slashes with it.
    rest = directory.removeprefix(_SCHEME).lstrip('/')
    return _in_s3(describe(f'gs://{rest}', *args, **named))

  setattr(tensorstore_utils, describe.__name__, describe_any)


def _in_s3(spec: Any) -> Any:
  """Returns a description with S3 in place of Google Cloud Storage."""
  if isinstance(spec, list):
    return [_in_s3(x) for x in spec]
  if isinstance(spec, str) and spec.startswith('gs://'):
    # Of Orbax 0.12.0: a URL, in which TensorStore would decode characters.
    bucket, _, path = spec.removeprefix('gs://').partition('/')
    return _in_s3({'driver': 'gcs', 'bucket': bucket, 'path': f'{path}/'})
  if not isinstance(spec, dict):
    return spec
  spec = {name: _in_s3(x) for name, x in spec.items()}
  if spec.get('driver') == 'gcs':
    spec |= {'driver': 's3', **_endpoint()}
  return spec


def _endpoint() -> dict[str, str]:
  """Returns what the environment says of a store that is not Amazon's."""
  names = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL')
  address = next((os.environ[x] for x in names if x in os.environ), None)
  if address is None:
    return {}
  region = os.environ.get('AWS_REGION', os.environ.get('AWS_DEFAULT_REGION'))
  return {'endpoint': address, 'aws_region': region or 'us-east-1'}
