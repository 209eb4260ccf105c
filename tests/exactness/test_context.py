"""Random state of accelerators: saved with each call, and put back exactly."""

import copy

import pytest
import torch
from torch import nn

import mimose

DEVICE = "sim:0"


def _to_device(batches):
    return [{k: _moved(v) for k, v in batch.items()} for batch in batches]


def _moved(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def _train(toys, model, batches):
    """Train; return what each step left, and the device's random state."""
    torch.manual_seed(23)  # the devices' as well
    noted, states = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        loss = toys.forward(model, batch)
        loss.backward()
        noted.append(toys.note(model, loss))
        states.append(torch.sim.get_rng_state(0).clone())
        optimizer.step()
        optimizer.zero_grad()
    return noted, states


def _compare(toys, model, batches, **options):
    """Train a copy bare and the model under a session; return what differs, more."""
    twin = copy.deepcopy(model).to(DEVICE)
    model.to(DEVICE)
    expected, drawn = _train(toys, twin, batches)
    with mimose.attach(model, "1TiB", **options) as session:
        actual, states = _train(toys, model, batches)
    found = toys.differences(expected, actual)
    found += [
        f"step {i}: random state of the device"
        for i, (one, other) in enumerate(zip(drawn, states, strict=True))
        if not torch.equal(one, other)
    ]
    return found, session


@pytest.mark.sim
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_dropout_is_exact(toys, sim, name):
    """Losses, gradients and random state are the bare model's on the device."""
    model = toys.zoo_model(name)
    batches = _to_device(toys.zoo_batches(name, 8))
    planner = toys.RandomPlanner()
    found, session = _compare(toys, model, batches, planner=planner, meter="prediction")
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


@pytest.mark.sim
def test_a_layer_that_begins_to_draw_is_exact(toys, sim):
    """Its third forward is recomputed with the numbers that it drew."""
    model = toys.chain(4, make=_LateDropout)
    batches = [toys.inputs(n).to(DEVICE) for n in (8, 12)] * 3
    found, session = _compare(toys, model, batches, planner="full")
    assert [] == found
    assert 0 == session.summary().retries
    assert {} == session.summary().kept_units
