"""MERIT, LAMB, AdamW and Muon at a million tokens a step.

    python -m examples.study.large_batch dry-run   # a minute on a CPU
    python -m examples.study.large_batch gpu       # 13 minutes on an H100

Each rule updates hidden matrices only; the same Adam updates all else. Stage A
chooses a learning rate for each rule at a small batch, stage B trains at the
large one. A trial is a line of JSON as soon as it ends, and a trial that has a
line is not run again: repeat a command that was stopped.
"""

from collections.abc import Callable, Iterator
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
from pathlib import Path
import time
from typing import Any, Literal, TypeAlias, get_args

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro

from examples import pretrain
import merit_optax

Rule: TypeAlias = Literal['merit', 'muon', 'adamw', 'lamb']


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compares optimizers at a large batch."""

  num_layers: int = 6
  num_heads: int = 6
  width: int = 384
  """Features of the residual stream."""
  context_length: int = 256
  """Tokens in a sequence."""
  vocab_size: int = 4096
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  """dtype of activations, and of the products of Muon."""
  remat: bool = False
  """Whether to compute each block again in the backward pass."""
  unroll: bool = True
  """Whether to compile each layer, which makes steps on GPUs faster."""
  fsdp: int = 1
  """Devices that parameters are split over; the others split the batch only."""

  data: Path | None = Path('runs/corpus')
  """Folder of train.bin and val.bin. None: Python's standard library."""
  results: Path = Path('examples/study/data/large_batch.jsonl')
  """File of the trials."""
  rules: tuple[Rule, ...] = get_args(Rule)
  """Rules to compare."""
  steps: int = 236
  """Steps of each trial."""
  small_batch: int = 32_768
  """Tokens of a step in stage A."""
  large_batch: int = 1_048_576
  """Tokens of a step in stage B; 0: only stage A."""
  micro_batch: int = 32_768
  """Tokens whose gradient is computed at once."""
  eval_tokens: int = 524_288
  """Tokens to validate on."""
  minutes: float = 60 * 24
  """No trial starts that would end later than this."""


PRESETS = {
  'gpu': ('12M parameters, for one GPU.', Settings()),
  'small': (
    'GPT-2 small, 0.5M tokens in stage A.',
    Settings(
      num_layers=12, num_heads=12, width=768, context_length=1024,
      vocab_size=50_304, small_batch=524_288, steps=2_400,
    ),
  ),
  'nano': (
    '0.1M parameters, stage A only: half an hour on two cores.',
    Settings(
      num_layers=2, num_heads=2, width=64, context_length=64, vocab_size=256,
      dtype='float32', unroll=False, data=None, large_batch=0,
      micro_batch=8_192, eval_tokens=131_072,
      results=Path('runs/large_batch_nano.jsonl'),
    ),
  ),
  'dry-run': (
    'Everything at toy sizes: a minute on two cores.',
    Settings(
      num_layers=2, num_heads=2, width=16, context_length=16, vocab_size=256,
      dtype='float32', unroll=False, data=None, steps=12, small_batch=256,
      large_batch=1_024, micro_batch=256, eval_tokens=1_024,
      results=Path('runs/large_batch_dry.jsonl'),
    ),
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run: its rule, its learning rate as a power of two, seed and batch."""

  rule: Rule
  power: int
  """The peak is the middle rate of the rule times 2**power."""
  seed: int
  batch_tokens: int

  def rate(self, settings: Settings) -> float:
    """Returns the peak of the learning rate of hidden matrices."""
    root = math.sqrt(settings.steps)
    middle = {
      'merit': 0.35 / root,
      'muon': 0.5 / root,
      'adamw': 1 / settings.width,
      'lamb': 0.45 / root,
    }
    return float(f'{middle[self.rule] * 2.0**self.power:.3g}')


Losses: TypeAlias = dict[Trial, float]
"""Final validation losses, in nats per token, of the trials that have ended."""


def plan(settings: Settings, losses: Losses) -> Iterator[Trial]:
  """Yields trials in order; a trial's loss must be there before the next one.

  Args:
    settings: Rules and batches.
    losses: Of trials that have ended.

  Yields:
    Trials, those of ``losses`` too.
  """
  for rule in settings.rules:
    yield from _rates(settings, losses, rule)
  if not settings.large_batch:
    return
  best = {rule: _best(settings, losses, rule) for rule in settings.rules}
  for seed, change, rules in (
    (1, 0, settings.rules),
    (1, 1, ('merit', 'muon')),
    (2, 0, ('merit', 'adamw')),
  ):
    for rule in rules:
      if rule in best:
        yield Trial(rule, best[rule] + change, seed, settings.large_batch)


def _rates(settings: Settings, losses: Losses, rule: Rule) -> Iterator[Trial]:
  """Yields five rates around the middle, and more while an edge is the best."""
  make = functools.partial(
    Trial, rule, seed=0, batch_tokens=settings.small_batch
  )
  powers = [-2, -1, 0, 1, 2]
  for power in powers:
    yield make(power=power)
  for _ in range(4):
    best = _best(settings, losses, rule)
    if min(powers) < best < max(powers):
      return
    powers.append(best + (1 if best == max(powers) else -1))
    yield make(power=powers[-1])


def _best(settings: Settings, losses: Losses, rule: Rule) -> int:
  """Returns the power of two that ended lowest in stage A."""
  tried = {
    trial.power: loss
    for trial, loss in losses.items()
    if (trial.rule, trial.seed) == (rule, 0)
    and trial.batch_tokens == settings.small_batch
  }
  return min(tried, key=lambda power: tried[power])


# ------------------------------------------------------------------ optimizers

_B1, _B2, _EPS = 0.8, 0.95, 1e-6
_WARMUP_SHARE = 0.3
_ADAM_RATE = 0.004
# Of stacked layers, (L, inputs, outputs).
_MATRICES = optax.contrib.MuonDimensionNumbers((-2,), (-1,))


def _hidden_rule(rule: Rule, dtype: str) -> optax.GradientTransformation:
  """Returns the update of hidden matrices before the learning rate."""
  adam = optax.scale_by_adam(_B1, _B2, eps=_EPS)
  decay = optax.add_decayed_weights
  rules: dict[Rule, Callable[[], optax.GradientTransformation]] = {
    'merit': lambda: optax.chain(
      merit_optax.scale_by_adam(_B1, _B2, eps=_EPS),
      decay(0.01),
      merit_optax.scale_by_max_norm_trust_ratio(
        weight_dimension_numbers=_MATRICES
      ),
      merit_optax.elementwise_clip(1.0),
    ),
    'lamb': lambda: optax.chain(
      adam,
      decay(0.01),
      merit_optax.scale_by_l2_norm_trust_ratio(
        weight_dimension_numbers=_MATRICES
      ),
    ),
    'adamw': lambda: optax.chain(adam, decay(0.1)),
    'muon': lambda: optax.chain(
      merit_optax.scale_by_muon(
        beta=_B1, ns_dtype=dtype, weight_dimension_numbers=_MATRICES
      ),
      merit_optax.scale_by_shape(
        lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        weight_dimension_numbers=_MATRICES,
      ),
      decay(0.1),
    ),
  }
  return rules[rule]()


def make_optimizer(
  rule: Rule, rate: jax.typing.ArrayLike, settings: Settings
) -> optax.GradientTransformation:
  """Returns a rule for hidden matrices, and Adam for all else.

  Args:
    rule: Name of the rule.
    rate: Peak of its learning rate.
    settings: Steps and dtype.
  """
  warmup, end = _WARMUP_SHARE * settings.steps, settings.steps + 1

  def scale(peak: jax.typing.ArrayLike) -> optax.GradientTransformation:
    def schedule(count: jax.Array) -> jax.Array:
      nodes = jnp.array([0, warmup, end], jnp.float32)
      return peak * jnp.interp(count + 1, nodes, jnp.array([0.0, 1.0, 0.0]))

    return optax.scale_by_learning_rate(schedule)

  adam = optax.scale_by_adam(_B1, _B2, eps=_EPS)
  parts = {
    True: optax.chain(_hidden_rule(rule, settings.dtype), scale(rate)),
    False: optax.chain(adam, scale(_ADAM_RATE)),
  }
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.partition(parts, merit_optax.hidden_matrices),
  )


# -------------------------------------------------------------------- training


def model_config(settings: Settings) -> pretrain.Config:
  """Returns the settings of a micro-batch for ``examples/pretrain.py``."""
  fields = {x.name for x in dataclasses.fields(pretrain.Config)}
  shared = {k: v for k, v in vars(settings).items() if k in fields}
  return pretrain.Config(
    **shared,
    init_std=0.02 * math.sqrt(768 / settings.width),
    batch_size=settings.micro_batch // settings.context_length,
  )


init_params = functools.partial(jax.jit, static_argnames='config')(
  lambda config: jax.tree.map_with_path(
    pretrain.pin, pretrain.init_params(config)
  )
)


@functools.partial(jax.jit, static_argnames=('rule', 'settings'))
def init_optimizer(params: Any, rule: Rule, settings: Settings) -> Any:
  """Returns the first state of the optimizer, placed like the parameters."""
  state = make_optimizer(rule, 0.0, settings).init(params)
  return jax.tree.map_with_path(pretrain.pin, state)


@functools.partial(jax.jit, static_argnames='config')
def loss_and_gradients(
  params: Any, tokens_BT: jax.Array, config: pretrain.Config
) -> Any:
  """Returns the mean loss of a micro-batch, and its gradients."""
  loss, grads = jax.value_and_grad(pretrain.loss_fn)(params, tokens_BT, config)
  return loss, jax.tree.map_with_path(pretrain.pin, grads)


@functools.partial(jax.jit, donate_argnames='total')
def add(total: Any, other: Any) -> Any:
  """Returns the sum of two trees."""
  return jax.tree.map(jnp.add, total, other)


# One program for each rule serves all its rates and both batches.
@functools.partial(
  jax.jit,
  static_argnames=('rule', 'settings'),
  donate_argnames=('params', 'opt_state'),
)
def update(
  params: Any,
  opt_state: Any,
  total: Any,
  count: jax.typing.ArrayLike,
  rate: jax.typing.ArrayLike,
  rule: Rule,
  settings: Settings,
) -> Any:
  """Returns parameters and optimizer state after a step, and its mean loss."""
  loss, grads = jax.tree.map(lambda x: x / count, total)
  optimizer = make_optimizer(rule, rate, settings)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  state = jax.tree.map_with_path(pretrain.pin, (params, opt_state))
  return *state, loss


@functools.partial(jax.jit, static_argnames='config')
def max_logits(
  params: Any, tokens_BT: jax.Array, config: pretrain.Config
) -> jax.Array:
  """Returns the largest attention logit of each layer."""
  model = pretrain.make_model(params, config)
  structure, arrays = nnx.split(model.blocks)

  def apply(x_BTD: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
    block = nnx.merge(structure, arrays)
    query, key, _ = block.query_key_value(x_BTD)
    logits_H = merit_optax.attention_statistics(query, key).max_logit
    return block(x_BTD), logits_H.max()

  return jax.lax.scan(apply, model.embed(tokens_BT[:, :-1]), arrays)[1]


class Trainer:
  """Runs trials, and keeps what they share: the tokens, and what is compiled.

  Attributes:
    data: First digits of a digest of all tokens.
    corpus_tokens: Number of tokens to train on.
  """

  # Sequences whose attention logits are looked at.
  _LOGIT_SEQUENCES = 64
  _EVALUATIONS = 12

  def __init__(self, settings: Settings):
    self.settings = settings
    self._config = model_config(settings)
    self._tokens, self._val_tokens = pretrain.load_tokens(self._config)
    digest = hashlib.sha256()
    for tokens in (self._tokens, self._val_tokens):
      digest.update(np.ascontiguousarray(tokens))
    self.data = digest.hexdigest()[:12]
    self.corpus_tokens = len(self._tokens)
    # make_batch returns four batches to validate on.
    self._val_ABT = pretrain.make_batch(
      self._val_tokens, self._batch_config(settings.eval_tokens // 4), step=0
    )

  def _batch_config(self, tokens: int, seed: int = 0) -> pretrain.Config:
    """Returns the settings of batches of so many tokens."""
    return dataclasses.replace(
      self._config,
      seed=seed,
      batch_size=tokens // self.settings.context_length,
      accumulation_steps=max(1, tokens // self.settings.micro_batch),
    )

  def run(self, trial: Trial, steps: int | None = None) -> dict[str, Any]:
    """Returns what a trial measured.

    Args:
      trial: Rule, rate, seed and batch.
      steps: Stops after so many; ``None`` for the whole run.

    Returns:
      Losses of all steps and of evaluations, in nats per token, attention
      logits and seconds. A loss that is not finite ends the run.
    """
    settings, start = self.settings, time.perf_counter()
    config = self._batch_config(trial.batch_tokens, trial.seed)
    rate = trial.rate(settings)
    params = init_params(dataclasses.replace(self._config, seed=trial.seed))
    opt_state = init_optimizer(params, trial.rule, settings)
    is_large = trial.batch_tokens == settings.large_batch
    every = math.ceil(settings.steps / (self._EVALUATIONS if is_large else 2))
    losses: list[float] = []
    evaluations: list[dict[str, Any]] = []
    loss = jnp.float32(0)
    name = f'{trial.rule} {rate:g} seed {trial.seed} {trial.batch_tokens:,}'
    progress = tqdm.trange(
      1, (steps or settings.steps) + 1, desc=name, leave=False, disable=None
    )
    for step in progress:
      batch_ABT = pretrain.make_batch(self._tokens, config, step)
      total = None
      for micro_BT in batch_ABT:
        one = loss_and_gradients(params, micro_BT, self._config)
        total = one if total is None else add(total, one)
      last_loss, (params, opt_state, loss) = loss, update(
        params, opt_state, total, len(batch_ABT), rate, trial.rule, settings
      )
      # That of the step before: the device need not wait.
      losses.append(float(last_loss))
      if not math.isfinite(losses[-1]):
        break
      if step % every == 0 or step == progress.total:
        evaluations.append({'step': step} | self._evaluate(params))
        print(f'{name} step {step} val {evaluations[-1]["loss"]:.4f}', flush=True)
    losses = [*losses[1:], float(loss)]
    is_finite = bool(np.isfinite(losses).all()) and steps is None
    return {
      'loss': evaluations[-1]['loss'] if is_finite else None,
      'evaluations': evaluations,
      'train_losses': [round(x, 4) for x in losses],
      'seconds': round(time.perf_counter() - start, 2),
    }

  def _evaluate(self, params: Any) -> dict[str, Any]:
    loss = pretrain.eval_step(params, self._val_ABT, self._config)
    tokens_BT = self._val_ABT[0, : self._LOGIT_SEQUENCES]
    logits_L = max_logits(params, tokens_BT, self._config)
    return {
      'loss': round(float(loss), 4),
      'max_logits': [round(x, 2) for x in logits_L.tolist()],
    }

  def tokens_per_second(self) -> float:
    """Returns the speed of training, after compilation."""
    trial = Trial('merit', 0, 0, self.settings.micro_batch * 8)
    self.run(trial, steps=1)
    start = time.perf_counter()
    self.run(trial, steps=10)
    return 10 * trial.batch_tokens / (time.perf_counter() - start)


# --------------------------------------------------------------------- results


def facts(settings: Settings, data: str) -> dict[str, Any]:
  """Returns what, beside the trial, decides its losses."""
  free = ('data', 'results', 'rules', 'minutes', 'small_batch', 'large_batch')
  fixed = {k: v for k, v in vars(settings).items() if k not in free}
  # These change rounding only.
  for name in ('micro_batch', 'unroll', 'remat', 'fsdp'):
    del fixed[name]
  return {**fixed, 'data': data}


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the trials of a file, without a last line that was cut off."""
  lines = path.read_text().splitlines(True) if path.exists() else []
  return [json.loads(x) for x in lines if x.endswith('\n')]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.extras.overridable_config_cli(PRESETS, args=args)
  with jax.set_mesh(pretrain.make_mesh(model_config(settings))):
    run(settings)


def run(settings: Settings) -> None:
  """Runs all trials that have no line yet, while there is time.

  Args:
    settings: Of the comparison.
  """
  start = time.monotonic()
  trainer = Trainer(settings)
  fixed = facts(settings, trainer.data)
  records = read(settings.results)
  losses = {
    Trial(**x['trial']): math.inf if x['loss'] is None else x['loss']
    for x in records
    if x['settings'] == fixed
  }
  speed = trainer.tokens_per_second()
  minutes = {
    stage: settings.steps * batch / speed / 60
    for stage, batch in (('A', settings.small_batch), ('B', settings.large_batch))
  }
  print(f'{jax.devices()[0].device_kind}: {speed:,.0f} tokens/s, a trial of '
    f'stage A takes {minutes["A"]:.1f} minutes, one of B {minutes["B"]:.1f}', flush=True)
  for trial in plan(settings, losses):
    if trial in losses:
      continue
    tokens = settings.steps * trial.batch_tokens
    needed = tokens / speed / 60
    left = settings.minutes - (time.monotonic() - start) / 60
    if needed > left:
      print(f'{trial} needs {needed:.1f} minutes, {left:.1f} are left.')
      print('Repeat the command to go on.')
      return
    result = trainer.run(trial)
    records.append(
      {
        'trial': dataclasses.asdict(trial),
        'rate': trial.rate(settings),
        'settings': fixed,
        **result,
        'epochs': round(tokens / trainer.corpus_tokens, 2),
        'device': jax.devices()[0].device_kind,
        'versions': {
          name: importlib.metadata.version(name)
          for name in ('jax', 'flax', 'optax')
        },
        'date': datetime.date.today().isoformat(),
      }
    )
    _write(settings.results, records)
    losses[trial] = math.inf if result['loss'] is None else result['loss']
    print(f'{trial} loss {result["loss"]} {result["seconds"]} s', flush=True)
  print(f'All trials have a line in {settings.results}.')


def _write(path: Path, records: list[dict[str, Any]]) -> None:
  """Replaces the file as a whole, so that a kill leaves the old one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix('.new')
  new.write_text(''.join(json.dumps(x) + '\n' for x in records))
  new.replace(path)


if __name__ == '__main__':
  main()
