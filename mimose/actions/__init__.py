"""Actions: what may happen to the activations of a layer call. One file for each.

The input is a call, with a probe if its step is measured. The output is what the layer
returns. A new action is a class with a `spec`, listed in `registry`.
"""
