"""Makes the golden file of a tiny random Llama: weights, tokens and logits.

It has grouped queries, heads that are wider than width / heads, and rotary
positions as Llama 3.1 scales them. As in make_gpt2_golden.py, all is
transformers' own, and every parameter is drawn at random. To run it (needs the
`compare` group):

  python tests/data/make_llama_golden.py tests/data/llama_golden.safetensors
"""

import argparse
from pathlib import Path

from make_gpt2_golden import stable
import safetensors.torch
import torch
import transformers

CONFIG = dict(
  vocab_size=65,
  hidden_size=32,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=12,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
  # Some frequencies stay, some change in part, and some by the factor.
  rope_parameters=dict(
    rope_type='llama3',
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=40,
  ),
)


@torch.no_grad()
def main(path: str) -> None:
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**CONFIG, attn_implementation='eager')
  model = transformers.LlamaForCausalLM(config).float().eval()
  for name, param in sorted(model.named_parameters()):
    mean, std = (1, 0.1) if 'norm' in name else (0, 0.3)
    param.copy_(mean + std * torch.randn(param.shape))
  tokens = torch.randint(0, config.vocab_size, (2, 64), dtype=torch.int32)
  arrays = {k: v.contiguous() for k, v in model.state_dict().items()}
  arrays |= {'tokens': tokens, 'logits': model(tokens.long()).logits}
  metadata = {
    'config.json': config.to_json_string(),
    'transformers': transformers.__version__,
    'torch': torch.__version__,
  }
  Path(path).write_bytes(stable(safetensors.torch.save(arrays, metadata)))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('path', help='where to write the safetensors file')
  main(parser.parse_args().path)
