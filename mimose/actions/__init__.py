"""What may happen to the activations of one call of a layer: an action a file.

In comes a call, with a probe where its step is measured; out goes what the layer
returns. A new action is a class with a `spec`, listed in `registry`.
"""
