"""Finds a model's layers and its device, and replaces forwards until the session ends.

The input is a model. The output is its layers, how it is compiled and sharded, and a
patch for each forward that a session runs.
"""
