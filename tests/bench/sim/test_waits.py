"""The counter of what makes a host wait for its device, on CUDA."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.sim

_OPERATORS = {
    "item": (1, lambda x, mask: x[0].item()),
    "bool": (1, lambda x, mask: bool(mask[0])),
    "nonzero": (1, lambda x, mask: mask.nonzero()),
    "masked_select": (1, lambda x, mask: x.masked_select(mask)),
    "equal": (1, lambda x, mask: torch.equal(x, x)),
    "index with a mask": (1, lambda x, mask: x[mask]),
    "index with two masks": (2, lambda x, mask: torch.outer(x, x)[mask, mask]),
    "index with places": (0, lambda x, mask: x[x]),
    "put at a mask": (1, lambda x, mask: x.index_put_((mask,), x[3:].clone())),
    "fill at a mask": (0, lambda x, mask: x.__setitem__(mask, 0)),
    "repeats of a tensor": (1, lambda x, mask: x.repeat_interleave(x)),
    "repeats with the size": (
        0,
        lambda x, mask: x.repeat_interleave(x, output_size=15),
    ),
    "arithmetic": (0, lambda x, mask: (x * 2 + 1).float().softmax(0).sum()),
}

_COPIES = {
    "to host": (1, lambda x, pinned: x.cpu()),
    "to pinned, behind": (0, lambda x, pinned: pinned.copy_(x, non_blocking=True)),
    "to pinned": (1, lambda x, pinned: pinned.copy_(x)),
    "to pageable, behind": (
        1,
        lambda x, pinned: torch.empty(6).copy_(x, non_blocking=True),
    ),
    "to device": (1, lambda x, pinned: torch.ones(6).to("sim")),
    "from pageable, behind": (
        1,
        lambda x, pinned: torch.ones(6).to("sim", non_blocking=True),
    ),
    "from pinned": (1, lambda x, pinned: pinned.to("sim")),
    "from pinned, behind": (0, lambda x, pinned: pinned.to("sim", non_blocking=True)),
    "between devices": (0, lambda x, pinned: x.to("sim:1")),
    "on the device": (0, lambda x, pinned: x.clone()),
}


@pytest.mark.parametrize("name", _OPERATORS)
def test_operators(sim, name):
    """One wait for each time the host reads, or sizes a result by data; else none."""
    expected, work = _OPERATORS[name]
    x = torch.arange(6, device="sim")
    mask = x > 2
    before = sim.waits()
    work(x, mask)

    assert expected == sim.waits() - before


@pytest.mark.parametrize("name", _COPIES)
def test_copies(sim, name):
    """Only a copy to or from pinned memory that may be behind lets the host go on."""
    expected, work = _COPIES[name]
    x = torch.ones(6, device="sim")
    pinned = torch.ones(6, pin_memory=True)
    before = sim.waits()
    work(x, pinned)

    assert expected == sim.waits() - before
