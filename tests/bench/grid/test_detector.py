"""A detector with a pyramid and shared heads."""

import pytest
import torch

pytest.importorskip("transformers")

from mimose.bench.grid.detector import _targets
from mimose.bench.grid.workloads import WORKLOADS


def test_boxes_are_where_they_are_said_to_be():
    """Each place learns the last box it is inside of, and how far its sides are."""
    boxes = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 1.0, 1.0]]])
    scores = torch.zeros(1, 3, 4, 4)
    kinds, distances, is_inside = _targets(scores, boxes, torch.tensor([[1, 2]]))
    assert is_inside[0].tolist() == [
        [True, True, True, True],
        [True, True, True, True],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert kinds[0, :, 0, 0].tolist() == [0, 1, 0]
    assert kinds[0, :, 0, 3].tolist() == [0, 0, 1]
    assert kinds[0, :, 3, 0].tolist() == [0, 0, 0]
    assert distances[0, :, 0, 0].tolist() == [0.125, 0.125, 0.375, 0.375]


def test_it_learns():
    """The loss of one batch falls."""
    workload = WORKLOADS["od-resnet"]
    torch.manual_seed(0)
    model = workload.build("tiny")
    generator = torch.Generator().manual_seed(0)
    batch = workload.batch({"height": 64, "width": 96}, "tiny", generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(**batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
