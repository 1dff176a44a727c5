"""Makes many runs, several at once, and stores their results."""

from collections.abc import Iterator
import concurrent.futures
import contextlib
import multiprocessing
import os
from pathlib import Path
import shutil
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils
import tqdm

from examples.gpt2.devices import hardware
from examples.gpt2.run.command import CommandError
from examples.study.plans import Result, Run
from examples.study.runs import make
from examples.study.store import Store


class RunsFailedError(CommandError):
  """Runs ended with an error; the message says which, and where its log is."""


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
        self._executor = self._start_processes()
        stack.callback(self._executor.shutdown, cancel_futures=True)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_: object) -> None:
    self._stack.close()

  def _start_processes(self) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context('spawn')
    cores: Any = context.Queue()
    usable = hardware.usable_cores()
    for i in range(self._jobs):
      cores.put(usable[i % len(usable)])
    return concurrent.futures.ProcessPoolExecutor(
      self._jobs, context, _start_process, (cores, self._work)
    )

  def __call__(self, runs: list[Run]) -> list[Result]:
    """Returns the results of runs, making those that are missing.

    Raises:
      RunsFailedError: If runs failed; after all others.
    """
    missing = {run.key: run for run in runs if self._store.read(run) is None}
    for run, record in self._make(list(missing.values())):
      if jax.process_index() == 0:
        self._store.write(run, record)
        shutil.rmtree(self._work / run.key, ignore_errors=True)
        self._bar.write(_summary(run, record))
      self._bar.update()
    multihost_utils.sync_global_devices('results are there')
    results = [self._store.result(run) for run in runs]
    return [result for result in results if result is not None]

  def _make(self, runs: list[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yields runs and what came out, as they end."""
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
    if failed:
      key, error = next(iter(failed.items()))
      raise RunsFailedError(
        f'{len(failed)} of {len(runs)} runs failed, the first with {error!r}; '
        f'its log is {self._work / key / "log.txt"}'
      ) from error


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


def _summary(run: Run, record: dict[str, Any]) -> str:
  config = run.config
  loss = 'diverged' if record['loss'] is None else f'{record["loss"]:.4f}'
  return (
    f'{run.key}  {run.arm or config.optimizer:13} batch {config.batch_size:5} '
    f'rate {config.learning_rate:<8g} seed {config.seed}  {loss}  '
    f'{record["seconds"]:.0f} s'
  )


def _start_process(cores: Any, work: Path) -> None:
  """Binds this process to a core, before jax makes its threads."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {cores.get()})
  jax.config.update('jax_platforms', 'cpu')
  # For the programs that do not depend on the learning rate.
  jax.config.update('jax_compilation_cache_dir', str(work / 'compiled'))
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  """Ends this process when that which started it has been killed."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)
