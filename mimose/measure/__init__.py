"""Measures a step: memory and FLOPs at the boundaries of its layers.

The input is a running step. The output is a `StepSample`: measured bytes by segment.
"""
