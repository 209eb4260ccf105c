"""torch.autocast on the device: casts, and the cache of casted weights, as on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim

BF16 = torch.bfloat16


def test_a_linear_is_the_cpus_in_bf16():
    """Where both autocasts do the same, results and gradients are equal."""

    def work(device):
        torch.manual_seed(0)
        layer, x = nn.Linear(16, 8).to(device), torch.randn(4, 16).to(device)
        with torch.autocast(device, BF16):
            result = layer(x)
        result.float().sum().backward()
        return [each.detach().cpu() for each in (result, layer.weight.grad)]

    expected, actual = work("cpu"), work("sim")

    assert BF16 == actual[0].dtype
    assert [True, True] == list(map(torch.equal, expected, actual))


def test_casted_weights_are_held_until_the_context_ends(sim):
    """The first call casts weight and bias, a second none; the end frees them."""
    layer = nn.Linear(1024, 1024, device="sim")
    x = torch.ones(1, 1024, device="sim", dtype=BF16)
    before = sim.memory_allocated()
    held = []
    with torch.no_grad(), torch.autocast("sim", BF16):
        pass
    with torch.autocast("sim", BF16):
        for _ in range(2):
            layer(x)
            held.append(sim.memory_allocated() - before)
    held.append(sim.memory_allocated() - before)

    assert [2 * 2**20 + 2048, 2 * 2**20 + 2048, 0] == held
