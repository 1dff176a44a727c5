"""A trial: the settings of one training run, and what came out of it."""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from examples.gpt2.config import Config, RunConfig, digest
from examples.gpt2.presets import identity
from examples.study.chains import Chain

# Nats a token, about the loss of a guess among GPT-2's tokens: a run that ends
# above has diverged, even if its numbers are finite still.
_DIVERGED = 11.0


@dataclasses.dataclass(frozen=True)
class Trial:
  """A training run.

  Attributes:
    config: Resolved settings.
    chain: The study's own optimizer; ``None`` for the trainer's.
    with_diagnostics: Whether attention and updates are measured, which takes a
      program of its own and some time.
  """

  config: RunConfig
  chain: Chain | None = None
  with_diagnostics: bool = False

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    """What decides the numbers of the run, but for its text; JSON values.

    Settings that have their default are left out, so that a new setting leaves
    the keys of old trials what they are. ``'arm'`` is the text of the chain.
    """
    defaults = {x.name: x.default for x in dataclasses.fields(Config)}
    settings = {
      name: str(value) if value == math.inf else value
      for name, value in identity(self.config).items()
      if value != defaults[name]
    }
    return settings | {
      'arm': str(self.chain or ''),
      'with_diagnostics': self.with_diagnostics,
    }

  @functools.cached_property
  def key(self) -> str:
    """Hash of the identity."""
    return digest(self.identity)[:16]

  @property
  def label(self) -> dict[str, Any]:
    """What a stored line begins with; JSON values."""
    return {
      'key': self.key,
      'optimizer': self.config.optimizer,
      'arm': self.identity['arm'],
      'batch_size': self.config.batch_size,
      'learning_rate': self.config.learning_rate,
      'seed': self.config.seed,
    }


@dataclasses.dataclass(frozen=True)
class Result:
  """What came out of a trial.

  Attributes:
    key: The trial's.
    learning_rate: Peak learning rate.
    seed: Seed of weights and data.
    steps: Steps of the run.
    loss: Final validation loss, nats a token; infinite if it diverged.
    diagnostics: Of a trial with diagnostics, lists by name with an entry for
      each diagnostics step: ``step``, ``train_loss`` and, with an entry for
      each layer in turn, ``max_attention_logit``, ``attention_entropy`` and, of
      MERIT, ``clipped``.
  """

  key: str
  learning_rate: float
  seed: int
  steps: int
  loss: float
  diagnostics: Mapping[str, list[Any]] = dataclasses.field(default_factory=dict)


def make_result(trial: Trial, loss: float) -> Result:
  """Returns the result of a trial with some loss."""
  config = trial.config
  return Result(
    trial.key, config.learning_rate, config.seed, config.steps, loss
  )


def read_result(record: Mapping[str, Any]) -> Result:
  """Returns the result in a stored line."""
  loss = record['loss']
  has_diverged = loss is None or loss > _DIVERGED
  return Result(
    record['key'],
    record['learning_rate'],
    record['seed'],
    record['config'].get('steps', 0),
    math.inf if has_diverged else loss,
    record['diagnostics'],
  )
