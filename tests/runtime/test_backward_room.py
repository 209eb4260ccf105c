"""A backward of a plain loop has room, or its forward runs again before it begins."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import mimose

pytestmark = pytest.mark.sim

MIB = 2**20


class _Layer(nn.Module):
    """Holds few large blocks, and draws random numbers."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        wide = torch.relu(self.up(x))
        return x + nn.functional.dropout(self.down(wide), 0.1, self.training)


class _Training:
    """Layers, an optimizer, and a loop that nobody repeats."""

    def __init__(self, n_layers, width):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(_Layer(width) for _ in range(n_layers))).to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width, self.grads = width, []

    def step(self, length):
        x = torch.ones(8, length, self.width, device="sim")
        self.model(x).square().mean().backward()
        self.grads.append([p.grad.clone() for p in self.model.parameters()])
        self.grads = self.grads[-1:]
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_random_lengths_of_large_blocks_never_end_a_plain_loop(sim):
    """Gaps between blocks of other lengths grow beyond the allowance for them."""
    sim.set_total_memory(400 * 2**30)
    sim.set_hollow(sim.CARDS["h100"])
    training, drawn = _Training(16, 1024), random.Random(1)
    training.step(3000)
    sim.reset_peak_memory_stats()
    start = sim.memory_allocated()
    training.step(3000)
    training.grads.clear()
    budget = int(start + 0.4 * (sim.max_memory_allocated() - start))
    sim.empty_cache()
    with mimose.attach(training.model, budget) as session:
        for _ in range(40):
            training.step(drawn.randint(200, 3000))
            training.grads.clear()
        summary = session.summary()
    assert summary.steps_over == 0
    assert summary.phases["plan"] >= 30


LENGTHS = (64, 96, 80, 112, 72, 104, 88, 128)


def _gaps(sim, n_segments):
    """Hold 1 of 20 MiB in many segments, and return what holds them."""
    blocks = [torch.empty(2 * MIB, device="sim", dtype=torch.int8) for _ in range(10 * n_segments)]
    kept = blocks[::10]
    del blocks
    return kept


def _trained(sim, budget, *, grace=None, edits=False):
    training = _Training(6, 256)
    if edits:
        training.model.register_forward_pre_hook(lambda _, args: args[0].add_(1.0) and None)
    session = mimose.attach(training.model, budget, grace=grace)
    for length in LENGTHS * 3:
        training.step(length)
    return training, session
