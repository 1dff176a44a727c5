"""Optimizers: chains of the transforms."""
