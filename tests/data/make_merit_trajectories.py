"""Makes the trajectories of MERIT's authors, which `merit` has to follow.

Gradients and first parameters are those of the file that is there; the authors'
optimizer computes the parameters of all later steps, in float32 on a CPU. To
run it (needs torch, and a clone of https://github.com/NUS-HPC-AI-Lab/MERIT, of
which commit f3d9f36 was used):

  python tests/data/make_merit_trajectories.py CLONE trajectories.npz
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

_DATA = Path(__file__).parent


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('clone', type=Path)
  parser.add_argument('out', type=Path)
  args = parser.parse_args()
  spec = importlib.util.spec_from_file_location(
    'merit', args.clone / 'optim' / 'merit.py'
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  scenarios = json.loads((_DATA / 'merit_trajectories.json').read_text())
  arrays, worst = {}, 0.0
  with np.load(_DATA / 'merit_trajectories.npz') as known:
    for scenario, settings in scenarios.items():
      prefixes = [f'{scenario}/{name}' for name in settings['parameters']]
      gradients = {x: known[f'{x}/gradients'] for x in prefixes}
      first = {x: known[f'{x}/parameters'][0] for x in prefixes}
      found = trajectory(module.MERIT, first, gradients, settings)
      for x in prefixes:
        arrays |= {f'{x}/gradients': gradients[x], f'{x}/parameters': found[x]}
        change = np.abs(found[x] - known[f'{x}/parameters']).max(initial=0)
        worst = max(worst, float(change))
  np.savez_compressed(args.out, **arrays)
  print(f'wrote {args.out}; no number changed by more than {worst:.1g}')


def trajectory(
  optimizer_class: Any,
  first: dict[str, np.ndarray],
  gradients: dict[str, np.ndarray],
  settings: dict[str, Any],
) -> dict[str, np.ndarray]:
  """Returns the parameters before the first step, and after each step."""
  rates = settings['learning_rate']
  if not isinstance(rates, list):
    rates = [rates] * settings['steps']
  params = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in first.items()}
  optimizer = optimizer_class(
    params.values(),
    betas=(settings['b1'], settings['b2']),
    eps=settings['eps'],
    weight_decay=settings['weight_decay'],
  )
  found = {k: [x] for k, x in first.items()}
  for step, rate in enumerate(rates):
    optimizer.param_groups[0]['lr'] = rate
    for name, param in params.items():
      param.grad = torch.tensor(gradients[name][step])
    optimizer.step()
    for name, param in params.items():
      found[name].append(param.detach().numpy().copy())
  return {k: np.stack(x) for k, x in found.items()}


if __name__ == '__main__':
  main()
