import json
from pathlib import Path

from benchmarks import communication


def test_what_a_step_sends_is_compared(tmp_path: Path, capsys):
  out = tmp_path / 'results.json'
  communication.main([
    '--num-layers', '1', '--optimizers', 'merit', 'adamw',
    '--meshes', 'fsdp=8', '--out', str(out),
  ])  # fmt: skip
  merit, adamw = json.loads(out.read_text())['rows']
  assert (merit['optimizer'], adamw['optimizer']) == ('merit', 'adamw')
  # Weights are gathered for the forward and the backward pass.
  assert merit['step']['all-gather'] == adamw['step']['all-gather']
  assert set(merit['update']) == {'all-reduce'}
  # AdamW sends the norm of the gradient only.
  assert adamw['update_bytes'] < 200 < merit['update_bytes']
  assert 0 < merit['update_bytes'] < merit['step_bytes'] / 50
  assert 'update alone' in capsys.readouterr().out
