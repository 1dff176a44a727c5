"""The tables of a plan."""

from typing import Any

from examples.gpt2.command import columns, format_bytes, table

_FLAGS = ('mesh', 'remat', 'micro_batch_size')


def one(results: dict[str, Any]) -> str:
  """Returns the tables of one mesh."""
  step, update = _scalars(results), results['update']
  tables = {
    'Memory of a device': [
      {'what': name, 'bytes': size, 'share': size / results['available_bytes']}
      for name, size in results['memory'].items()
    ],
    'Collectives of the step': [
      {'kind': kind} | x for kind, x in results['collectives'].items()
    ],
    'The largest': results['largest_collectives'],
    'Of a device, ESTIMATED by a roofline': [
      {'what': k, 'step': _text(k, v), 'update': _text(k, update[k])}
      for k, v in step.items()
      if k in update
    ],
  }
  texts = [f'{title}\n{_columns(rows)}' for title, rows in tables.items()]
  rest = {name: x for name, x in step.items() if name not in update}
  return '\n\n'.join([table(_cells(rest)), *texts])


def sweep(results: dict[str, Any]) -> str:
  """Returns the ranking of all ways, and the flags of the best."""
  names = (
    *_FLAGS, 'fits', 'needed_bytes', 'seconds_without_overlap', 'seconds',
    'mfu', 'bound', 'tokens_per_second',
  )  # fmt: skip
  rows = [{name: row[name] for name in names} for row in results['rows']]
  left_out = results['left_out'].items()
  return '\n'.join(
    [
      table(_cells(_scalars(results))),
      _columns(rows),
      *(f'left out: {reason} ({", ".join(x)})' for reason, x in left_out),
      _advice(results['rows']),
    ]
  )


def _advice(rows: list[dict[str, Any]]) -> str:
  if not rows:
    return 'None fits, for the reasons above.'
  if not rows[0]['fits']:
    return 'None fits: try more devices, or a smaller model.'
  return f'flags of the first: {_flags(rows[0])}'


def _flags(row: dict[str, Any]) -> str:
  return ' '.join(f'--{name.replace("_", "-")} {row[name]}' for name in _FLAGS)


def _scalars(results: dict[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in results.items() if not isinstance(v, dict | list)}


def _columns(rows: list[dict[str, Any]]) -> str:
  return columns([_cells(row) for row in rows]) if rows else 'none'


def _cells(row: dict[str, Any]) -> dict[str, str]:
  """Returns names and values as text, in the units that the names say."""
  return {k.replace('_', ' '): _text(k, v) for k, v in row.items()}


def _text(name: str, value: Any) -> str:
  if isinstance(value, str | bool):
    return str(value).replace('_', ' ')
  if name == 'shapes':
    shown = ' '.join(map(str, value[:2]))
    return f'{shown} ...' if len(value) > 2 else shown
  if 'bytes' in name:
    return format_bytes(value)
  if 'seconds' in name:
    return f'{1e3 * value:.2f} ms' if value < 1 else f'{value:.3f} s'
  if 'share' in name or name == 'mfu':
    return f'{value:.2%}'
  return f'{value:,}' if isinstance(value, int) else f'{value:.3g}'
