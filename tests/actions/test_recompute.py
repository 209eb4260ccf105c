"""What cannot be run again is kept, whatever it is that torch says of it."""

import copy

import pytest
import torch
from torch import nn

import mimose

WIDTH = 16


class Shifted(nn.Module):
    """Adds a table of its own, or one that it is handed."""

    def __init__(self, table=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = table

    def forward(self, x, given=None):
        """Map (rows, width) to the same."""
        table = self.table if given is None else given
        return x + self.down(torch.relu(self.up(x) + table))


class Row(nn.Module):
    """Three of them, and a loss."""

    def __init__(self, *tables):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(map(Shifted, tables))

    def forward(self, x, given=None):
        """Map (rows, width) to one number."""
        for block in self.blocks:
            x = block(x, given)
        return x.square().mean()


def _inference(value):
    with torch.inference_mode():
        return torch.full((WIDTH,), value)


def _run(model, given=None, *, edits=False):
    model.zero_grad()
    loss = model(torch.ones(8, WIDTH), given)
    if edits:
        with torch.inference_mode():
            for block in model.blocks:
                block.table.add_(1.0)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_table_whose_edits_nobody_counts_is_kept():
    """Made in inference mode, it may change unseen between forward and backward."""
    model, bare = (Row(*map(_inference, (0.5, 0.25, 0.0))) for _ in range(2))
    with mimose.attach(model, "1TiB", planner="full") as session:
        for edits in (False, True, False):
            pairs = zip(_run(model, edits=edits), _run(bare, edits=edits), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    whys = session.summary().kept_units
    assert {f"blocks.{i}" for i in range(3)} == set(whys)
    assert all(
        "'table' was made under torch.inference_mode" in w for w in whys.values()
    )


@pytest.mark.parametrize("planner", ["full", "auto"])
def test_a_layer_handed_what_cannot_be_saved_is_kept(planner):
    """`checkpoint` would save what a teacher made in inference mode, and cannot."""
    model, given = Row(None, None, None), _inference(0.5)
    bare = copy.deepcopy(model)
    with mimose.attach(model, "1TiB", planner=planner) as session:
        for _ in range(3):
            pairs = zip(_run(model, given), _run(bare, given), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
    kept = session.summary().kept_units
    assert all("input tensors was made" in why for why in kept.values())
    assert 3 == len(kept)
    assert 0 == session.records[-1].retries
