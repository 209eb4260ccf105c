"""Levels of mixed plans, where layers save their own outputs."""

import itertools

import numpy as np

from mimose.cost.outputs import freed_by_maker

# Bytes: the output that each layer but the last hands on, and what its backward adds.
OUTPUTS = (100.0, 160.0, 40.0, 0.0)
ADDED = (5.0, 7.0, 11.0, 13.0)
INPUTS = (0.0, *OUTPUTS[:-1])
BACKWARD = 500.0
KEPT, RECOMPUTED = 0, 1


def _readings():
    """What neighbours that are alike show: (E, 2) excess and net."""
    kept = np.subtract(ADDED, OUTPUTS)  # each frees the output that it has saved
    recomputed = np.subtract(ADDED, INPUTS)  # nobody else holds the input
    net = np.column_stack((kept, recomputed))
    # What runs again makes the output once more.
    return BACKWARD + np.column_stack((np.zeros(4), OUTPUTS)), net


def _true_peaks(actions):
    """Run the backwards of a plan, and return the level and the peak of each."""
    level, peaks = sum(OUTPUTS), {}
    for index in reversed(range(len(actions))):
        again = OUTPUTS[index] if actions[index] == RECOMPUTED else 0.0
        peaks[index] = level + BACKWARD + again
        level += ADDED[index]
        if actions[index] == KEPT:
            level -= OUTPUTS[index]
        if index and actions[index - 1] == RECOMPUTED:
            level -= INPUTS[index]
    return level, peaks


def test_levels_of_every_mixture():
    """Each plan has the peaks and the last level that it really has."""
    excess, net = freed_by_maker(*_readings(), np.zeros((4, 2)), 0.0)
    for actions in itertools.product((KEPT, RECOMPUTED), repeat=4):
        last, peaks = _true_peaks(actions)
        level = sum(OUTPUTS)
        for index in reversed(range(len(actions))):
            assert peaks[index] == level + excess[index, actions[index]]
            level += net[index, actions[index]]
        assert last == level == sum(ADDED)
