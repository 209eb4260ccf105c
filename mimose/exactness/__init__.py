"""Decides whether a layer may run twice: what it changes, reads and draws.

The input is a layer with one of its calls. The output is the state to restore around
its recomputation, or the reason why the layer must be kept.
"""
