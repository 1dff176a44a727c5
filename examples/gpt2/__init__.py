"""A GPT-2 trainer in Flax NNX, sharded with jax.jit."""

import importlib.util

for _package in (
  'datasets', 'flax', 'grain', 'matplotlib', 'orbax', 'safetensors',
  'tokenizers', 'tyro', 'zstandard',
):  # fmt: skip
  if importlib.util.find_spec(_package) is None:
    raise ModuleNotFoundError(
      f"{_package} is missing: pip install -e '.[examples]' in the clone "
      'installs all that the trainer needs.',
      name=_package,
    )
