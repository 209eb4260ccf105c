"""Holding what a call saved in less, or elsewhere, and giving it back in backward.

What can be rebuilt is let go first (`mimose.actions.replay`); what is left of a
call's storages, its input among them, a codec packs.
"""
