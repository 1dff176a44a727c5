"""The optimizers of merit_optax by name, for the settings of a framework."""

import functools

import optax

import merit_optax

# Adam's learning rate over MERIT's, where Adam updates the other parameters.
_ADAM_RATE = 0.2


def make(
  name,
  learning_rate,
  *,
  weight_decay,
  mask=None,
  b1=0.9,
  b2=0.95,
  eps=1e-6,
  hidden=None,
  shardings=None,
  weight_dimension_numbers,
):
  """Returns an optimizer.

  Args:
    name: ``'merit'``; ``'merit_hidden'``, MERIT for hidden matrices and Adam
      for all others; ``'muon'`` or ``'muon_hyperball'``.
    learning_rate: Learning rate, or a schedule.
    weight_decay: Weight decay of MERIT, or of Muon's hidden matrices; Hyperball
      has none.
    mask: What MERIT decays; ``None`` for all.
    b1: Decay rate of the first moment, or of Muon's momentum.
    b2: Decay rate of the second moment of MERIT, and of Adam beside it.
    eps: Added to the root of the second moment, in the same places.
    hidden: Which parameters are hidden matrices; ``None`` if names tell.
    shardings: How they lie on a mesh with Auto axes, for Muon and Hyperball: a
      tree, or a function from parameters to one. Without it, all matrices may
      be gathered.
    weight_dimension_numbers: Which axes are rows and columns.

  Raises:
    ValueError: If there is no such name.
  """
  merit = functools.partial(
    merit_optax.merit,
    learning_rate,
    b1=b1,
    b2=b2,
    eps=eps,
    weight_decay=weight_decay,
    mask=mask,
    weight_dimension_numbers=weight_dimension_numbers,
  )
  muon_settings = dict(
    beta=b1,
    hidden=hidden,
    shardings=shardings,
    weight_dimension_numbers=weight_dimension_numbers,
  )
  if name == 'merit':
    return merit()
  if name == 'merit_hidden':
    adam = optax.adam(learning_rate, b1, b2, eps)
    return merit_optax.partition_hidden(
      merit(), others=optax.chain(adam, optax.scale(_ADAM_RATE)), hidden=hidden
    )
  if name == 'muon':
    return merit_optax.muon(
      learning_rate, weight_decay=weight_decay, **muon_settings
    )
  if name == 'muon_hyperball':
    return merit_optax.muon_hyperball(learning_rate, **muon_settings)
  raise ValueError(
    'The optimizer must be merit, merit_hidden, muon or muon_hyperball of '
    f'merit_optax, got {name!r}.'
  )
