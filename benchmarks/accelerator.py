"""Tests and benchmarks for a machine with an accelerator, in parts.

python -m benchmarks.accelerator --help
"""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any, Literal, get_args

import tqdm
import tyro

from examples.gpt2.command import UsageError, columns, exit_on_error
from examples.gpt2.storage import write_whole

Part = Literal[
  'trajectories', 'optax-suite', 'library', 'resume',
  'update-small', 'update-medium', 'update-large', 'update-xl',
  'train-small', 'train-medium',
]  # fmt: skip
# Tests of meshes take eight devices.
_SEVERAL_DEVICES = (
  '--ignore=tests/merit_optax/mesh_test.py',
  '--ignore=tests/merit_optax/whole_matrices_test.py',
)
# A run that is killed, slow tests included, on one device.
_ON_ONE = (
  '-m', 'slow or not slow',
  '-k', 'goes_on_from_its or signal_saves or any_moment',
)  # fmt: skip
# Seconds from the request to end until a part is killed.
_GRACE = 30


@dataclasses.dataclass(frozen=True)
class Settings:
  """Runs tests and benchmarks on an accelerator, part by part.

  Parts that are done are not repeated, and the others start again: call it
  until all are done. Results, logs and a table are in the folder of results.
  """

  parts: tuple[Part, ...] = get_args(Part)
  """Parts to run, in this order."""

  limit: float = 540.0
  """Seconds that a part may take in a call."""

  dry_run: bool = False
  """Whether to try all parts in the smallest sizes, wherever this runs."""

  out: Path = Path('benchmarks/results/accelerator')
  """Folder of the results."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog='benchmarks.accelerator')
  with exit_on_error():
    machine = _machine()
    if machine['backend'] == 'cpu' and not settings.dry_run:
      raise UsageError(
        'jax finds no accelerator here. With --dry-run, the parts run in '
        'their smallest sizes.'
      )
    # An exception, so that no part outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    settings.out.mkdir(parents=True, exist_ok=True)
    for part in tqdm.tqdm(settings.parts, 'parts', leave=False):
      if not _is_done(settings, part):
        _run(settings, part, machine)
    _report(settings)


def _machine() -> dict[str, Any]:
  """Returns the machine as another process sees it.

  This one must not start jax, which would take most memory of a GPU.
  """
  code = (
    'import json; from benchmarks.rounds import machine; '
    'print(json.dumps(machine()))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise UsageError(f'jax does not start here:\n{done.stderr[-2000:]}')
  return json.loads(done.stdout.splitlines()[-1])


def command(settings: Settings, part: Part) -> list[str]:
  """Returns the arguments of Python for a part."""
  kind, _, size = part.partition('-')
  out = str(_figures(settings, part))
  is_dry = settings.dry_run
  commands: dict[str, Callable[[], list[str]]] = {
    'trajectories': lambda: _pytest('merit_optax/trajectories_test.py'),
    'optax': lambda: _pytest('conformance/optax_suite_test.py', '-n', '4'),
    'library': lambda: _pytest('merit_optax', '-n', '8', *_SEVERAL_DEVICES),
    'resume': lambda: _pytest('gpt2/loop_test.py', *_ON_ONE),
    'update': lambda: _update(size, is_dry) + ['--out', out],
    'train': lambda: _train(size, is_dry) + ['--out', out],
  }
  return ['-m', *commands[kind]()]


def _pytest(path: str, *flags: str) -> list[str]:
  return ['pytest', '-q', '-p', 'no:cacheprovider', f'tests/{path}', *flags]


def _update(preset: str, is_dry: bool) -> list[str]:
  sizes = (
    ['--presets', 'demo', '--num-layers', '1', '--rounds', '2']
    if is_dry
    else ['--presets', preset, '--steps', '10']
  )
  return [
    'benchmarks.optimizer_step', '--layers', 'stacked',
    '--optimizers', 'adamw', 'lamb', 'merit', 'adam-hyperball', 'muon',
    'muon-hyperball', 'muon-hyperball-bfloat16', *sizes,
  ]  # fmt: skip


def _train(preset: str, is_dry: bool) -> list[str]:
  sizes = (
    ['--batch-size', '8', '--rounds', '1', '--steps', '1']
    if is_dry
    # PyTorch takes the same micro-batches.
    else [preset, '--batch-size', '128', '--dtype', 'bfloat16']
    + ['--micro-batch-size', '16', '--steps', '2', '--rounds', '5']
  )
  # More of the larger model is neither compiled in time nor fits in 80 GB.
  candidates = {
    'small': ['adamw', 'merit', 'muon-hyperball'],
    'medium': ['adamw', 'muon-hyperball', '--no-peer'],
  }[preset]
  return ['benchmarks.train_step', *sizes, '--optimizers', *candidates]


def _run(settings: Settings, part: Part, machine: dict[str, Any]) -> None:
  """Runs a part until it ends or its time is over, and notes how it went."""
  args = command(settings, part)
  start = time.monotonic()
  with (settings.out / f'{part}.log').open('a') as log:
    # In a group of its own, so that its own processes end with it.
    process = subprocess.Popen(
      [sys.executable, *args],
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      # A GPU's memory is shared with other workers and with PyTorch. Processes
      # that tests start are on a CPU by default.
      env={'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'JAX_PLATFORMS': ''}
      | os.environ,
    )
    status = _wait(process, settings.limit)
  result = {
    'part': part,
    'status': status,
    'seconds': round(time.monotonic() - start, 1),
    'command': ' '.join(['python', *args]),
    'dry_run': settings.dry_run,
    'machine': machine,
  }
  text = json.dumps(result, indent=2) + '\n'
  write_whole(settings.out / f'{part}.json', text.encode())


def _wait(process: subprocess.Popen[bytes], limit: float) -> str:
  """Returns how a process ended; it is stopped at the limit."""
  try:
    return 'failed' if process.wait(limit) else 'done'
  except subprocess.TimeoutExpired:
    return 'not finished'
  finally:
    _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
  """Ends a process, which may save what it has, and all that it started."""
  for number in (signal.SIGTERM, signal.SIGKILL):
    # There is none if all of its group have ended.
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
      os.killpg(process.pid, number)
      process.wait(_GRACE)


def _read(settings: Settings, part: Part) -> dict[str, Any]:
  path = settings.out / f'{part}.json'
  return json.loads(path.read_text()) if path.exists() else {}


def _is_done(settings: Settings, part: Part) -> bool:
  result = _read(settings, part)
  if result and result['dry_run'] != settings.dry_run:
    raise UsageError(
      f'--out {settings.out} holds the results of a '
      f'{"dry" if result["dry_run"] else "real"} run: give another folder.'
    )
  return result.get('status') == 'done'


def _figures(settings: Settings, part: Part) -> Path:
  return settings.out / 'figures' / f'{part}.json'


def _report(settings: Settings) -> None:
  """Prints how all parts went and what they measured, and writes it."""
  rows = [
    {
      'part': part,
      'status': result['status'],
      'seconds': f'{result["seconds"]:.0f}',
      'figures': _headline(_figures(settings, part)),
    }
    for part in get_args(Part)
    if (result := _read(settings, part))
  ]
  text = columns(rows)
  write_whole(settings.out / 'table.txt', f'{text}\n'.encode())
  print(text)
  for row in rows:
    if row['status'] == 'failed':
      print(f'{row["part"]}: see {settings.out / row["part"]}.log')


def _headline(path: Path) -> str:
  """Returns the main numbers of a benchmark in a line."""
  if not path.exists():
    return ''
  rows = json.loads(path.read_text())['rows']
  if 'time_ratio' in rows[0]:
    return ', '.join(f'{x["optimizer"]} {x["time_ratio"]:.2f} x' for x in rows)
  return ', '.join(
    f'{x["name"].removeprefix("merit_optax trainer, ")} '
    f'{1e3 * x["seconds_per_step"]:.0f} ms'
    + (f' MFU {x["mfu"]:.0%}' if x.get('mfu') else '')
    for x in rows
  )


if __name__ == '__main__':
  main()
