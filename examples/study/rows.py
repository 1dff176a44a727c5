"""How far rows of embedding and head have moved, by how often they are seen."""

import statistics
from typing import Any

import jax
import numpy as np

from examples.gpt2.config import Config
from examples.gpt2.data.batches import training_batch
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.run.step import Trainer, TrainState
from examples.study.plans import Result

RARE = 0.1
"""Share of the steps below which a token is rare: with ``b1=0.9``, a gradient
has left the momentum before the next one comes."""
_QUANTILES = 0.05, 0.5, 0.95


def measure(
  trainer: Trainer, config: Config, tokens: Tokens, state: TrainState
) -> dict[str, Any]:
  """Measures the rows of a model with an untied head.

  Returns:
    JSON values, for ``'embedding'`` and ``'head'``, and there for the groups
    ``'never'`` (seen in no step), ``'rare'`` and ``'common'`` that have tokens:

    - ``rows``, their number;
    - ``growth``: the l2 norm at the end over that at the start, of a twentieth
      of the rows, of half of them and of all but a twentieth at most;
    - ``norm``: that at the end, the median;
    - ``moved``: norm of the change over the norm at the start, the median.
  """
  seen = steps_seen(trainer, config, tokens)
  start, end = (
    {
      'embedding': params['token_embedding']['embedding'],
      'head': params['head']['kernel'].T,
    }
    for params in (trainer.init().params, state.params)
  )
  return {
    name: {
      group: _statistics(np.asarray(start[name])[is_in], end_VD[is_in])
      for group, is_in in _groups(seen[name], config.steps).items()
      if is_in.any()
    }
    for name, end_VD in jax.tree.map(np.asarray, end).items()
  }


def steps_seen(
  trainer: Trainer, config: Config, tokens: Tokens
) -> dict[str, np.ndarray]:
  """Returns in how many steps a token was an input, and a target, (V,) each."""
  rows = trainer.model_config.vocab_size
  seen = {name: np.zeros(rows, int) for name in ('embedding', 'head')}
  for step in range(1, config.steps + 1):
    batch = training_batch(tokens.train, config, step, trainer.mesh)
    batch_ABT = np.asarray(batch)
    seen['embedding'][np.unique(batch_ABT[..., :-1])] += 1
    seen['head'][np.unique(batch_ABT[..., 1:])] += 1
  return seen


def _groups(seen: np.ndarray, steps: int) -> dict[str, np.ndarray]:
  is_never, is_common = seen == 0, seen >= RARE * steps
  return {
    'never': is_never,
    'rare': ~is_never & ~is_common,
    'common': is_common,
  }


def _statistics(start_ND: np.ndarray, end_ND: np.ndarray) -> dict[str, Any]:
  first, last, change = (
    np.linalg.norm(x, axis=1) for x in (start_ND, end_ND, end_ND - start_ND)
  )
  return {
    'rows': len(start_ND),
    'growth': [_rounded(x) for x in np.quantile(last / first, _QUANTILES)],
    'norm': _rounded(np.median(last)),
    'moved': _rounded(np.median(change / first)),
  }


def _rounded(value: float) -> float:
  return float(f'{value:.4g}')


def growth(
  results: list[Result], matrix: str, group: str
) -> list[float] | None:
  """Returns norms at the end over those at the start, None if none is known.

  A twentieth of the rows is below the first and above the third, half of them
  below the second; medians over seeds.
  """
  found = [x[group]['growth'] for x in _measured(results, matrix, group)]
  return [statistics.median(x) for x in zip(*found, strict=True)] or None


def over_live(results: list[Result], matrix: str, group: str) -> float | None:
  """Returns the median norm over that of common rows, the median of seeds."""
  found = [
    x[group]['norm'] / x['common']['norm']
    for x in _measured(results, matrix, group)
    if 'common' in x
  ]
  return statistics.median(found) if found else None


def moved(results: list[Result], matrix: str, group: str) -> float | None:
  """Returns the median change over the first norm, the median of seeds."""
  found = [x[group]['moved'] for x in _measured(results, matrix, group)]
  return statistics.median(found) if found else None


def _measured(
  results: list[Result], matrix: str, group: str
) -> list[dict[str, Any]]:
  """Returns the groups of rows of each seed that has the one asked for."""
  found = [x.measured[matrix] for x in results if x.measured]
  return [groups for groups in found if group in groups]
