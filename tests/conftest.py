"""Settings that every test needs before it touches a device."""

import hypothesis
import jax

# Eight devices on one CPU, so that tests of sharding run everywhere. It has no
# effect once a backend exists, hence here and not in the tests that need it.
jax.config.update('jax_num_cpu_devices', 8)

# The first example of a shape compiles, which no deadline should count. The
# same examples in every run: a red test then has its cause in the last commit.
hypothesis.settings.register_profile(
  'tests', deadline=None, derandomize=True, max_examples=50
)
hypothesis.settings.load_profile('tests')
