"""Intervals, tables and figures, made of stored lines alone."""
