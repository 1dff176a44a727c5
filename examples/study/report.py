"""stub for now"""

from examples.study import (
  ablation,
  attention_logits,
  batch_scaling,
  clip_threshold,
  hyperparameters,
)

EXPERIMENTS = {
  'batch-scaling': batch_scaling.plan,
  'attention-logits': attention_logits.plan,
  'ablation': ablation.plan,
  'clip-threshold': clip_threshold.plan,
  'hyperparameters': hyperparameters.plan,
}


def write(*a):
  return []
