"""The experiments: what each one trains, and its tables.

An experiment is a module with ``TITLE`` and ``TEXT``, a ``plan`` from a scale
to points, ``tables`` of these points and, if it says more, a ``figure``.
"""

from typing import Any

from examples.study.experiments import (
  ablation,
  attention_logits,
  aux,
  batch_scaling,
  clip_threshold,
  hyperparameters,
  llama,
  qk_norm,
  rate_tolerance,
  relatives,
  rows,
  schedule,
  sensitivity,
  steps_to_loss,
  tokens,
  tuned_initialization,
)

EXPERIMENTS: dict[str, Any] = {
  'batch-scaling': batch_scaling,
  'sensitivity': sensitivity,
  'tuned-initialization': tuned_initialization,
  'steps-to-loss': steps_to_loss,
  'attention-logits': attention_logits,
  'rate-tolerance': rate_tolerance,
  'hyperparameters': hyperparameters,
  'ablation': ablation,
  'clip-threshold': clip_threshold,
  'llama': llama,
  'aux': aux,
  'qk-norm': qk_norm,
  'relatives': relatives,
  'tokens': tokens,
  'schedule': schedule,
  'rows': rows,
}
"""Modules by the name of the command."""
