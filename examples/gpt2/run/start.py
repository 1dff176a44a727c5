"""The weights that a run starts from."""

import dataclasses
from typing import Any

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.model.files import load_model, read_vocabulary
from examples.gpt2.run.step import Trainer
from examples.gpt2.storage import as_path

# What may differ between a model and the run that starts from it.
_NOT_WEIGHTS = ('dtype', 'reduce_dtype', 'remat', 'unroll', 'init_std')
# Of a llama, which has no weights for positions.
_NOT_WEIGHTS_OF_LLAMA = (*_NOT_WEIGHTS, 'context_length')


def with_vocabulary(config: Config, tokens: Tokens) -> Tokens:
  """Returns tokens with the tokenizer of ``--init-from``, if they have none.

  Raises ``UsageError`` if it has tokens that the data cannot have.
  """
  if config.init_from is None or tokens.tokenizer is not None:
    return tokens
  folder = as_path(config.init_from)
  tokenizer, end_token, companions = read_vocabulary(folder, tokens.vocab_size)
  return dataclasses.replace(
    tokens, tokenizer=tokenizer, end_token=end_token, companions=companions
  )


def initial_params(config: Config, trainer: Trainer, tokens: Tokens) -> Any:
  """Returns the weights of ``--init-from``, None without it.

  Raises ``UsageError`` if its model is another than that of the settings, or
  has another tokenizer than the data.
  """
  if config.init_from is None:
    return None
  model = load_model(config.init_from, trainer.mesh)
  found, expected = vars(model.config), vars(trainer.model_config)
  free = _NOT_WEIGHTS
  if model.config.architecture == 'llama':
    free = _NOT_WEIGHTS_OF_LLAMA
  changes = ', '.join(
    f'{name}: {found[name]} -> {expected[name]}'
    for name in sorted(found)
    if name not in free and found[name] != expected[name]
  )
  if changes:
    raise UsageError(
      f'--init-from {config.init_from} holds another model than the settings '
      f'say ({changes}).'
    )
  tokenizers = [x.to_str() for x in (model.tokenizer, tokens.tokenizer) if x]
  if len(set(tokenizers)) > 1:
    raise UsageError(
      f'--init-from {config.init_from} has another tokenizer than --data '
      f'{config.data}: make tokens with it, by python -m '
      f'examples.gpt2.prepare --tokenizer {config.init_from}.'
    )
  return model.params
