"""Writes the page and the picture of the comparison at a large batch.

python -m examples.study.analysis.large_batch
"""

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
import numpy as np
import tyro

from examples.study.large_batch import Losses, loss_of, plan, read
from examples.study.settings import PRESETS, Rule, Settings, Trial

_NAMES = {'merit': 'MERIT', 'muon': 'Muon', 'adamw': 'AdamW', 'lamb': 'LAMB'}
_COLORS = {
  'merit': '#d62728', 'muon': '#1f77b4', 'adamw': '#7f7f7f', 'lamb': '#2ca02c',
}  # fmt: skip
Records = dict[Trial, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Options:
  """Writes a page of tables and a picture from the trials."""

  results: Path = PRESETS['gpu'][1].results
  """File of the trials."""

  out: Path = Path('examples/study/LARGE_BATCH.md')
  """The page. The picture gets its name, in the folder figures beside it."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  options = tyro.cli(Options, args=args)
  lines = read(options.results)
  # A trial that was run again counts as it was run last.
  records = {Trial(**x['trial']): x for x in lines}
  if not records:
    raise FileNotFoundError(f'results: {options.results} holds no trial.')
  settings = _settings(lines)
  picture = options.out.parent / 'figures' / f'{options.out.stem.lower()}.png'
  picture.parent.mkdir(parents=True, exist_ok=True)
  _draw(settings, records, picture)
  options.out.write_text(_page(settings, records, lines, picture.name))
  print(f'wrote {options.out} and {picture}')


def _settings(lines: list[dict[str, Any]]) -> Settings:
  """Returns the settings that all trials share, and their two batches."""
  shared = [x['settings'] for x in lines]
  batches = sorted({x['trial']['batch_tokens'] for x in lines})
  if any(x != shared[0] for x in shared) or len(batches) > 2:
    raise ValueError(
      'results must hold trials of the same settings and of two batches at '
      'most; give each comparison a file of its own.'
    )
  fields = {k: v for k, v in shared[0].items() if k != 'data'}
  return Settings(
    **fields,
    rules=tuple(dict.fromkeys(x['trial']['rule'] for x in lines)),
    small_batch=batches[0],
    large_batch=batches[-1] if len(batches) > 1 else 0,
  )


def _large(settings: Settings, records: Records) -> Records:
  return {
    trial: x
    for trial, x in records.items()
    if trial.batch_tokens == settings.large_batch
  }


def _page(
  settings: Settings,
  records: Records,
  lines: list[dict[str, Any]],
  picture: str,
) -> str:
  """Returns the page."""
  some = next(iter(records.values()))
  width, layers = settings.width, settings.num_layers
  table = settings.vocab_size + settings.context_length
  parameters = 12 * layers * width**2 + table * width
  tokens = settings.steps * (settings.large_batch or settings.small_batch)
  large = _large(settings, records)
  return '\n'.join(
    [
      '# At a million tokens a step\n',
      'Written by `python -m examples.study.analysis.large_batch` from '
      '[the trials](data/large_batch.jsonl).\n',
      f'![Loss over tokens, attention logits, and learning rates of stage A]'
      f'(figures/{picture})\n',
      f'GPT-2 with {parameters / 1e6:.1f}M parameters ({layers} layers of '
      f'width {width}, context {settings.context_length}, '
      f'{settings.vocab_size:,} byte pairs, {settings.dtype} activations), '
      f'{settings.steps} steps of '
      f'{settings.large_batch:,} tokens: {tokens / 1e6:.0f}M tokens, '
      f'{tokens / parameters:.0f} a parameter, '
      f'{tokens / some["corpus_tokens"]:.1f} times the '
      f'{some["corpus_tokens"] / 1e6:.0f}M tokens of source text of Python '
      f'packages. Validation is on whole packages that were held out. '
      f'{_machines(records)}.\n',
      _PROTOCOL,
      *(_stage_b(settings, large) if large else ()),
      '## Stage A: learning rates at the small batch\n',
      f'Final validation loss after {settings.steps} steps of '
      f'{settings.small_batch:,} tokens; lowest in bold.\n',
      _table(_rows_of_rates(settings, records)),
      _notes(records, lines),
      '## Not run yet\n',
      _not_run(settings, records),
    ]
  )


_PROTOCOL = """\
Each rule updates hidden matrices only: MERIT with its clip and LAMB's l2 ratio,
for each matrix, with a decay of 0.01 inside the ratio; AdamW and Muon with a
decay of 0.1. All else takes the same Adam, at 0.004, without decay. Everywhere
b1 is 0.8 (Muon's momentum too), b2 0.95, eps 1e-6, the warm-up 30 %, then a
line to zero, and gradients are clipped to a global norm of 1. Initial weights
and batches of a seed are the same for all rules.

What this does not show:

- Only the learning rate was chosen, in factors of 2 by one seed, and stage B
  takes it from a smaller batch: a factor of 2 from the best costs up to 0.37 in
  stage A. Differences below 0.05 are not reported as differences; larger ones
  have no interval.
- Decay, warm-up, `b1` and Adam's rate were tuned for no rule.
- Queries, keys and values are one matrix for each rule.
- Validation is on other packages: its losses are 0.4 to 0.5 above those of the
  last batches.
"""


def _machines(records: Records) -> str:
  """Returns the devices and versions of jax that trials ran on."""
  found = {
    f'{x["device"]}, jax {x["versions"]["jax"]}' for x in records.values()
  }
  return '; '.join(sorted(found))


def _stage_b(settings: Settings, large: Records) -> list[str]:
  """Returns the parts of the page on the large batch."""
  return [
    '## Stage B: the large batch\n',
    _table(_rows_of_large(settings, large)),
    'Tokens to the highest final loss are interpolated between evaluations, '
    'which favours the rule that ended there: only its learning rate had come '
    'to zero. The attention logit is the largest of the first 64 held-out '
    'sequences.\n',
    '## Largest attention logit of each layer at the end\n',
    _table(_rows_of_logits(large)),
  ]


def _table(rows: list[dict[str, str]]) -> str:
  """Returns a table in Markdown."""
  lines = [rows[0].keys(), ['---'] * len(rows[0]), *(x.values() for x in rows)]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _rows_of_large(settings: Settings, large: Records) -> list[dict[str, str]]:
  ended = [x['loss'] for x in large.values() if x['loss'] is not None]
  target = max(ended, default=math.nan)
  rows = []
  for trial, x in sorted(large.items(), key=lambda item: loss_of(item[1])):
    tokens = _tokens_to(target, x) * settings.large_batch / 1e6
    logits = [max(y['max_logits']) for y in x['evaluations']]
    rows.append(
      {
        'hidden matrices': _NAMES[trial.rule],
        'learning rate': f'{x["rate"]:g}',
        'seed': str(trial.seed),
        'final loss': 'diverged' if x['loss'] is None else f'{x["loss"]:.3f}',
        f'million tokens to {target:.3f}': f'{tokens:.0f}',
        'largest logit, any time': f'{max(logits):.0f}',
        'at the end': f'{logits[-1]:.0f}',
      }
    )
  return rows


def _tokens_to(target: float, record: dict[str, Any]) -> float:
  """Returns the first step at which the evaluations reach a loss."""
  steps = [x['step'] for x in record['evaluations']]
  losses = [x['loss'] for x in record['evaluations']]
  first = next((i for i, x in enumerate(losses) if x <= target), None)
  if not first:
    return float('nan') if first is None else steps[0]
  near = slice(first - 1, first + 1)
  return float(np.interp(-target, -np.array(losses[near]), steps[near]))


def _rows_of_logits(large: Records) -> list[dict[str, str]]:
  rows = []
  for trial, x in large.items():
    logits = x['evaluations'][-1]['max_logits']
    cells = {f'layer {i}': f'{y:.0f}' for i, y in enumerate(logits, 1)}
    name = f'{_NAMES[trial.rule]} {x["rate"]:g}, seed {trial.seed}'
    rows.append({'': name, **cells})
  return rows


def _small(
  settings: Settings, records: Records
) -> dict[Rule, dict[int, dict[str, Any]]]:
  """Returns the trials of stage A by rule and power of two."""
  found: dict[Rule, dict[int, dict[str, Any]]] = {}
  for trial, x in records.items():
    if trial.batch_tokens == settings.small_batch and trial.seed == 0:
      found.setdefault(trial.rule, {})[trial.power] = x
  return {rule: dict(sorted(by.items())) for rule, by in found.items()}


def _rows_of_rates(
  settings: Settings, records: Records
) -> list[dict[str, str]]:
  found = _small(settings, records)
  powers = sorted({power for by in found.values() for power in by})
  rows = []
  for rule, by in found.items():
    best = min(by, key=lambda power: loss_of(by[power]))
    middle = Trial(rule, 0, 0, settings.small_batch)
    row = {'': _NAMES[rule], 'middle rate': f'{middle.rate(settings):g}'}
    for power in powers:
      text = f'{loss_of(by[power]):.3f}' if power in by else ''
      row[f'× {2.0**power:g}'] = f'**{text}**' if power == best else text
    rows.append(row)
  return rows


def _notes(records: Records, lines: list[dict[str, Any]]) -> str:
  """Returns the notes of trials, and losses of those that were run again."""
  counts = collections.Counter(
    x['note'] for x in records.values() if 'note' in x
  )
  again = [
    f'- {_name(trial, x)}: {x["loss"]:.3f} with it, '
    f'{records[trial]["loss"]:.3f} when run again without.'
    for x in lines
    if records[trial := Trial(**x['trial'])] is not x
  ]
  notes = [
    f'- {count} of the {len(records)} trials ran with {note}.'
    for note, count in counts.items()
  ]
  return '\n'.join(['## Notes\n', *notes, *again]) + '\n' if notes else ''


def _name(trial: Trial, record: dict[str, Any]) -> str:
  batch = f'{trial.batch_tokens:,} tokens a step'
  return f'{_NAMES[trial.rule]} {record["rate"]:g}, seed {trial.seed}, {batch}'


def _not_run(settings: Settings, records: Records) -> str:
  """Returns the trials of the plan that have no line."""
  losses: Losses = {trial: loss_of(x) for trial, x in records.items()}
  missing = []
  try:
    missing = [
      f'- {_name(x, {"rate": x.rate(settings)})}'
      for x in plan(settings, losses)
      if x not in losses
    ]
  except ValueError:  # Without stage A, the rates of stage B are not known.
    missing = ['- Stage A of some rules, and all that follows from it.']
  return '\n'.join(missing or ['Nothing.']) + '\n'


def _draw(settings: Settings, records: Records, path: Path) -> None:
  """Draws losses and attention logits over tokens, and losses over rates."""
  figure, (curves, logits, rates) = plt.subplots(
    1, 3, figsize=(12, 3.8), layout='constrained'
  )
  for trial, x in _large(settings, records).items():
    steps = np.array([y['step'] for y in x['evaluations']])
    tokens = steps * settings.large_batch / 1e6
    style = {'color': _COLORS[trial.rule], 'marker': 'o', 'ms': 3}
    label = f'{_NAMES[trial.rule]} {x["rate"]:g}'
    if trial.seed != 1:
      style |= {'linestyle': '--'}
      label += f', seed {trial.seed}'
    curves.plot(
      tokens, [y['loss'] for y in x['evaluations']], label=label, **style
    )
    logits.plot(
      tokens, [max(y['max_logits']) for y in x['evaluations']], **style
    )
  curves.set(
    title='Validation loss', xlabel='million tokens', ylabel='nats per token'
  )
  logits.set(
    title='Largest attention logit', xlabel='million tokens', ylim=(0, None)
  )
  for rule, by in _small(settings, records).items():
    rates.plot(
      [2.0**power for power in by],
      [loss_of(x) for x in by.values()],
      color=_COLORS[rule], marker='o', ms=3, label=_NAMES[rule],
    )  # fmt: skip
  rates.set(
    title=f'Stage A: {settings.small_batch:,} tokens a step',
    xlabel='learning rate over the middle one',
    ylabel='final loss',
    xscale='log',
  )  # fmt: skip
  rates.set_xticks([0.25, 0.5, 1, 2, 4], ['1/4', '1/2', '1', '2', '4'])
  rates.minorticks_off()
  for axes in (curves, rates):
    if axes.lines:
      axes.legend(frameon=False)
  for axes in (curves, logits, rates):
    axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == '__main__':
  main()
