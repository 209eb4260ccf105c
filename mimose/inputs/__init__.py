"""Finds a model's layers, and describes its calls.

The input is the model and the arguments of a call. The output is its layers, and for
each step a `StepInput`: the context and the sizes by which plans are looked up.
"""
