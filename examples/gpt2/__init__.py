"""A GPT-2 and Llama trainer in Flax NNX, sharded with jax.jit.

The core takes folders of token files and trains; its files import no tool, and
none imports another in a circle. What the core and the tools both stand on,
``command`` and ``storage``, belongs to the core, since a run reads and writes
stores. Tools make and use what the core reads and writes. ``train`` is the
command that puts both together.

Core: command, storage, config, presets, optimizers, schedules, resolve,
sharding, model, loss, token_files, data, step, hardware, processes,
checksums, checkpoints, run_folder, log, evaluations, loop.

Tools: documents, prepare, tokenizer, convert, model_card, model_files,
init_from, generate, evaluate, diagnostics, plot, compile_for.
"""

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
