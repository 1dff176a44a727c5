"""The README.md of an exported model: what is known of its training."""

from pathlib import Path
import shlex

from examples.gpt2.command import flag
from examples.gpt2.config import ROLES, Config, by_name, from_json
from examples.gpt2.model_files import Model
from examples.gpt2.presets import PRESETS
from examples.gpt2.run_folder import WEIGHTS, RunFolder, saved_steps
from examples.gpt2.tokenizer import find_begin

CARD = 'README.md'
# What no flag sets.
_HIDDEN = {'head_width', 'norm_epsilon', 'rope_theta', 'rope_scaling'}
_HEADER = """---
library_name: transformers
pipeline_tag: text-generation
# Fill in: license
---
"""
_LIBRARY = '[merit_optax](https://github.com/merit-optax/merit-optax)'


def model_card(folder: Path, model: Model, step: int | None = None) -> str:
  """Returns the model card of a model, in Markdown.

  Args:
    folder: Folder of a run or of an imported model.
    model: The model in it.
    step: Step of the run's checkpoint whose weights the model has. Default: the
      last, as in ``load_model``.
  """
  config = model.config
  name = {'gpt2': 'GPT-2', 'llama': 'Llama'}[config.architecture]
  lines = [
    f'# A {name} with {config.num_layers} layers of width {config.width}',
    '',
    f'- Context: {config.context_length:,} tokens',
  ]
  if model.tokenizer is not None and model.end_token is not None:
    begin = map(model.tokenizer.id_to_token, find_begin(model.tokenizer))
    before = ''.join(f'`{token}` before and ' for token in begin)
    lines += [f'- Documents: {before}`{model.end_token}` after each']
  run = RunFolder(folder)
  if (run.path / 'config.json').is_file():  # An imported model has none.
    lines += _training(run, step)
  lines += ['- License: to be filled in']
  return _HEADER + '\n'.join(lines) + '\n'


def _training(run: RunFolder, step: int | None) -> list[str]:
  """Returns what a run did up to a step."""
  facts = run.read_settings()
  config, data = facts['config'], facts['data']
  if step is None and not (run.path / WEIGHTS).is_file():
    step = max(saved_steps(run.path))
  versions = facts['versions'].items()
  found = [
    f'- Data: {data["train_tokens"]:,} tokens, SHA-256 `{data["sha256"]}`',
    f'- Optimizer: {config["optimizer"]}, learning rate '
    f'{config["learning_rate"]:.4g}',
    f'- Software: {", ".join(f"{name} {x}" for name, x in versions)}',
    f'- Command of the trainer of {_LIBRARY}: '
    f'`{command(from_json(facts["settings"]))}`',
  ]
  lines = [x for x in run.read_metrics() if step in (None, x['step'])]
  for line in lines[-1:]:
    found += [
      f'- Trained on: {line["tokens"]:,} tokens, {line["step"]:,} steps'
    ]
    if 'val_loss' in line:
      found += [f'- Validation loss: {line["val_loss"]:.4f} nats per token']
  return found


def command(config: Config) -> str:
  """Returns the command that trains with some settings to the same numbers."""
  usual, args = by_name(PRESETS[config.preset]), [config.preset]
  for name, value in by_name(config).items():
    decides = ROLES[name] in ('fixed', 'schedule') and name not in _HIDDEN
    if value == usual[name] or not (decides or name in ('data', 'eval_data')):
      continue
    if isinstance(value, bool):
      args += [flag(name if value else f'no_{name}')]
    else:
      values = value if isinstance(value, tuple) else [value]
      args += [flag(name), *map(str, values)]
  return f'python -m examples.gpt2.train {shlex.join(args)}'
