"""The second phase of a run, which goes on from the state of another."""

import functools
from typing import Any

import jax
import optax

from examples.gpt2.run.step import Trainer, TrainState


def second_phase(
  trainer: Trainer, first: TrainState, *, fresh_moments: bool
) -> TrainState:
  """Returns the state that a second phase starts with.

  Weights are those of the first phase; the schedule is new. Of the moments of
  Adam, each part of the new optimizer takes those that it has itself: Muon
  the first, as its momentum, and no second; what Adam updates, both. Numbers of
  steps for the correction of bias are taken over with them.

  Args:
    trainer: The second phase's.
    first: State of the first phase, whose optimizer has the moments of Adam.
    fresh_moments: Whether moments start at zero.
  """
  shardings = jax.tree.map(lambda x: x.sharding, trainer.shapes)

  @functools.partial(jax.jit, out_shardings=shardings)
  def start(first: TrainState) -> TrainState:
    opt_state = trainer.optimizer.init(first.params)
    if not fresh_moments:
      adam = optax.tree.get(first.opt_state, 'ScaleByAdamState')
      opt_state = _take_moments(opt_state, adam)
    return TrainState(first.params, opt_state)

  return start(first)


def _take_moments(opt_state: Any, adam: optax.ScaleByAdamState) -> Any:
  """Returns a state of any optimizer with the moments of Adam in it."""

  def has_moments(x: Any) -> bool:
    return hasattr(x, 'mu')

  def take(state: Any) -> Any:
    if not has_moments(state):
      return state
    names = [name for name in ('mu', 'nu') if hasattr(state, name)]
    moments = {x: _own(getattr(state, x), getattr(adam, x)) for x in names}
    return state._replace(count=adam.count, **moments)

  return jax.tree.map(take, opt_state, is_leaf=has_moments)


def _own(moments: Any, of_all: Any) -> Any:
  """Returns the moments of those parameters that an optimizer updates."""

  def is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)

  return jax.tree.map(
    lambda own, taken: own if is_masked(own) else taken,
    moments,
    of_all,
    is_leaf=is_masked,
  )
