"""The picture of a run: losses and attention logits."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402


def plot_curves(
  path: Path, metrics: list[dict[str, Any]], title: str, unigram_entropy: float
) -> None:
  """Draws losses and, by layer, the largest attention logits.

  Args:
    path: Where to write the picture.
    metrics: Lines of metrics.jsonl.
    title: Title of the picture.
    unigram_entropy: Entropy of the token frequencies, nats a token.
  """
  figure, (losses, logits) = plt.subplots(1, 2, figsize=(11, 4))
  figure.suptitle(title)
  _plot_losses(losses, metrics, unigram_entropy)
  _plot_logits(logits, metrics)
  for axes in (losses, logits):
    axes.set_xlabel('step')
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _plot_losses(
  axes: plt.Axes, metrics: list[dict[str, Any]], unigram_entropy: float
) -> None:
  steps = [m['step'] for m in metrics]
  evaluations = [m for m in metrics if 'val_loss' in m]
  axes.plot(steps, [m['train_loss'] for m in metrics], lw=0.7, label='train')
  axes.plot(
    [m['step'] for m in evaluations],
    [m['val_loss'] for m in evaluations],
    marker='o',
    markersize=3,
    label='validation',
  )
  axes.axhline(unigram_entropy, color='gray', ls='--', label='unigram entropy')
  axes.set_ylabel('loss (nats per token)')


def _plot_logits(axes: plt.Axes, metrics: list[dict[str, Any]]) -> None:
  evaluations = [m for m in metrics if 'val_loss' in m]
  layers = range(len(evaluations[0]['max_attention_logit']))
  for layer in layers:
    axes.plot(
      [m['step'] for m in evaluations],
      [m['max_attention_logit'][layer] for m in evaluations],
      color=plt.cm.viridis(layer / len(layers)),
      marker='o',
      markersize=3,
      label=f'layer {layer + 1}',
    )
  axes.set_yscale('log')
  axes.set_ylabel('max attention logit')
