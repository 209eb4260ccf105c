"""Steps that run other layers each: as many as images come."""

import pytest
import torch
from torch import nn


class _Sees(nn.Module):
    """Runs a tower for each image, and blocks for all of them together."""

    def __init__(self, toys):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.tower = nn.ModuleList(toys.Block(16) for _ in range(3))
        self.blocks = nn.ModuleList(toys.Block(16) for _ in range(3))

    def forward(self, x, images):
        x = torch.cat([x, *map(self.look, images)])
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def look(self, image):
        states = self.stem(image)
        for block in self.tower:
            states = block(states)
        return states


def _images(toys, n):
    return torch.stack([toys.inputs(32, seed=i) for i in range(n)])


def test_as_many_calls_as_images(toys, meter):
    """Each number is planned for, those never measured as well."""
    torch.manual_seed(3)
    counts = [3, 1, 5, 2, 5, 3, 1, 2, *([4, 2, 3, 5, 1] * 6)]
    rows = [64, 48, 80, 64, 96, 56, 72, 88, *([64, 80, 48, 96, 72] * 6)]
    batches = [
        (toys.inputs(n), _images(toys, count))
        for n, count in zip(rows, counts, strict=True)
    ]
    model = _Sees(toys)
    budget = toys.budget_between(model, batches, 0.5, meter)
    found, session = toys.compare(model, batches, budget=budget, meter=meter)
    assert [] == found
    later = list(session.records)[-30:]
    assert ["plan"] * 30 == [record.phase for record in later]
    assert session.peak_bytes <= budget
    for record in later:
        # What the images' states are put together in has one gradient, of their
        # number's size, which the last tower's backward frees: no size tells it.
        growth = pytest.approx(record.observed_growth_bytes, rel=0.08)
        assert record.predicted_growth_bytes in (None, growth)
    assert {6, 9, 12, 15, 18} == {len(record.events) for record in session.records}
    (first, *_) = [record for record in session.records if len(record.events) == 15]
    assert "plan" == first.phase
