"""Programs that use merit_optax through its public names only."""
