"""Trains many trials, several at once, and stores their results."""

from collections.abc import Iterator
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
from pathlib import Path
import shutil
import threading
from typing import Any

import jax
import tqdm

from examples.gpt2.command import CommandError
from examples.gpt2.devices import hardware, processes
from examples.study.training import together
from examples.study.training.store import Store
from examples.study.training.train import train
from examples.study.trial import Result, Trial
from examples.study.tuning.plans import Independent

_SHOWN = 'steps', 'warmup_share', 'b1', 'init_std', 'weight_decay', 'schedule'


class TrialsFailedError(CommandError):
  """Trials ended with an error; the message names one, and its log."""


class Sweep:
  """Trains the trials that have no result yet.

  As a context, it holds the processes that train them.
  """

  def __init__(
    self, store: Store, work: Path, jobs: int, total: int, at_once: int = 1
  ):
    """Starts the processes.

    Args:
      store: Where results go.
      work: Folder of unfinished trials, with their logs and checkpoints.
      jobs: Trials to train at once, each on a core of its own; 1 trains them in
        this process, on all devices.
      total: Trials to expect, for the bar.
      at_once: Trials to train as one program where they differ in learning rate
        and seed alone; with one job.
    """
    self._store = store
    self._work = work
    self._at_once = at_once
    self._executor = _start_workers(jobs, work) if jobs > 1 else None
    self._futures: dict[str, concurrent.futures.Future[Any]] = {}
    self._asked: list[str] = []
    self._bar = tqdm.tqdm(
      total=total,
      desc='trials',
      unit='trial',
      smoothing=0.1,
      disable=not processes.is_process_0(),
    )

  def __enter__(self) -> 'Sweep':
    return self

  def __exit__(self, *_: object) -> None:
    if self._executor is not None:
      self._executor.shutdown(cancel_futures=True)
    self._bar.close()

  def __call__(self, trials: list[Trial]) -> list[Result | None]:
    """Returns the results of trials, after training those that have none.

    With processes, it waits for results of independent trials only when it is
    asked for the same ones again, and then for one of them.

    Raises:
      TrialsFailedError: If trials failed; after all others.
    """
    missing = {x.key: x for x in trials if x.key not in self._store.records}
    if self._executor is None:
      done = self._train_here(list(missing.values()))
    elif isinstance(trials, Independent):
      asked = [x.key for x in trials]
      # Otherwise, what is there already may lead to further trials.
      is_again = asked == self._asked
      self._asked = asked
      self._submit(missing)
      done = itertools.islice(self._train(missing), 1 if is_again else 0)
    else:
      done = self._train(missing)
    for key, record in done:
      self._keep(key, record)
    return [self._store.result(trial) for trial in trials]

  def _keep(self, key: str, record: dict[str, Any]) -> None:
    """Stores the result of a trial."""
    self._store.add(record)
    if processes.is_process_0():
      shutil.rmtree(self._work / key, ignore_errors=True)
      self._bar.write(_summary(record))
    self._bar.update()

  def _submit(self, trials: dict[str, Trial]) -> None:
    """Submits trials, which fail if a process was killed and so ended them all.

    Then results that are there already can still be stored.
    """
    for key, trial in trials.items():
      if key in self._futures:
        continue
      try:
        future = self._executor.submit(_train_with_log, trial, self._work)
      except concurrent.futures.BrokenExecutor as error:
        future = concurrent.futures.Future()
        future.set_exception(error)
      self._futures[key] = future

  def _train(
    self, trials: dict[str, Trial]
  ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields keys and records, as trials end in other processes."""
    self._submit(trials)
    keys = {self._futures[key]: key for key in trials}
    failed: dict[str, BaseException] = {}
    for future in concurrent.futures.as_completed(keys):
      error = future.exception()
      if error is None:
        yield keys[future], future.result()
      else:
        failed[keys[future]] = error
    if failed:
      key, error = next(iter(failed.items()))
      raise TrialsFailedError(
        f'{len(failed)} of {len(self._futures)} trials failed, the first with '
        f'{error!r}; its log is {self._work / key / "log.txt"}'
      ) from error

  def _train_here(
    self, trials: list[Trial]
  ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields keys and records of trials that are trained in this process."""
    for alike in together.group(trials, self._at_once):
      if len(alike) == 1:
        yield alike[0].key, train(alike[0], self._work)
      else:
        yield from ((x['key'], x) for x in together.train(alike))


def _train_with_log(trial: Trial, work: Path) -> dict[str, Any]:
  """Trains a trial with its output in a file."""
  folder = work / trial.key
  folder.mkdir(parents=True, exist_ok=True)
  with (
    (folder / 'log.txt').open('a') as log,
    contextlib.redirect_stdout(log),
    contextlib.redirect_stderr(log),
  ):
    return train(trial, work)


def _summary(record: dict[str, Any]) -> str:
  loss = 'diverged' if record['loss'] is None else f'{record["loss"]:.4f}'
  config = record['config']
  settings = ' '.join(f'{x} {config[x]}' for x in _SHOWN if x in config)
  return (
    f'{record["key"]}  {record["arm"] or record["optimizer"]:13} batch '
    f'{record["batch_size"]:5} learning rate {record["learning_rate"]:<8g} '
    f'seed {record["seed"]}  {loss}  {record["seconds"]:.0f} s  {settings}'
  )


def _start_workers(
  jobs: int, work: Path
) -> concurrent.futures.ProcessPoolExecutor:
  context = multiprocessing.get_context('spawn')
  cores: Any = context.Queue()
  usable = hardware.usable_cores()
  for i in range(jobs):
    cores.put(usable[i % len(usable)])
  return concurrent.futures.ProcessPoolExecutor(
    jobs, context, _start_worker, (cores, work)
  )


def _start_worker(cores: Any, work: Path) -> None:
  """Binds this process to a core, before jax starts its threads."""
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
