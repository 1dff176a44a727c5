import pytest

from examples.gpt2.config import Config, UsageError, identity, resolve


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'steps': 0}, ['--steps', 'at least 1', '0']),
    ({'batch_size': -4}, ['--batch-size', 'at least 1', '-4']),
    ({'learning_rate': 0.0}, ['--learning-rate', 'finite and above 0', '0.0']),
    ({'learning_rate': float('nan')}, ['--learning-rate', 'nan']),
    ({'learning_rate': float('inf')}, ['--learning-rate', 'inf']),
    ({'weight_decay': -0.1}, ['--weight-decay', 'at least 0', '-0.1']),
    ({'weight_decay': float('nan')}, ['--weight-decay', 'nan']),
    ({'seed': -1}, ['--seed', '-1']),
    ({'vocab_size': 100}, ['--vocab-size', '257', '100']),
    ({'vocab_size': 65537}, ['--vocab-size', '65536', '65537']),
    ({'micro_batch_size': 7}, ['--micro-batch-size', '--batch-size', '7']),
    ({'num_heads': 3}, ['--num-heads', '--width', '3', '128']),
  ],
)
def test_a_wrong_setting_is_named(settings: dict, words: list[str]):
  with pytest.raises(UsageError) as error:
    resolve(Config(**settings))
  for word in words:
    assert word in str(error.value)


def test_settings_not_given_come_from_preset_and_optimizer():
  config = resolve(Config(optimizer='lamb', steps=7))
  assert config.steps == 7
  assert None not in identity(config).values()
  assert resolve(Config()).learning_rate != config.learning_rate


def test_micro_batch_follows_a_smaller_batch():
  config = resolve(Config(batch_size=24))
  assert 24 % config.micro_batch_size == 0


def test_identity_holds_what_decides_the_numbers():
  one = identity(resolve(Config(seed=1)))
  assert one != identity(resolve(Config(seed=2)))
  assert one == identity(resolve(Config(seed=1, cache_dir='/elsewhere')))
