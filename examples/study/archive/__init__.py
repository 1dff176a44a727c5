"""Experiments that are closed: points, and the tables made of them."""
