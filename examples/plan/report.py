"""The tables of a plan."""

from typing import Any

from examples.gpt2.run.command import columns, format_bytes, table


def one(results: dict[str, Any]) -> str:
  """Returns the tables of one mesh."""
  memory, step, update = results['memory'], results['step'], results['update']
  tables = {
    f'Memory of a device: {"fits" if results["fits"] else "does NOT fit"}': [
      {'what': name, 'bytes': size, 'share': size / memory['available']}
      for name, size in memory.items()
    ],
    'Collectives of the step': [
      {'kind': kind} | total for kind, total in step['collectives'].items()
    ],
    'The largest': step['largest_collectives'],
    'ESTIMATED by a roofline': [
      {'of a device': name, 'step': _text(name, x), 'update': _text(name, y)}
      for (name, x), y in zip(step.items(), update.values(), strict=True)
      if not isinstance(x, dict | list)
    ],
  }
  names = (
    'model_flops', 'mfu', 'tokens_per_second', 'days', 'update_share',
    'update_bytes_per_parameter',
  )  # fmt: skip
  return '\n\n'.join(
    [
      table(_head(results)),
      *(f'{title}\n{_columns(rows)}' for title, rows in tables.items()),
      'If all overlap\n' + table(_cells({x: results[x] for x in names})),
    ]
  )


def sweep(results: dict[str, Any]) -> str:
  """Returns the ranking of all meshes."""
  left_out: dict[str, list[str]] = {}
  for mesh, reason in results['left_out'].items():
    left_out.setdefault(reason, []).append(mesh)
  return '\n'.join(
    [
      f'{_devices(results)}, {_compiler(results)}',
      _columns([_ranked(row) for row in results['rows']]),
      *(f'left out: {" ".join(x)}: {reason}' for reason, x in left_out.items()),
    ]
  )


def _devices(x: dict[str, Any]) -> str:
  return f'{x["devices"]} x {x["device_kind"]} ({x["topology"]})'


def _compiler(x: dict[str, Any]) -> str:
  effort = ' with the least effort' if x['quick'] else ''
  versions = x['versions']
  return f'libtpu {versions["libtpu"]}, jax {versions["jax"]}{effort}'


def _head(x: dict[str, Any]) -> dict[str, str]:
  return {
    'devices': f'{_devices(x)}, mesh {x["mesh"]}',
    'model': f'{x["preset"]}, {x["num_params"]:,} parameters, {x["dtype"]}, '
    f'remat {x["remat"]}, {x["optimizer"]}',
    'batch': f'{x["batch_size"]} sequences of {x["context_length"]} tokens on '
    f'{x["batch_shards"]} shards, --micro-batch-size {x["micro_batch_size"]}',
    'compiled': f'in {x["compile_seconds"]:.0f} s by {_compiler(x)}',
  }


def _ranked(x: dict[str, Any]) -> dict[str, Any]:
  return {
    'mesh': x['mesh'],
    'micro_batch': x['micro_batch_size'],
    'fits': 'yes' if x['fits'] else 'no',
    'needed_bytes': x['memory']['needed'],
    'estimated_seconds': x['step']['seconds'],
    'mfu': x['mfu'],
    'bound': x['step']['bound'],
    'tokens_per_second': x['tokens_per_second'],
  }


def _columns(rows: list[dict[str, Any]]) -> str:
  return columns([_cells(row) for row in rows]) if rows else 'none'


def _cells(row: dict[str, Any]) -> dict[str, str]:
  """Returns names and values as text, in the units that the names say."""
  return {k.replace('_', ' '): _text(k, v) for k, v in row.items()}


def _text(name: str, value: Any) -> str:
  if isinstance(value, str):
    return value.replace('_', ' ')
  if name == 'shapes':
    return ', '.join(map(str, value[:2])) + ', ...' * (len(value) > 2)
  if 'bytes' in name:
    return format_bytes(value)
  if 'seconds' in name:
    return f'{1e3 * value:.2f} ms' if value < 1 else f'{value:.3f} s'
  if 'share' in name or name == 'mfu':
    return f'{value:.2%}'
  return f'{value:,}' if isinstance(value, int) else f'{value:.3g}'
