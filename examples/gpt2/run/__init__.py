"""A run: its step, loop, checkpoints, folder and log."""
