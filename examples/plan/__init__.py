"""Compiles the training step for a TPU pod that is not there."""
