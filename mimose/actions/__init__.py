"""What may happen to the activations of one call of a unit: an action a file.

In comes a call, with a probe where its step is measured; out goes what the unit
returns. A new action is a class with a `spec`, listed in `registry`.
"""
