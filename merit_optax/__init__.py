"""MERIT: max-norm, element-wise trust ratios for large-batch training."""

from merit_optax._adam import scale_by_adam
from merit_optax._clip import elementwise_clip
from merit_optax._merit import merit
from merit_optax._trust_ratio import scale_by_max_norm_trust_ratio

__version__ = '0.1.0.dev0'

__all__ = (
  'elementwise_clip',
  'merit',
  'scale_by_adam',
  'scale_by_max_norm_trust_ratio',
)
