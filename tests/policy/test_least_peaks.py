"""Lower bounds of peaks, and the error that is made of one."""

import torch
from torch import nn

from mimose.memory.out_of_memory import infeasible
from mimose.policy.least_peaks import LeastPeaks
from mimose.types import StepInput

MIB = 2.0**20


def _facts(*sizes, context="text"):
    return StepInput(context, sizes, False)


def test_a_larger_batch_needs_at_least_as_much():
    """The bound holds at the shape itself and at those that cover it."""
    least = LeastPeaks()
    least.add(_facts(2, 10), 500.0, 200.0, 0.0)
    assert 0.0 == least.bound(_facts(2, 10, context="images"), 400.0, 0.0)
    sizes = [(2, 10), (2, 30), (4, 10), (2, 9), (1, 99)]
    assert [500.0, 500.0, 500.0, 0.0, 0.0] == [
        least.bound(_facts(*s), 400.0, 0.0) for s in sizes
    ]


def test_the_lower_of_two_bounds_counts():
    """Today's start with that growth, or that peak with the state made since."""
    least = LeastPeaks()
    least.add(_facts(2, 10), 500.0, 200.0, 40.0)
    assert 300.0 == least.bound(_facts(2, 10), 100.0, 40.0)
    assert 560.0 == least.bound(_facts(2, 10), 900.0, 100.0)


def test_the_highest_of_several_steps_counts():
    """Of all measured steps that are covered, the one that needs most decides."""
    least = LeastPeaks()
    least.add(_facts(2, 10), 500.0, 200.0, 0.0)
    least.add(_facts(2, 20), 700.0, 400.0, 0.0)
    assert 700.0 == least.bound(_facts(2, 25), 900.0, 0.0)
    assert 500.0 == least.bound(_facts(2, 15), 900.0, 0.0)


def test_the_error_says_what_holds_the_memory():
    """Parameters, gradients, state, the rest and the step add up to the peak."""
    model = nn.Linear(256, 1024, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    error = infeasible(model, 5 * MIB, 9 * MIB, 7 * MIB, 2 * MIB)
    assert (5 * MIB, 9 * MIB) == (error.budget_bytes, error.least_peak_bytes)
    assert {
        "parameters": MIB,
        "gradients": MIB,
        "optimizer state": 2 * MIB,
        "other things held before the step": 3 * MIB,
        "the step itself, everything recomputed": 2 * MIB,
    } == error.holders
    assert "5.0 MiB" in str(error)
    assert "9.0 MiB" in str(error)
