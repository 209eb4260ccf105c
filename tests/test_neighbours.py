"""Layers that cannot be recomputed, among others that can."""

import pytest
import torch
from torch import nn


class _InPlace(nn.Module):
    """Edits its own input, and so has to be kept."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x.clone()))
        x.add_(1.0)
        return x + y


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_layer_that_must_be_kept_does_not_stop_the_planning(toys, meter, place):
    """Its neighbours are learned of all the same, and predictions stay right."""
    model = toys.chain(4)
    model.blocks[place] = _InPlace(16)
    sizes = (8, 24, 16, 12, 20, 32, 28, 10, 14, 18, 22, 26) * 2
    batches = [toys.inputs(n_rows) for n_rows in sizes]
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    last = list(session.records)[-10:]
    assert {"plan"} == {record.phase for record in last}
    assert [record.observed_growth_bytes for record in last] == [
        pytest.approx(record.predicted_growth_bytes, rel=0.02) for record in last
    ]
