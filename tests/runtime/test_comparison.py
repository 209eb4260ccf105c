"""A layer that gives something else when it is run again: kept, or told of."""

import itertools
import logging
from typing import ClassVar

import pytest
import torch
from torch import nn

import mimose

DEVICE = "sim:0"


class _Scaled(nn.Module):
    """Multiplies by the next of numbers that nobody saves."""

    numbers: ClassVar = iter(())

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Return something else wherever the next number is another."""
        number = next(_Scaled.numbers)
        with torch.no_grad():
            self.calls += 1
        y = self.dropout(torch.relu(self.linear(x))) / self.calls
        return y * number


def _attached(toys, numbers, *, n_steps, device=DEVICE):
    """Train a layer that multiplies by these; return the session."""
    _Scaled.numbers = numbers
    model = toys.chain(1, make=_Scaled).to(device)
    with mimose.attach(model, "1TiB", planner="full") as session:
        for _ in range(n_steps):
            model(toys.inputs().to(device)).backward()
    return session


def _steps(*steps):
    """Chain the numbers of each step's forward and recomputations; then ones."""
    return itertools.chain(*steps, itertools.repeat(1.0))


@pytest.mark.sim
def test_nothing_is_run_again_without_a_difference(toys, sim):
    """Two calls a step: the forward and its recomputation."""
    numbers = itertools.count()
    session = _attached(toys, (1.0 for _ in numbers), n_steps=3)
    assert 3 * 2 == next(numbers)
    assert {} == session.summary().kept_units
    assert {} == session.summary().inexact_layers


@pytest.mark.sim
def test_a_layer_that_reads_what_changes_is_kept(toys, sim, caplog):
    """Two recomputations agree with each other, and not with the forward."""
    numbers = _steps([1.0, 2.0], [1.0, 2.0, 2.0])
    with caplog.at_level(logging.WARNING):
        session = _attached(toys, numbers, n_steps=3)
    assert "returned something else" in session.summary().kept_units["blocks.0"]
    assert {} == session.summary().inexact_layers
    assert "Layers that are always kept\n  blocks.0" in session.report()
    assert "blocks.0 keeps its activations from now on" in caplog.text


@pytest.mark.sim
def test_a_layer_of_unsteady_kernels_is_told_of(toys, sim, caplog):
    """No two recomputations agree: it is recomputed, and the report says so."""
    numbers = itertools.count(1.0, 2.0**-20)
    with caplog.at_level(logging.WARNING):
        session = _attached(toys, numbers, n_steps=5)
    assert {} == session.summary().kept_units
    assert "not deterministic" in session.summary().inexact_layers["blocks.0"]
    assert "Layers not exact when recomputed\n  blocks.0" in session.report()
    assert 1 == caplog.text.count("differs in its last bits")
    assert 1.0 + (5 * 2 + 1) * 2.0**-20 == next(numbers)  # one more, once


@pytest.mark.sim
def test_the_second_recomputation_leaves_nothing_behind(toys, sim):
    """Random state, buffers and gradients are those without it."""
    found = []
    for numbers in (_steps(), _steps([1.0, 2.0], [1.0] * 3)):
        torch.manual_seed(5)
        _Scaled.numbers = numbers
        model = toys.chain(1, make=_Scaled).to(DEVICE)
        with mimose.attach(model, "1TiB", planner="full"):
            model(toys.inputs().to(DEVICE)).backward()
            model.zero_grad()
            loss = model(toys.inputs().to(DEVICE))
            loss.backward()
        drawn = torch.rand(3, device=DEVICE)
        grads = [p.grad for p in model.parameters()]
        found.append([loss.detach(), model.blocks[0].calls, drawn, *grads])
    assert all(map(torch.equal, *found))


def test_on_a_cpu_one_difference_is_enough(toys):
    """Kernels add in one order there; the layer is kept from the next step on."""
    session = _attached(toys, _steps([1.0, 2.0]), n_steps=2, device="cpu")
    assert "returned something else" in session.summary().kept_units["blocks.0"]
