"""Makes runs with the trainer, several at once, and keeps their results."""

from collections.abc import Iterator
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
from pathlib import Path
import shutil
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import tqdm

from examples.gpt2 import hardware, sharding
from examples.gpt2.config import UsageError
from examples.gpt2.loop import Loop
from examples.gpt2.run_folder import RunFolder, write_whole
from examples.gpt2.step_log import NotFiniteError
from examples.gpt2.tokens import Tokens, load_tokens
from examples.gpt2.training import Trainer
from examples.study.arms import make_optimizer
from examples.study.plans import Result, Run

_BY_LAYER = ('max_attention_logit', 'attention_entropy')


class Store:
  """The results of runs, a JSON file for each.

  Attributes:
    folder: Where they are.
  """

  def __init__(self, folder: Path):
    self.folder = folder

  def read(self, run: Run) -> dict[str, Any] | None:
    """Returns what a run's file holds, None if there is none."""
    path = self._path(run)
    return json.loads(path.read_text()) if path.is_file() else None

  def result(self, run: Run) -> Result | None:
    """Returns the result of a run, None if it has not been made."""
    found = self.read(run)
    if found is None:
      return None
    loss = math.inf if found['loss'] is None else found['loss']
    return Result(loss, found['watched'])

  def write(self, run: Run, result: dict[str, Any]) -> None:
    """Writes the file of a run."""
    self.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(',', ':'))
    write_whole(self._path(run), (text + '\n').encode())

  def read_all(self) -> list[dict[str, Any]]:
    """Returns what the files of all runs hold."""
    paths = sorted(self.folder.glob('*.json'))
    return [json.loads(path.read_text()) for path in paths]

  def check_text(self, sha256: str) -> None:
    """Checks that all runs were made with the same text.

    Raises:
      UsageError: If a run was made with another.
    """
    others = {x['corpus_sha256'] for x in self.read_all()} - {sha256}
    if others:
      raise UsageError(
        f'--results {self.folder} holds runs on another text (sha256 '
        f'{others.pop()[:16]}, that of --data is {sha256[:16]}): choose '
        'another folder.'
      )

  def _path(self, run: Run) -> Path:
    return self.folder / f'{run.key}.json'


class Runner:
  """Makes the runs that have no result yet.

  As a context, it holds the processes that make them.
  """

  def __init__(self, store: Store, work: Path, jobs: int, total: int):
    """Plans no run yet.

    Args:
      store: Where results go.
      work: Folder of unfinished runs, with their logs and checkpoints.
      jobs: Runs to make at once, each on a core of its own; 1 makes them in
        this process, on all devices.
      total: Runs to expect, for the bar.
    """
    self._store = store
    self._work = work
    self._jobs = jobs
    self._total = total

  def __enter__(self) -> 'Runner':
    with contextlib.ExitStack() as stack:
      self._bar = stack.enter_context(
        tqdm.tqdm(total=self._total, desc='runs', unit='run', smoothing=0.1)
      )
      self._executor = None
      if self._jobs > 1:
        context = multiprocessing.get_context('spawn')
        cores: Any = context.Queue()
        for core in _cores(self._jobs):
          cores.put(core)
        self._executor = concurrent.futures.ProcessPoolExecutor(
          self._jobs, context, _start_process, (cores, self._work)
        )
        stack.callback(self._executor.shutdown, cancel_futures=True)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_: object) -> None:
    self._stack.close()

  def __call__(self, runs: list[Run]) -> list[Result]:
    """Returns the results of runs, making those that are missing."""
    missing = {run.key: run for run in runs if self._store.read(run) is None}
    for run, result in self._make(list(missing.values())):
      if jax.process_index() == 0:
        self._store.write(run, result)
        shutil.rmtree(self._work / run.key, ignore_errors=True)
        self._bar.write(_summary(run, result))
      self._bar.update()
    multihost_utils.sync_global_devices('results are there')
    results = [self._store.result(run) for run in runs]
    return [result for result in results if result is not None]

  def _make(self, runs: list[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yields runs and what came out, as they end.

    Raises:
      RuntimeError: If runs failed; after all others.
    """
    if self._executor is None:
      yield from ((run, make(run, self._work)) for run in runs)
      return
    futures = {
      self._executor.submit(_make_quietly, run, self._work): run for run in runs
    }
    failed: dict[str, BaseException] = {}
    for future in concurrent.futures.as_completed(futures):
      error = future.exception()
      if error is None:
        yield futures[future], future.result()
      else:
        failed[futures[future].key] = error
    for key, error in failed.items():
      raise RuntimeError(
        f'{len(failed)} of {len(runs)} runs failed, the first with {error!r}; '
        f'its log is {self._work / key / "log.txt"}'
      ) from error


def make(run: Run, work: Path) -> dict[str, Any]:
  """Makes a run, or goes on with one that was killed.

  Args:
    run: The run.
    work: Folder in which a folder of the run holds its checkpoints.

  Returns:
    JSON values: the settings, the final loss (None if the run diverged), what
    was watched, seconds, versions and machine.
  """
  config = run.config
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_sizes(mesh, config)
  tokens = load_tokens(config)
  optimizer = make_optimizer(run.arm, config) if run.arm else None
  trainer = Trainer(config, tokens.vocab_size, mesh, optimizer)
  start = time.perf_counter()
  with (
    RunFolder(work / run.key, is_writer=jax.process_index() == 0) as folder,
    jax.set_mesh(mesh),
  ):
    folder.start({'config': run.identity})
    has_diverged = False
    try:
      Loop(trainer, config, tokens, folder).run()
    except NotFiniteError:
      has_diverged = True
    lines = folder.read_metrics()
  # Each run has programs of its own.
  jax.clear_caches()
  return _record(run, trainer, tokens, lines, has_diverged) | {
    'seconds': round(time.perf_counter() - start, 1)
  }


def _record(
  run: Run,
  trainer: Trainer,
  tokens: Tokens,
  lines: list[dict[str, Any]],
  has_diverged: bool,
) -> dict[str, Any]:
  """Returns what is kept of a run."""
  speeds = [line['tokens_per_second'] for line in lines]
  return {
    # JSON has no infinity.
    'config': {
      k: str(v) if v == math.inf else v for k, v in run.identity.items()
    },
    'corpus_sha256': tokens.sha256,
    'parameters': trainer.num_params,
    'loss': None if has_diverged else round(lines[-1]['val_loss'], 5),
    'steps_done': len(lines),
    'watched': _watched(lines, with_clip=not run.arm),
    'tokens_per_second': round(sorted(speeds)[len(speeds) // 2]),
    **hardware.versions(),
  }


def _watched(
  lines: list[dict[str, Any]], *, with_clip: bool
) -> dict[str, list[Any]]:
  """Returns what watch steps saw, as lists with an entry for each."""
  watches = [line for line in lines if 'layers' in line]
  watched = {
    name: [_short(line[name]) for line in watches]
    for name in ('step', 'train_loss', *_BY_LAYER)
  }
  if with_clip and watches and 'clipped' in watches[0]['layers']:
    watched['clipped'] = [_short(x['layers']['clipped']) for x in watches]
  return watched


def _short(value: Any) -> Any:
  """Returns numbers with four digits, None for those that are not finite."""
  if isinstance(value, list):
    return [_short(x) for x in value]
  if isinstance(value, int):
    return value
  return float(f'{value:.4g}') if math.isfinite(value) else None


def _make_quietly(run: Run, work: Path) -> dict[str, Any]:
  """Makes a run with its output in a file."""
  folder = work / run.key
  folder.mkdir(parents=True, exist_ok=True)
  with (
    (folder / 'log.txt').open('a') as log,
    contextlib.redirect_stdout(log),
    contextlib.redirect_stderr(log),
  ):
    return make(run, work)


def _summary(run: Run, result: dict[str, Any]) -> str:
  config = run.config
  loss = 'diverged' if result['loss'] is None else f'{result["loss"]:.4f}'
  return (
    f'{run.key}  {run.arm or config.optimizer:13} batch {config.batch_size:5} '
    f'rate {config.learning_rate:<8g} seed {config.seed}  {loss}  '
    f'{result["seconds"]:.0f} s'
  )


def _cores(count: int) -> list[int]:
  """Returns the cores of as many processes, in turn."""
  cores = sorted(os.sched_getaffinity(0))
  return [cores[i % len(cores)] for i in range(count)]


def _start_process(cores: Any, work: Path) -> None:
  """Binds this process to a core, before jax makes its threads."""
  os.sched_setaffinity(0, {cores.get()})
  # Runs share the programs that do not depend on the learning rate.
  jax.config.update('jax_compilation_cache_dir', str(work / 'compiled'))
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  """Ends this process when that which started it has been killed."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)
