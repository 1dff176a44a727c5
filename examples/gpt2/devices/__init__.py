"""Meshes, processes, and what the hardware can do."""
