"""The head's loss by chunks of rows: the same bits, a fraction of the memory.

Plain cross-entropy holds up to six more tensors of the logits' size: a copy in float32,
its log-softmax, and two gradients. Rows of logits know nothing of each other, so all of
these can be made, and let go, for some rows at a time.
"""
