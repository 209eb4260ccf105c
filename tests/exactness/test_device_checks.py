"""On an accelerator: random state, and answers that are told late, read at once."""

import copy

import pytest
import torch
from torch import nn

import mimose

DEVICE = "sim:0"
pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_dropout_is_exact(toys, sim, name):
    """Losses, gradients and random state are the bare model's on the device."""
    model = toys.zoo_model(name).to(DEVICE)
    batches = toys.moved(toys.zoo_batches(name, 8), DEVICE)
    options = {"planner": toys.RandomPlanner(), "meter": "prediction"}
    found, session = toys.compare(model, batches, **options)
    assert [] == found
    actions = {a for r in session.records if r.phase == "plan" for a in r.actions}
    assert {"keep", "recompute"} == actions
    assert 0 == session.summary().retries


class _LateDropout(nn.Module):
    """A layer that begins to draw in its third call."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Draw in a way that gradients depend on, once it has been called often."""
        self.calls += 1
        y = torch.tanh(self.linear(x))
        return torch.dropout(y, 0.5, train=True) if self.calls > 2 else y


def test_a_layer_that_begins_to_draw_is_exact(toys, sim):
    """Its third forward is recomputed with the numbers that it drew."""
    model = toys.chain(4, make=_LateDropout).to(DEVICE)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    found, session = toys.compare(model, batches, planner="full")
    assert [] == found
    assert 0 == session.summary().retries
    assert {} == session.summary().kept_units


def _waits(toys, model, batches):
    """Count each step's host waits, from the forward to the end of backward."""
    counts = []
    for batch in batches:
        before = torch.ops.sim.waits()
        toys.forward(model, batch).backward()
        counts.append(torch.ops.sim.waits() - before)
        model.zero_grad()
    return counts


@pytest.mark.parametrize(("name", "planner"), [("bert", "auto"), ("resnet", "full")])
def test_host_waits_of_a_step(toys, sim, name, planner):
    """At most one more than the bare model's while measuring; then none."""
    batches = toys.moved(toys.zoo_batches(name, 2) * 10, DEVICE)
    bare = _waits(toys, toys.zoo_model(name).to(DEVICE), batches)
    model = toys.zoo_model(name).to(DEVICE)
    planner = toys.RandomPlanner() if planner == "auto" else planner
    with mimose.attach(model, "1TiB", planner=planner) as session:
        counts = _waits(toys, model, batches)
    more = [one - other for one, other in zip(counts, bare, strict=True)]
    assert 1 == more[0]  # first recomputations are compared
    assert max(more) <= 1
    assert [0] * 10 == more[10:]
    assert "plan" == session.records[-1].phase


class _Hidden(nn.Module):
    """Changes a buffer in a way that leaves no trace in its version."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("constant", torch.ones(width))

    def forward(self, x):
        """Read the buffer, and change it."""
        y = torch.tanh(self.linear(x) - self.seen) * self.constant
        self.seen.data.add_(y.detach().mean(0))
        return y


@pytest.mark.parametrize("is_begun", [False, True])
def test_hidden_changes_of_buffers_are_found(toys, sim, is_begun):
    """They are put back from the first step on, also behind a forward alone."""
    model = toys.chain(4, make=_Hidden)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    twin = copy.deepcopy(model).to(DEVICE)
    if is_begun:
        twin(batches[0])
    bare = toys.train(twin, batches)
    model.to(DEVICE)
    with mimose.attach(model, "1TiB", planner="full") as session:
        if is_begun:
            model(batches[0])
        trained = toys.train(model, batches)
    assert [] == toys.differences(bare, trained)
    assert {} == session.summary().kept_units
    assert 0 == session.summary().retries
