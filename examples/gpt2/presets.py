"""The presets: settings that a run begins with, by name.

All but the demo take about 20 tokens per parameter. Batch sizes are the paper's
where it has the model. Sizes of the Llamas are those of Zhao et al., GaLore,
2024, and of the last three those of the config.json of
meta-llama/Meta-Llama-3-8B, TinyLlama/TinyLlama_v1.1 and
HuggingFaceTB/SmolLM2-135M.
"""

from typing import Any

from examples.gpt2.config import Config, change

_RUN: dict[str, Any] = dict(
  eval_every=100, eval_sequences=1024, checkpoint_every=100,
  diagnostics_every=100,
)  # fmt: skip
_GPT2 = _RUN | dict(context_length=1024, vocab_size=50257)
_LLAMA = _GPT2 | dict(architecture='llama', untied_head=True, vocab_size=32000)
_LLAMA_3 = _LLAMA | dict(norm_epsilon=1e-5)

PRESETS: dict[str, Config] = {
  name: change(Config(preset=name), **settings)
  for name, settings in {
    'demo': {},
    'small': _GPT2 | dict(
      num_layers=12, num_heads=12, width=768,
      batch_size=1024, micro_batch_size=16, steps=2400,
    ),
    'medium': _GPT2 | dict(
      num_layers=24, num_heads=16, width=1024, batch_size=4096, steps=1700,
    ),
    'large': _GPT2 | dict(
      num_layers=36, num_heads=20, width=1280, batch_size=8192, steps=1850,
    ),
    'xl': _GPT2 | dict(
      num_layers=48, num_heads=25, width=1600, batch_size=8192, steps=3700,
    ),
    'llama-130m': _LLAMA | dict(
      num_layers=12, num_heads=12, width=768, mlp_width=2048,
      batch_size=1024, micro_batch_size=16, steps=2600,
    ),
    'llama-350m': _LLAMA | dict(
      num_layers=24, num_heads=16, width=1024, mlp_width=2736,
      batch_size=4096, steps=1760,
    ),
    'llama-7b': _LLAMA | dict(
      num_layers=32, num_heads=32, width=4096, mlp_width=11008,
      batch_size=8192, steps=16000,
    ),
    'llama-3-8b': _LLAMA_3 | dict(
      num_layers=32, num_heads=32, num_kv_heads=8, width=4096, mlp_width=14336,
      vocab_size=128256, context_length=8192, rope_theta=500_000.0,
      batch_size=1024, micro_batch_size=1, steps=19200,
    ),
    'tinyllama-1.1b': _LLAMA_3 | dict(
      num_layers=22, num_heads=32, num_kv_heads=4, width=2048, mlp_width=5632,
      context_length=2048, batch_size=1024, micro_batch_size=4, steps=10500,
    ),
    'smollm2-135m': _LLAMA_3 | dict(
      num_layers=30, num_heads=9, num_kv_heads=3, width=576, mlp_width=1536,
      vocab_size=49152, context_length=8192, rope_theta=100_000.0,
      untied_head=False, batch_size=128, micro_batch_size=1, steps=2600,
    ),
  }.items()
}  # fmt: skip
