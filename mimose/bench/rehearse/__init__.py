"""Rehearses a training on a card that is not there: `mimose.rehearse`.

A model and its batches go in. The simulated device (`mimose.sim`) runs the steps at
true size without arithmetic, in a process for each card. Out come bytes, plans and
virtual seconds as plain data.
"""
