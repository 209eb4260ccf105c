"""Random numbers of the device: a seed, and an offset that grows with every draw."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sim


def test_the_offset_grows_with_every_draw(sim):
    """Each operator that draws adds 4, on its device; others add nothing."""
    generator, other = sim.default_generators
    offsets = [generator.get_offset()]
    x = torch.rand(1000, device="sim")
    offsets.append(generator.get_offset())
    torch.nn.functional.dropout(x, 0.5)
    offsets.append(generator.get_offset())
    x.square().sum()
    offsets.append(generator.get_offset())

    assert [0, 4, 8, 8] == offsets
    assert 0 == other.get_offset()


def test_checkpoint_recomputes_the_same_dropout():
    """Torch's checkpointing saves this device's state: the gradient shows the mask."""
    x = torch.ones(1000, device="sim", requires_grad=True)
    kept = checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False)
    torch.rand(3, device="sim")
    (kept * x).sum().backward()

    assert torch.equal(2 * kept.detach(), x.grad)
