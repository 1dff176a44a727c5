"""Optimizers by name, and diagnostics of what they do."""
