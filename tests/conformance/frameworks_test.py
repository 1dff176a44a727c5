"""MERIT trains the models of each framework, and Orbax keeps its state."""

import equinox as eqx
from flax import linen, nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import merit_optax
from tests.merit_optax.arrays import assert_same_bits, make_mesh, normal

_STEPS = 40
_SIZE = 8


def _data():
  generator = np.random.default_rng(0)
  inputs = generator.normal(size=(64, _SIZE)).astype(np.float32)
  targets = np.tanh(inputs @ generator.normal(size=(_SIZE, _SIZE)))
  return inputs, targets.astype(np.float32)


def _optimizer():
  return merit_optax.merit(optax.linear_schedule(0.05, 0.01, _STEPS))


def _mean_squared_error(outputs, targets):
  return jnp.mean((outputs - targets) ** 2)


def _train(step, *carry):
  """Returns what is carried through the steps, whose loss has to fall."""
  losses = []
  for _ in range(_STEPS):
    *carry, loss = step(*carry)
    losses.append(float(loss))
  assert losses[-1] < losses[0] / 3, losses
  return carry


class _NnxModel(nnx.Module):
  """Two layers whose kernels say how they are sharded."""

  def __init__(self, rngs):
    def init(*axes):
      return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)

    zeros = nnx.with_partitioning(nnx.initializers.zeros, ('tensor',))
    self.hidden = nnx.Linear(
      _SIZE, 32, kernel_init=init('fsdp', 'tensor'), bias_init=zeros, rngs=rngs
    )
    self.output = nnx.Linear(
      32, _SIZE, kernel_init=init('tensor', 'fsdp'), use_bias=False, rngs=rngs
    )

  def __call__(self, x):
    return self.output(jnp.tanh(self.hidden(x)))


def test_nnx_optimizer_of_sharded_parameters():
  inputs, targets = _data()
  mesh = make_mesh(fsdp=4, tensor=2)
  with jax.set_mesh(mesh):

    @nnx.jit
    def create():
      model = _NnxModel(nnx.Rngs(0))
      # Flax does so by itself from 0.12 on.
      state = nnx.state(model)
      specs = nnx.get_partition_spec(state)
      nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
      return model, nnx.Optimizer(model, _optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
      def loss_of(model):
        return _mean_squared_error(model(inputs), targets)

      loss, gradient = nnx.value_and_grad(loss_of)(model)
      optimizer.update(model, gradient)
      return [loss]

    model, optimizer = create()
    _train(lambda: step(model, optimizer))
  kernel = model.hidden.kernel
  expected = NamedSharding(mesh, P('fsdp', 'tensor'))
  assert kernel.sharding.is_equivalent_to(expected, 2)
  moments = nnx.state(optimizer)['opt_state'][0]
  assert moments['count'][...] == _STEPS
  for name in ('mu', 'nu'):
    moment = moments[name]['hidden']['kernel'][...]
    assert moment.sharding.is_equivalent_to(expected, 2)


def test_linen_train_state():
  layers = [linen.Dense(32), jnp.tanh, linen.Dense(_SIZE)]
  model, (inputs, targets) = linen.Sequential(layers), _data()
  state = train_state.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), inputs)['params'],
    tx=_optimizer(),
  )

  @jax.jit
  def step(state):
    def loss_of(params):
      outputs = state.apply_fn({'params': params}, inputs)
      return _mean_squared_error(outputs, targets)

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradient), loss

  (state,) = _train(step, state)
  assert state.step == state.opt_state[0].count == _STEPS


def test_equinox_with_leaves_that_are_no_arrays():
  model = eqx.nn.MLP(
    _SIZE, _SIZE, 32, 1, activation=jnp.tanh, key=jax.random.key(0)
  )
  optimizer, (inputs, targets) = _optimizer(), _data()
  # The activation becomes None: such leaves have neither moments nor updates.
  params = eqx.filter(model, eqx.is_inexact_array)
  assert None in jax.tree.leaves(params, is_leaf=lambda x: x is None)
  state = optimizer.init(params)

  @eqx.filter_jit
  def step(model, state):
    @eqx.filter_value_and_grad
    def loss_of(model):
      return _mean_squared_error(jax.vmap(model)(inputs), targets)

    loss, gradient = loss_of(model)
    params, _ = eqx.partition(model, eqx.is_inexact_array)
    updates, state = optimizer.update(gradient, state, params)
    return eqx.apply_updates(model, updates), state, loss

  _train(step, model, state)


def test_orbax_restores_the_state_on_another_mesh(tmp_path):
  optimizer = merit_optax.merit(0.1, mu_dtype='bfloat16')

  def place(tree, **sizes):
    """Returns the tree with its matrices split over all axes of a mesh."""
    mesh = make_mesh(**sizes)
    split, whole = P(*sizes), P()
    return jax.tree.map(
      lambda x: jax.device_put(
        x, NamedSharding(mesh, split if x.ndim == 2 else whole)
      ),
      tree,
    )

  params = {'w': normal(0, (8, 16)), 'b': normal(1, (16,))}
  state = jax.jit(optimizer.init)(params)
  _, state = jax.jit(optimizer.update)(params, state, params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', place(state, fsdp=4, tensor=2))
    checkpointer.wait_until_finished()
    like = place(jax.jit(optimizer.init)(params), tensor=2, fsdp=4)
    restored = checkpointer.restore(tmp_path / 'state', like)
  assert_same_bits(restored, state)
  places = [jax.tree.map(lambda x: x.sharding, x) for x in (restored, like)]
  assert places[0] == places[1]
