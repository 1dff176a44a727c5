"""Writes a page and a picture from the trials of ``large_batch``.

python -m examples.study.analysis.large_batch
"""

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from examples.study.analysis.large_batch_figures import draw_runs
from examples.study.analysis.runs import (
  Group,
  Run,
  best_at_largest_batch,
  by_power,
  mean_loss,
  read_runs,
  seeds_of_each,
)
from examples.study.large_batch import loss_of, read
from examples.study.settings import PRESETS, Trial


@dataclasses.dataclass(frozen=True)
class Options:
  """Writes a page of tables, and a picture, from the trials."""

  results: Path = PRESETS['gpu'][1].results
  """File of the trials."""

  page: Path = Path('examples/study/LARGE_BATCH.md')
  """The page. The picture gets its name, in the folder figures beside it."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  options = tyro.cli(Options, args=args)
  lines = read(options.results)
  if not lines:
    raise FileNotFoundError(f'results: {options.results} holds no trial.')
  runs = read_runs(lines)
  picture = options.page.parent / f'figures/{options.page.stem.lower()}.png'
  picture.parent.mkdir(parents=True, exist_ok=True)
  draw_runs(runs).savefig(picture, dpi=120)
  options.page.write_text(_page(runs, lines, options.results, picture.name))
  print(f'wrote {options.page} and {picture}')


def _page(
  runs: list[Run],
  lines: list[dict[str, Any]],
  results: Path,
  picture: str,
) -> str:
  """Returns the page."""
  largest = max(run.trial.batch_tokens for run in runs)
  return '\n'.join(
    [
      f'# At {largest:,} tokens a step\n',
      'Written by `python -m examples.study.analysis.large_batch` from '
      f'{results.name}.\n',
      f'![Loss over tokens, attention logits, and learning rates]'
      f'(figures/{picture})\n',
      _description(runs[0], largest),
      _PROTOCOL,
      _after_training(runs),
      *(_chosen(runs) if seeds_of_each(runs) else ()),
      '## Choice of learning rates\n',
      'Final loss of seed 0 at multiples of the middle rate; lowest in bold.\n',
      _table(_rows_of_rates(runs)),
      _notes(runs, lines),
    ]
  )


_PROTOCOL = """\
Each rule updates hidden matrices only: MERIT and LAMB with a decay of 0.01
inside the ratio of each matrix, AdamW and Muon with a decay of 0.1. All else
takes the same Adam, at 0.004, without decay. Everywhere b1 is 0.8 (Muon's
momentum too), b2 0.95, eps 1e-6, the warm-up 30 %, then a line to zero, and
gradients are clipped to a global norm of 1. Initial weights and batches of a
seed are the same for all rules.

What this does not show:

- Only the learning rate was chosen, in factors of 2 by one seed. Decay,
  warm-up, `b1` and Adam's rate were tuned for no rule.
- Queries, keys and values are one matrix for each rule.
- Losses repeat to about 0.003 only, from one CPU to another. A difference of
  one seed has no interval: we report none below 0.05.\
"""


def _description(run: Run, largest: int) -> str:
  """Returns what was trained, by the first line of the results."""
  x = run.record['settings']
  width, layers, steps = x['width'], x['num_layers'], x['steps']
  table = x['vocab_size'] + x['context_length']
  parameters = 12 * layers * width**2 + table * width
  tokens = x['tokens'] or steps * largest
  corpus = run.record['corpus_tokens']
  return (
    f'{"Llama" if x["llama"] else "GPT-2"} with {parameters / 1e6:.3g}M '
    f'parameters ({layers} layers of width {width}, context '
    f'{x["context_length"]}, a vocabulary of {x["vocab_size"]:,}, '
    f'{x["dtype"]} activations). At {largest:,} tokens a step it sees '
    f'{tokens / 1e6:.3g} million tokens in {tokens // largest:,} steps, '
    f'{tokens / parameters:.0f} a parameter and {tokens / corpus:.1f} times '
    f'the corpus. {run.record["device"]}, jax {run.record["versions"]["jax"]}.'
    '\n'
  )


def _after_training(runs: list[Run]) -> str:
  """Returns how far validation losses are above those of training."""
  gaps = [
    run.loss - np.mean(run.record['train_losses'][-10:])
    for run in runs
    if run.trial.seed and np.isfinite(run.loss)
  ]
  if not gaps:
    return ''
  return (
    f'- Validation losses are {min(gaps):.2f} to {max(gaps):.2f} above those '
    'of the last ten batches.\n'
  )


def _chosen(runs: list[Run]) -> list[str]:
  """Returns the parts of the page on the trials with the chosen rates."""
  groups = best_at_largest_batch(runs)
  steps = groups[0][0].steps[-1]
  return [
    '## Losses\n',
    _table(_rows_of_losses(runs)),
    'Means of seeds. Differences are taken seed by seed, with their standard '
    'deviation. Tokens to a loss are interpolated between evaluations, which '
    'favours a rule that ended there: only its learning rate had come to '
    'zero. The attention logit is the largest of the first 64 held-out '
    'sequences.\n',
    '## Largest attention logit of each layer\n',
    f'After step {steps}, at the best rate; the largest of all seeds.\n',
    _table(
      [
        {'': f'`{group[0].label}`'}
        | {
          f'layer {i}': f'{x:.0f}'
          for i, x in enumerate(
            np.max([run.logits_EL[-1] for run in group], axis=0), 1
          )
        }
        for group in groups
      ]
    ),
  ]


def _table(rows: list[dict[str, str]]) -> str:
  """Returns a table in Markdown."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  cells = [[row.get(name, '') for name in names] for row in rows]
  lines = [names, ['---'] * len(names), *cells]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _rows_of_losses(runs: list[Run]) -> list[dict[str, str]]:
  """Returns a row for each rule, batch and learning rate."""
  groups = seeds_of_each(runs)
  first = groups[0][0].label
  rows = []
  for batch in sorted({x[0].trial.batch_tokens for x in groups}):
    here = [x for x in groups if x[0].trial.batch_tokens == batch]
    target = max(
      (run.loss for x in here for run in x if np.isfinite(run.loss)),
      default=math.nan,
    )
    base = min(
      (x for x in here if x[0].label == first), key=mean_loss, default=[]
    )
    for group in sorted(here, key=mean_loss):
      tokens = np.mean([_steps_to(target, x) for x in group]) * batch / 1e6
      rows.append(
        {
          'hidden matrices': f'`{group[0].label}`',
          'tokens a step': f'{batch:,}',
          'learning rate': f'{group[0].record["rate"]:g}',
          'seeds': f'{len(group)}',
          'final loss': _format(mean_loss(group)),
          f'minus `{first}`': '' if group is base else _difference(group, base),
          'million tokens to the highest': f'{tokens:.3g}',
          'largest logit': f'{max(x.logits_EL.max() for x in group):.0f}',
          'at the end': f'{max(x.logits_EL[-1].max() for x in group):.0f}',
        }
      )
  return rows


def _format(loss: float) -> str:
  return f'{loss:.3f}' if np.isfinite(loss) else 'diverged'


def _difference(group: Group, base: Group) -> str:
  """Returns the mean difference of seeds, and its standard deviation."""
  losses = {run.trial.seed: run.loss for run in base}
  found = [
    run.loss - losses[run.trial.seed]
    for run in group
    if run.trial.seed in losses
  ]
  if not found or not np.isfinite(found).all():
    return ''
  spread = f' ± {np.std(found, ddof=1):.3f}' if len(found) > 1 else ''
  return f'{np.mean(found):+.3f}{spread}'


def _steps_to(target: float, run: Run) -> float:
  """Returns the first step at which the evaluations reach a loss."""
  first = next((i for i, x in enumerate(run.losses) if x <= target), None)
  if not first:
    return math.nan if first is None else run.steps[0]
  near = slice(first - 1, first + 1)
  return float(np.interp(-target, -np.array(run.losses[near]), run.steps[near]))


def _rows_of_rates(runs: list[Run]) -> list[dict[str, str]]:
  found = by_power(runs)
  powers = sorted({power for by in found.values() for power in by})
  rows = []
  for (label, batch), by in found.items():
    best = min(by.values(), key=lambda run: run.loss)
    row = {
      '': f'`{label}`',
      'tokens a step': f'{batch:,}',
      'best rate': f'{best.record["rate"]:g}',
    }
    for power in powers:
      text = _format(by[power].loss) if power in by else ''
      is_best = power in by and by[power] is best
      row[f'× {2.0**power:g}'] = f'**{text}**' if is_best else text
    rows.append(row)
  return rows


def _notes(runs: list[Run], lines: list[dict[str, Any]]) -> str:
  """Returns what is missing, notes, and losses of trials that ran again."""
  counts = collections.Counter(
    run.record['note'] for run in runs if 'note' in run.record
  )
  notes = [
    f'- {count} of the {len(runs)} trials ran with {note}.'
    for note, count in counts.items()
  ]
  done = {group[0].label for group in seeds_of_each(runs)}
  for label in dict.fromkeys(run.label for run in runs):
    if label not in done:
      notes.append(f'- `{label}` has not run with the chosen rate.')
  last = {(run.trial, str(run.record['settings'])): run for run in runs}
  for x in lines:
    run = last[Trial(**x['trial']), str(x['settings'])]
    if run.record is not x:
      notes.append(
        f'- `{run.label}` {x["rate"]:g}, seed {run.trial.seed}, '
        f'{run.trial.batch_tokens:,} tokens a step: {_format(loss_of(x))} with '
        f'it, {_format(run.loss)} when run again without.'
      )
  return '\n'.join(['## Notes\n', *notes]) + '\n' if notes else ''


if __name__ == '__main__':
  main()
