"""MERIT: max-norm, element-wise trust ratios for large-batch training."""

from merit_optax._acceleration import add_acceleration
from merit_optax._adam import scale_by_adam
from merit_optax._attention import AttentionStatistics, attention_statistics
from merit_optax._attention_heads import AttentionHeads
from merit_optax._clip import elementwise_clip
from merit_optax._describe import (
  describe,
  describe_hyperball,
  describe_partition,
)
from merit_optax._flax import flax_dimension_numbers
from merit_optax._global_norm import clip_by_global_norm
from merit_optax._hidden import hidden_matrices
from merit_optax._hyperball import adam_hyperball, hyperball, muon_hyperball
from merit_optax._keep_norms import keep_matrix_norms
from merit_optax._lmo import scale_by_lmo
from merit_optax._merit import merit
from merit_optax._muon import scale_by_muon
from merit_optax._muon_with_adam import muon
from merit_optax._qk_clip import qk_clip
from merit_optax._shape import scale_by_shape
from merit_optax._starting_learning_rate import starting_learning_rate
from merit_optax._statistics import merit_statistics
from merit_optax._trust_ratio import (
  scale_by_l2_norm_trust_ratio,
  scale_by_max_norm_trust_ratio,
)
from merit_optax._update_statistics import update_statistics

__version__ = '0.3.0'

__all__ = (
  'AttentionHeads',
  'AttentionStatistics',
  'adam_hyperball',
  'add_acceleration',
  'attention_statistics',
  'clip_by_global_norm',
  'describe',
  'describe_hyperball',
  'describe_partition',
  'elementwise_clip',
  'flax_dimension_numbers',
  'hidden_matrices',
  'hyperball',
  'keep_matrix_norms',
  'merit',
  'merit_statistics',
  'muon',
  'muon_hyperball',
  'qk_clip',
  'scale_by_adam',
  'scale_by_l2_norm_trust_ratio',
  'scale_by_lmo',
  'scale_by_max_norm_trust_ratio',
  'scale_by_muon',
  'scale_by_shape',
  'starting_learning_rate',
  'update_statistics',
)
