"""The tables of a plan."""

from collections import Counter
import re
from typing import Any

from examples.gpt2.run.command import columns, table


def one(results: dict[str, Any]) -> str:
  """Returns the tables of one mesh."""
  return '\n\n'.join(
    (
      table(_head(results)),
      f'Memory of a device ({_verdict(results["memory"])})\n'
      + columns(_memory(results['memory'])),
      f'Collectives of a step\n{_collectives(results["collectives"])}',
      f'The largest\n{_largest(results["largest_collectives"])}',
      f'A step, ESTIMATED by a roofline\n{table(_estimate(results))}',
      f'The optimizer update alone\n{table(_update(results["update"]))}',
    )
  )


def sweep(results: dict[str, Any]) -> str:
  """Returns the ranking of all meshes."""
  rows = results['rows']
  parts = [
    f'{results["devices"]} x {results["device_kind"]} ({results["topology"]})'
    + ', compiled with the least effort' * results['quick'],
    columns([_ranked(row) for row in rows]) if rows else 'No mesh fits.',
  ]
  reasons = Counter(re.sub(r'of --mesh ', '', x) for x in _reasons(results))
  parts.extend(f'left out, {n} x: {reason}' for reason, n in reasons.items())
  parts.extend(
    f'{row["mesh"]}: {row["error"]}'
    for row in rows
    if 'error' in row and not _is_too_big(row)
  )
  return '\n'.join(parts)


def _reasons(results: dict[str, Any]) -> list[str]:
  return list(results['left_out'].values())


def _head(results: dict[str, Any]) -> dict[str, str]:
  micro = results['micro_batch_size']
  versions = results['versions']
  effort = ', with the least effort' if results['quick'] else ''
  return {
    'devices': f'{results["devices"]} x {results["device_kind"]} '
    f'({results["topology"]}), mesh {results["mesh"]}',
    'model': f'{results["preset"]}, {results["num_params"]:,} parameters, '
    f'{results["dtype"]}, remat {results["remat"]}, {results["optimizer"]}',
    'batch': f'{results["batch_size"]} sequences of '
    f'{results["context_length"]} tokens in '
    f'{results["batch_size"] // micro} micro-batches of {micro} '
    f'({micro // results["batch_shards"]} a shard)',
    'compiled': f'in {results["compile_seconds"]:.0f} s by libtpu '
    f'{versions["libtpu"]}, jax {versions["jax"]}{effort}',
  }


def _verdict(memory: dict[str, Any]) -> str:
  spare = memory['available'] - memory['needed']
  if memory['fits']:
    return f'fits, {_gib(spare)} to spare'
  return f'does NOT fit, {_gib(-spare)} too much'


def _memory(memory: dict[str, Any]) -> list[dict[str, str]]:
  names = {
    'parameters': 'parameters',
    'optimizer_state': 'optimizer state',
    'batch': 'batch',
    'temporaries': 'temporaries: activations, gradients, buffers',
    'program': 'program',
    'padding': 'padding',
    'needed': 'needed',
    'available': 'available to a program',
  }
  return [
    {
      'what': text,
      'size': _gib(memory[name]),
      'share': f'{memory[name] / memory["available"]:.1%}',
    }
    for name, text in names.items()
  ]


def _collectives(collectives: dict[str, Any]) -> str:
  if not collectives:
    return 'none'
  return columns(
    [
      {
        'kind': kind,
        'executed': f'{x["executions"]:,.0f}',
        'sent by a device': _gb(x['bytes']),
      }
      for kind, x in collectives.items()
    ]
  )


def _largest(collectives: list[dict[str, Any]]) -> str:
  if not collectives:
    return 'none'
  return columns(
    [
      {
        'kind': x['kind'],
        'array': ', '.join(map(str, map(list, x['arrays'][:2])))
        + ', ...' * (len(x['arrays']) > 2),
        'executed': f'{x["executions"]:,}',
        'devices': str(len(x['groups'][0])) if x['groups'] else '2',
        'sent by a device': _gb(x['sent_bytes']),
      }
      for x in collectives
    ]
  )


def _estimate(results: dict[str, Any]) -> dict[str, str]:
  times = results['estimate']
  flops = results['executed_flops_per_device']
  return {
    'model FLOPs': f'{results["model_flops"]:.3g} (6 per weight of a matrix '
    'product and token, and attention)',
    'compute': f'{_seconds(times["compute"])}, {flops:.3g} FLOPs of a device, '
    'recomputed ones too',
    'memory': f'{_seconds(times["memory"])}, '
    f'{_gb(results["hbm_bytes_per_device"])} of a device',
    'network': f'{_seconds(times["network"])}, '
    f'{_gb(results["bytes_sent_per_device"])} sent by a device',
    'step': f'{_seconds(times["seconds"])} if all overlap (bound by '
    f'{times["bound"]}), {_seconds(times["seconds_without_overlap"])} if '
    'nothing does',
    'MFU': f'{times["mfu"]:.1%} if all overlap',
    'tokens/s': f'{times["tokens_per_second"]:,.0f}',
    'run': f'{times["days"]:.2f} days for {results["steps"]:,} steps',
  }


def _update(update: dict[str, Any]) -> dict[str, str]:
  kinds = update['collectives']
  return {
    'memory': f'{_gb(update["hbm_bytes_per_device"])} moved by a device, '
    f'{update["hbm_bytes_per_parameter"]:.1f} bytes a parameter',
    'network': f'{_gb(update["bytes_sent_per_device"])} sent by a '
    f'device, {", ".join(kinds) or "nothing"}',
    'time': f'{_seconds(update["estimate"]["seconds"])} ESTIMATED, '
    f'{100 * update["share_of_step"]:.2g} % of the step',
  }


def _ranked(row: dict[str, Any]) -> dict[str, str]:
  cells = {'mesh': row['mesh'], 'micro-batch': str(row['micro_batch_size'])}
  if 'error' in row:
    figures = re.findall(r'[\d.]+[KMGT]\b', row['error'])
    reason = f'no, {" of ".join(figures[:2])}' if _is_too_big(row) else 'failed'
    others = ('needed', 'estimated s', 'MFU', 'bound', 'tokens/s')
    return cells | {'fits': reason} | dict.fromkeys(others, '')
  return cells | {
    'fits': 'yes' if row['fits'] else 'no',
    'needed': _gib(row['needed']),
    'estimated s': f'{row["seconds"]:.3f}',
    'MFU': f'{row["mfu"]:.1%}',
    'bound': row['bound'],
    'tokens/s': f'{row["tokens_per_second"]:,.0f}',
  }


def _is_too_big(row: dict[str, Any]) -> bool:
  return 'RESOURCE_EXHAUSTED' in row['error']


def _gib(size: float) -> str:
  if size < 2**30:
    return f'{size / 2**20:.1f} MiB'
  return f'{size / 2**30:.2f} GiB'


def _gb(size: float) -> str:
  if size < 1e9:
    return f'{size / 1e6:.2f} MB'
  return f'{size / 1e9:,.2f} GB'


def _seconds(seconds: float) -> str:
  if seconds < 1:
    return f'{1e3 * seconds:.2f} ms'
  return f'{seconds:.3f} s'
