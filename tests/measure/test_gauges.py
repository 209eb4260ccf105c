"""Which calls of a measured step are counted operator by operator, and what follows."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from toys import Chain

import mimose

RECOMPUTE = "recompute"


_seen = Counter()
"""How often a dispatch mode saw each layer run."""


class _Watched(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(width, width), 0

    def forward(self, x):
        _seen[self.layer_idx] += _get_current_dispatch_mode() is not None
        return x + torch.tanh(self.linear(x))


def _watched_steps(toys, n_steps, **options):
    """Return for each step how often a mode saw each of 12 equal layers; the records.

    Each step has one more row, from 64 on.
    """
    model = toys.chain(12, make=_Watched)
    for i, block in enumerate(model.blocks):
        block.layer_idx = i
    found = []
    with mimose.attach(model, "1TiB", meter=toys.BlindMeter(), **options) as session:
        for i in range(n_steps):
            _seen.clear()
            toys.train(model, [toys.inputs(64 + i)])
            found.append(dict(+_seen))
    return found, session.records


def test_a_family_is_counted_in_turns(toys):
    """Each layer once, then two in a step, until each was counted again."""
    found, records = _watched_steps(toys, 3)
    assert {"collect"} == {record.phase for record in records}
    assert dict.fromkeys(range(12), 1) == found[0]
    assert [2, 2] == [len(seen) for seen in found[1:3]]
    assert found[1] != found[2]


@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_a_planner_without_predictions_measures_nothing(toys, planner):
    """One call shows the FLOPs of all, and a few sizes those of the others."""
    found, records = _watched_steps(toys, 8, planner=planner)
    assert 1 == max(sum(seen.values()) for seen in found)
    assert 0 == sum(sum(seen.values()) for seen in found[-3:])
    assert 1 == len({r.recomputed_flops / (64 + i) for i, r in enumerate(records)})


class _Heavy(nn.Module):
    """A block that may save more than those of its class, which no setting tells."""

    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._heavy_from = 1000

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if len(x) >= self._heavy_from:
            y = torch.tanh(torch.tanh(y))
        return x + y


@pytest.mark.parametrize(("at", "rows"), [(0, 1), (23, 1), (3, 30)])
def test_one_of_many_equal_layers_saves_twice_as_much(toys, meter, at, rows):
    """It leaves its family when it does, and the bytes of all are predicted."""
    model = toys.chain(24, make=_Heavy)
    model.blocks[at]._heavy_from = rows
    lengths = (96, 40, 64, 80, 56, 88, 32, 72, 48, 60)
    batches = [toys.inputs(n) for n in (24, *lengths, *lengths)]
    budget = toys.budget_between(model, batches, 0.5, meter)
    found, session = toys.compare(model, batches, budget=budget, meter=meter)
    assert [] == found
    assert 0 == session.summary().steps_over
    with mimose.attach(model, budget, meter=meter) as resumed:
        resumed.load_state_dict(session.state_dict())
        toys.train(model, [toys.inputs(n) for n in (44, 52, 68)])
    assert {"plan"} == {record.phase for record in resumed.records}
    planned = [record for record in session.records if record.phase == "plan"]
    assert len(planned) >= 10
    for record in planned:
        assert record.observed_peak_bytes == pytest.approx(
            record.predicted_peak_bytes, rel=0.01
        )


class _Detached(Chain):
    """Lets no gradient into the third block of some."""

    def forward(self, x):
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x).detach() if i == 2 else block(x)
        return x.square().mean()


def test_a_layer_that_no_gradient_has_reached_is_only_recomputed(toys, meter):
    """What it holds was never counted; the others of its family are kept."""
    model = _Detached(6, make=_Heavy)
    model.blocks[2]._heavy_from = 1
    batches = [toys.inputs(n) for n in (64, 40, 56, 48, 32) * 3]
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    last = session.records[-1]
    assert "plan" == last.phase, last.reason
    assert [2] == [i for i, action in enumerate(last.actions) if action == RECOMPUTE]
