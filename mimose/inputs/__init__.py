"""Describes the model's calls.

The input is the arguments of a call. The output is a `StepInput`: the context and the
sizes by which plans are looked up.
"""
