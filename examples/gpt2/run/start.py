"""The state that a run starts from."""

import jax

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.files import Model, load_model
from examples.gpt2.run.step import Trainer, TrainState

# What may differ between a model and the run that starts from it.
_NOT_WEIGHTS = ('dtype', 'remat', 'unroll')


def initial_model(
  config: Config, trainer: Trainer, tokens: Tokens
) -> Model | None:
  """Reads the model of ``--init-from``, if there is one.

  Raises:
    UsageError: If it is another model than that of the settings, or has another
      tokenizer than the data.
  """
  if config.init_from is None:
    return None
  model = load_model(config.init_from)
  _check_sizes(config, model.config, trainer.model_config)
  tokenizers = [x.to_str() for x in (model.tokenizer, tokens.tokenizer) if x]
  if len(set(tokenizers)) > 1:
    raise UsageError(
      f'--init-from {config.init_from} has another tokenizer than --data '
      f'{config.data}: make tokens with it, by python -m '
      f'examples.gpt2.prepare --tokenizer {config.init_from}.'
    )
  return model


def _check_sizes(
  config: Config, found: ModelConfig, expected: ModelConfig
) -> None:
  changes = ', '.join(
    f'{name}: {value} -> {vars(expected)[name]}'
    for name, value in sorted(vars(found).items())
    if name not in _NOT_WEIGHTS and value != vars(expected)[name]
  )
  if changes:
    raise UsageError(
      f'--init-from {config.init_from} holds another model than the settings '
      f'say ({changes}).'
    )


def initial_state(trainer: Trainer, model: Model | None) -> TrainState:
  """Returns the first state, with random weights or those of a model."""
  state = trainer.init()
  if model is None:
    return state
  params = jax.tree.map(
    lambda x, like: jax.make_array_from_callback(
      x.shape, like.sharding, x.__getitem__
    ),
    model.params,
    trainer.shapes.params,
  )
  return state._replace(params=params)
