"""torch.autocast on the device: casts, and the cache of casted weights, as on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.sim

BF16, F32 = torch.bfloat16, torch.float32

_RESULTS = {
    "matmul": (BF16, lambda x, low: x @ x),
    "einsum": (BF16, lambda x, low: torch.einsum("ij,kj->ik", x, low)),
    "conv1d": (BF16, lambda x, low: functional.conv1d(x[None], x[:, :, None])),
    "attention": (
        BF16,
        lambda x, low: functional.scaled_dot_product_attention(*[x[None, None]] * 3),
    ),
    "softmax": (F32, lambda x, low: low.softmax(-1)),
    "softmax in bf16": (BF16, lambda x, low: low.softmax(-1, dtype=BF16)),
    "layer_norm": (F32, lambda x, low: functional.layer_norm(low, (4,))),
    "cross_entropy": (
        F32,
        lambda x, low: functional.cross_entropy(low, low[0].long().abs() % 4),
    ),
    "exp": (F32, lambda x, low: low.exp()),
    "sum": (F32, lambda x, low: low.sum()),
    "norm of rows": (F32, lambda x, low: torch.norm(low, 2, dim=1)),
    "addcmul promotes": (F32, lambda x, low: torch.addcmul(low, low, x)),
    "add": (BF16, lambda x, low: low + 1),
    "cat promotes": (F32, lambda x, low: torch.cat([x, low])),
}


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
