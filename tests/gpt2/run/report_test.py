import json
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2.command import format_bytes, table
from examples.gpt2.run import report
from examples.gpt2.run.folder import RunFolder


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
    'corpus': {'unigram_entropy': 5.25},
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
    '3.0000 nats per token (unigram entropy 5.2500)',
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


@pytest.mark.parametrize(
  ('lines', 'expected'),
  [
    # The first half is from before the weights have settled.
    ([_diagnosed(1, 1e9, 1.0), _diagnosed(2, 8.0, 2.0)], 128),
    ([_diagnosed(1, 8.0, -2.0)], None),
    ([_diagnosed(1, -8.0, 2.0)], None),
    ([_line(1, max_attention_logit=[1.0], gradient_noise=None)], None),
    (
      [_diagnosed(i, 8.0, 2.0) for i in (1, 2)]
      + [_diagnosed(3, 1.0, 1.0, skipped=True)],
      128,
    ),
  ],
)
def test_the_noise_scale_is_a_ratio_of_means(
  tmp_path: Path, lines: list[dict], expected: int | None
):
  text = _after(tmp_path, lines)
  assert (f'critical batch about {expected} tokens' in text) == bool(expected)
  assert ('critical batch' in text) == bool(expected)


@hypothesis.given(st.integers(1, 2**55))
def test_bytes_have_three_digits(size: int):
  number, unit = format_bytes(size).split()
  power = ('B', 'KiB', 'MiB', 'GiB', 'TiB').index(unit)
  assert float(number) * 1024**power == pytest.approx(size, rel=0.006)
  assert 'e' not in number
  assert float(number) <= 1024 or unit == 'TiB'


def test_a_table_has_two_columns():
  assert table({'a': '1', 'long': '2'}) == 'a     1\nlong  2'
