"""Trains trials, several at once, and stores what came out."""
