"""torch.sim as a device module: devices, streams, events, copies, modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim


def test_it_is_the_accelerator(sim):
    """Torch sees two devices of the name, by way of this module."""
    assert "sim" == torch.accelerator.current_accelerator().type
    assert 2 == torch.accelerator.device_count() == sim.device_count()
    assert torch.get_device_module("sim:1") is sim


def test_operators_do_as_the_cpus():
    """Views, resizes, writes in place, results in a list: as on the CPU."""

    def work(device):
        x = torch.arange(24.0, device=device).reshape(4, 6)
        y = x.t().contiguous()[1:]
        y[0] += 3
        y[y > 10] = 0
        out = torch.empty(0, device=device)
        torch.mul(y, 2, out=out)
        parts = torch.split(out, 2)
        z = (
            torch.zeros(5, 4, device=device)
            .copy_(y)
            .index_add_(0, torch.tensor([1, 1], device=device), parts[0])
        )
        z.resize_(2, 3)
        complex_ = torch.view_as_complex(z[:, :2].contiguous()).conj()
        return [x, y, out, *parts, z, complex_.resolve_conj(), *torch.sort(y)]

    expected, actual = work("cpu"), [each.cpu() for each in work("sim")]

    assert [True] * len(expected) == list(map(torch.equal, expected, actual))


def test_layer_norm_holds_its_result_and_two_numbers_a_row(sim):
    """It is one kernel, as on CUDA, where torch would compose it of others."""
    x = torch.randn(1024, 256, device="sim")
    norm = nn.LayerNorm(256, device="sim")
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    result = norm(x)
    held = sim.memory_allocated() - before
    peak = sim.max_memory_allocated() - before

    assert 2**20 + 2 * 4096 == held == peak
    del result
