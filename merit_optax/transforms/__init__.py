"""Gradient transformations, one rule in each file."""
