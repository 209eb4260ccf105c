"""May it run twice? What a layer changes, reads and draws besides its arguments.

In comes a layer with one of its calls; out go what has to be put back around its
recomputation, or the reason why it has to be kept.
"""
