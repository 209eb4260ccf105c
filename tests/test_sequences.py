"""Steps that run other layers each: dropped at random, or as many as images come."""

import pytest
import torch
from torch import nn

import mimose

N_STEPS = 40


class _Drops(nn.Module):
    """Runs each block with a probability."""

    def __init__(self, toys):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(toys.Block(16) for _ in range(8))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) >= 0.25:
                x = block(x)
        return x.square().mean()


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


def _trained(toys, meter, model, batches, share=0.5):
    """Train bare, and within a budget; return the session and the budget."""
    with toys.untracked():
        expected = toys.train(toys.copy.deepcopy(model), batches)
    budget = toys.budget_between(model, batches, share, meter)
    with mimose.attach(model, budget, meter=meter) as session:
        actual = toys.train(model, batches)
    assert [] == toys.differences(expected, actual)
    return session, budget


def _check(records, budget, n_planned, error):
    later = list(records)[-n_planned:]
    assert ["plan"] * n_planned == [record.phase for record in later]
    assert max(record.observed_peak_bytes for record in records) <= budget
    for record in later:
        growth = pytest.approx(record.observed_growth_bytes, rel=error)
        assert record.predicted_growth_bytes in (None, growth)


def test_layers_dropped_at_random(toys, meter):
    """Plans for all that may run; nothing is over, whatever did run."""
    torch.manual_seed(3)
    rows = [64, 128, 96, 192, 160]
    batches = [toys.inputs(n) for n in rows * (N_STEPS // 5)]
    session, budget = _trained(toys, meter, _Drops(toys), batches)
    _check(session.records, budget, N_STEPS // 2, 2e-3)
    later = list(session.records)[N_STEPS // 2 :]
    assert len({record.events for record in later}) > N_STEPS // 4
    assert {"keep", "recompute"} in [set(record.actions) for record in later]


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
    session, budget = _trained(toys, meter, _Sees(toys), batches)
    # What the images' states are put together in has one gradient, of their number's
    # size, which the last tower's backward frees: no size of its own tells it.
    _check(session.records, budget, 30, 0.08)
    assert {6, 9, 12, 15, 18} == {len(record.events) for record in session.records}
    (first, *_) = [record for record in session.records if len(record.events) == 15]
    assert "plan" == first.phase
