"""Makes the golden file of a tiny random GPT-2: weights, tokens and logits.

The weights keep Hugging Face's names; the logits are transformers' own, from
the CPU in float32. Every parameter is drawn at random, biases and layer norms
too, so that each term counts. To run it (needs the `compare` group):

  python tests/data/make_gpt2_golden.py tests/data/gpt2_golden.safetensors
"""

import argparse
import json
from pathlib import Path

import safetensors.torch
import torch
import transformers

CONFIG: dict[str, int | float] = dict(
  vocab_size=65,
  n_positions=16,
  n_embd=32,
  n_layer=2,
  n_head=4,
  resid_pdrop=0.0,
  embd_pdrop=0.0,
  attn_pdrop=0.0,
)


def redraw(name: str, param: torch.Tensor) -> None:
  mean, std = (
    (0, 0.1)
    if name.endswith('.bias')
    else ((1, 0.1) if '.ln_' in name else (0, 0.3))
  )
  param.copy_(mean + std * torch.randn(param.shape))


def stable(data: bytes) -> bytes:
  # safetensors writes the metadata in a random order: sort it.
  size = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:size])
  header['__metadata__'] = dict(sorted(header['__metadata__'].items()))
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  return len(text).to_bytes(8, 'little') + text + data[size:]


@torch.no_grad()
def main(path: str) -> None:
  torch.manual_seed(0)
  config = transformers.GPT2Config(**CONFIG, attn_implementation='eager')
  model = transformers.GPT2LMHeadModel(config).float().eval()
  for name, param in sorted(model.named_parameters()):
    redraw(name, param)
  tokens = torch.randint(0, config.vocab_size, (3, 16), dtype=torch.int32)
  arrays = {
    k: v
    for k, v in model.state_dict().items()
    if k != 'lm_head.weight'
    and not k.endswith(('.attn.bias', '.attn.masked_bias'))
  }
  arrays |= {'tokens': tokens, 'logits': model(tokens.long()).logits}
  metadata = {
    k: str(getattr(config, k))
    for k in (*CONFIG, 'activation_function', 'layer_norm_epsilon')
  } | {'transformers': transformers.__version__, 'torch': torch.__version__}
  Path(path).write_bytes(stable(safetensors.torch.save(arrays, metadata)))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('path', help='where to write the safetensors file')
  main(parser.parse_args().path)
