"""What a step needs: readings of memory, and FLOPs, at the boundaries of its layers.

In comes a step that runs; out goes a `StepSample`: bytes by segment, as they were read.
"""
