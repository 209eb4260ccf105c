"""Rebuilding what a call saved, tensor by tensor, from its part of autograd's graph.

A call that has just run comes in; out goes a recipe, tried on that call's own tensors,
and hooks that let tensors go and rebuild them in backward.
"""
