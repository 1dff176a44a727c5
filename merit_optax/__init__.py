"""MERIT: max-norm, element-wise trust ratios for large-batch training."""

from merit_optax._adam import scale_by_adam
from merit_optax._attention import AttentionStatistics, attention_statistics
from merit_optax._attention_heads import AttentionHeads
from merit_optax._clip import elementwise_clip
from merit_optax._describe import describe, describe_partition
from merit_optax._flax import flax_dimension_numbers
from merit_optax._keep_norms import keep_matrix_norms
from merit_optax._lmo import scale_by_lmo
from merit_optax._merit import merit
from merit_optax._qk_clip import qk_clip
from merit_optax._shape import scale_by_shape
from merit_optax._statistics import merit_statistics
from merit_optax._trust_ratio import (
  scale_by_l2_norm_trust_ratio,
  scale_by_max_norm_trust_ratio,
)
from merit_optax._update_statistics import update_statistics

__version__ = '0.2.0'

__all__ = (
  'AttentionHeads',
  'AttentionStatistics',
  'attention_statistics',
  'describe',
  'describe_partition',
  'elementwise_clip',
  'flax_dimension_numbers',
  'keep_matrix_norms',
  'merit',
  'merit_statistics',
  'qk_clip',
  'scale_by_adam',
  'scale_by_l2_norm_trust_ratio',
  'scale_by_lmo',
  'scale_by_max_norm_trust_ratio',
  'scale_by_shape',
  'update_statistics',
)
