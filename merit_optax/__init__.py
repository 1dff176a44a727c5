"""MERIT: max-norm, element-wise trust ratios for large-batch training."""

from merit_optax.diagnostics.attention import (
  AttentionStatistics,
  attention_statistics,
)
from merit_optax.diagnostics.describe import describe
from merit_optax.diagnostics.merit_statistics import merit_statistics
from merit_optax.diagnostics.updates import update_statistics
from merit_optax.matrices.dimension_numbers import FusedDimensionNumbers
from merit_optax.matrices.flax import flax_dimension_numbers
from merit_optax.optimizers.hidden import hidden_matrices, partition_hidden
from merit_optax.optimizers.hyperball import (
  adam_hyperball,
  hyperball,
  muon_hyperball,
)
from merit_optax.optimizers.merit import merit
from merit_optax.optimizers.muon import muon
from merit_optax.optimizers.starting_learning_rate import starting_learning_rate
from merit_optax.optimizers.state_shardings import state_shardings
from merit_optax.transforms.adam import scale_by_adam
from merit_optax.transforms.clip import elementwise_clip
from merit_optax.transforms.keep_norms import keep_matrix_norms
from merit_optax.transforms.l2_trust_ratio import scale_by_l2_norm_trust_ratio
from merit_optax.transforms.lmo import scale_by_lmo
from merit_optax.transforms.muon_direction import scale_by_muon
from merit_optax.transforms.qk_clip import AttentionHeads, qk_clip
from merit_optax.transforms.shape import scale_by_shape
from merit_optax.transforms.trust_ratio import scale_by_max_norm_trust_ratio

__version__ = '0.6.0'

__all__ = (
  'AttentionHeads',
  'AttentionStatistics',
  'FusedDimensionNumbers',
  'adam_hyperball',
  'attention_statistics',
  'describe',
  'elementwise_clip',
  'flax_dimension_numbers',
  'hidden_matrices',
  'hyperball',
  'keep_matrix_norms',
  'merit',
  'merit_statistics',
  'muon',
  'muon_hyperball',
  'partition_hidden',
  'qk_clip',
  'scale_by_adam',
  'scale_by_l2_norm_trust_ratio',
  'scale_by_lmo',
  'scale_by_max_norm_trust_ratio',
  'scale_by_muon',
  'scale_by_shape',
  'starting_learning_rate',
  'state_shardings',
  'update_statistics',
)
