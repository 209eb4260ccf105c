"""Do it: run a step and its layers as was decided, and see how it comes out.

In comes a `Decision`; out go the model's output, as if nothing had been planned, and
what the step showed.
"""
