"""Compiles the training step for TPUs or GPUs that are not there."""
