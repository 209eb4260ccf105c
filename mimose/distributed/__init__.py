"""Ranks that agree on what they run, and whose errors become errors of all."""
