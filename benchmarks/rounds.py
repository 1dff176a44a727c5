"""Interleaved timing: what disturbs the machine disturbs all candidates."""

from collections.abc import Callable
import dataclasses
import datetime
import json
import os
from pathlib import Path
import platform
import random
import statistics
import subprocess
import time
from typing import Any

import jax
import tqdm

from examples.gpt2 import hardware
from examples.gpt2.storage import write_whole


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of a candidate, by round."""

  seconds: tuple[float, ...]

  @property
  def median(self) -> float:
    """Median over rounds, seconds."""
    return statistics.median(self.seconds)

  @property
  def spread(self) -> float:
    """Half the range between the quartiles, relative to the median."""
    if len(self.seconds) < 2:
      return 0.0
    first, _, third = statistics.quantiles(self.seconds, n=4)
    return (third - first) / 2 / self.median


def race(
  candidates: dict[str, Callable[[], None]], rounds: int
) -> dict[str, Timing]:
  """Times candidates in turns.

  Args:
    candidates: By name, functions that do a piece of work and wait for its end.
      Each is called once before the first round.
    rounds: How often to time each.

  Returns:
    The timings, by name.
  """
  seconds: dict[str, list[float]] = {name: [] for name in candidates}
  for name in tqdm.tqdm(candidates, 'compiling', leave=False):
    candidates[name]()
  for number in tqdm.trange(rounds, desc='rounds', leave=False):
    names = list(candidates)
    # Nobody always runs after the same neighbour.
    random.Random(number).shuffle(names)
    for name in names:
      start = time.perf_counter()
      candidates[name]()
      seconds[name].append(time.perf_counter() - start)
  return {name: Timing(tuple(x)) for name, x in seconds.items()}


def ratio(timings: dict[str, Timing], name: str, base: str) -> float:
  """Returns the median over rounds of one's seconds over another's."""
  pairs = zip(timings[name].seconds, timings[base].seconds, strict=True)
  return statistics.median(a / b for a, b in pairs)


def free_memory() -> float:
  """Returns the bytes that are free: of the first device, or of the machine."""
  stats = jax.devices()[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    return float(stats['bytes_limit'] - stats['bytes_in_use'])
  lines = Path('/proc/meminfo').read_text().splitlines()
  sizes = {x.split(':')[0]: float(x.split()[1]) for x in lines}
  return sizes['MemAvailable'] * 1024


def machine() -> dict[str, Any]:
  """Returns what the figures were measured on, as JSON values."""
  return hardware.versions() | {
    'processor': _processor(),
    'threads': len(os.sched_getaffinity(0))
    if hasattr(os, 'sched_getaffinity')
    else os.cpu_count(),
    'backend': jax.default_backend(),
  }


def _processor() -> str:
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    return next(x.split(':')[1].strip() for x in lines if 'model name' in x)
  except (OSError, StopIteration, IndexError):
    return platform.processor()


def write_json(path: Path, results: dict[str, Any]) -> None:
  """Writes results, with date, machine, versions and commit beside them."""
  commit = subprocess.run(
    ['git', 'rev-parse', '--short', 'HEAD'],
    capture_output=True,
    text=True,
    check=False,
  ).stdout.strip()
  content = results | {
    'date': datetime.date.today().isoformat(),
    'machine': machine(),
    'commit': commit,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(content, indent=2, default=os.fspath) + '\n'
  write_whole(path, text.encode())
