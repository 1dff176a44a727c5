import json
from pathlib import Path

from examples.gpt2 import run as report
from examples.gpt2.run import RunFolder


def _line(step: int, **more) -> dict:
  return {
    'step': step,
    'tokens': step * 512,
    'batch_size': 16,
    'tokens_per_second': 1000.0 * step,
    'mfu': 0.1 * step,
    'waited_share': 0.01,
    'peak_bytes': 3 * 2**30,
    **more,
  }


def _diagnosed(step: int, trace: float, square: float, **more) -> dict:
  noise = {'trace': trace, 'squared_norm': square}
  return _line(
    step, max_attention_logit=[1.0, 2.25], gradient_noise=noise, **more
  )


def _after(folder: Path, lines: list[dict]) -> str:
  folder.mkdir(exist_ok=True)
  run = RunFolder(folder)
  settings = {
    'config': {'batch_size': 16, 'context_length': 32},
  }
  (folder / 'config.json').write_text(json.dumps(settings))
  run.picture.touch()
  run.metrics.replace(lines)
  run.write_sample('And so it goes.')
  return report.after(run)


def test_after_a_run_its_results_are_told(tmp_path: Path):
  lines = [
    _line(1),
    _diagnosed(2, 1.0, 1.0),
    _line(3, skipped=True, waited_share=0.2),
    _diagnosed(4, 6.0, 2.0, val_loss=3.14159),
    _diagnosed(5, 2.0, 2.0, val_loss=3.0),
  ]
  text = _after(tmp_path, lines)
  for part in (
    '3.0000 nats per token',
    '1 steps whose loss or gradient was not finite',
    '1.0, 2.2 (first to last layer)',
    # (6 + 2) / (2 + 2), times 32 tokens of a sequence.
    'critical batch about 64 tokens; a step has 512',
    '3,000 tokens/s (median), MFU 30.0%',
    'at most 20.0% of a step',
    '3 GiB',
    str(tmp_path / 'curves.png'),
  ):
    assert part in text
  assert text.endswith('\n\nAnd so it goes.')


def test_what_is_not_known_is_not_told(tmp_path: Path):
  text = _after(tmp_path / 'all', [_line(1, mfu=None, val_loss=2.0)])
  assert 'MFU n/a' in text
  for part in ('left out', 'attention', 'noise', 'not known'):
    assert part not in text
  # As if the last line was lost, or all.
  for lines in ([_diagnosed(1, 1.0, 1.0)], []):
    assert 'not known' in _after(tmp_path / f'{len(lines)}', lines)
