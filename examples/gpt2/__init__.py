"""A GPT-2 trainer in Flax NNX, sharded with jax.jit."""
