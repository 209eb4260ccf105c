"""Seconds of steps to come, against those of the simulated device's own clock."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import mimose

pytestmark = pytest.mark.sim

N_UPDATES = 20


@pytest.fixture
def model(sim):
    """Layers whose steps take the device milliseconds."""
    sim.set_hollow(sim.CARDS["h100"])
    with torch.device("sim"):
        layers = (
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(6)
        )
        return nn.Sequential(*layers).train()


def _update(model, optimizer, shapes, *, has_closure):
    """Run forwards and backwards, and a step of the optimizer behind them."""

    def closure():
        for rows, length in shapes:
            x = torch.zeros(rows, length, 256, device="sim")
            model(x).sum().backward()

    if has_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("n_shapes", "has_closure"), [(1, True), (3, False)])
def test_seconds_are_those_of_the_device(sim, model, n_shapes, has_closure):
    """Steps of other rows and lengths, recomputed layers and the optimizer's share."""
    draw = random.Random(5)
    optimizer = torch.optim.AdamW(model.parameters())
    with mimose.attach(model, "360MiB", refine=False) as session:
        errors, extra = [], []
        for update in range(N_UPDATES):
            shapes = [
                (draw.randint(4, 24), draw.randint(20, 200)) for _ in range(n_shapes)
            ]
            names = [{"input.0": rows, "input.1": length} for rows, length in shapes]
            told = [session.forecast(name) for name in names] if update > 13 else []
            before = sim.clock()
            _update(model, optimizer, shapes, has_closure=has_closure)
            took = sim.clock().since(before).kernels  # not the allocator's calls
            if told:
                errors.append(sum(each.seconds for each in told) / took - 1.0)
                extra.extend(each.extra_seconds for each in told)
        state, last = json.dumps(session.state_dict()), session.forecast()
        summary = session.summary()
        assert last.seconds > last.extra_seconds + summary.fixed_seconds > 0.0
        assert summary.batch_seconds > 0.0
        assert "twice as large" in " ".join(session.report().split())
    assert np.median(np.abs(errors)) < 0.1
    assert max(extra) > 0.0
    with mimose.attach(model, "360MiB", refine=False) as other:
        other.load_state_dict(json.loads(state))
        assert other.forecast(last.shape).seconds == pytest.approx(last.seconds, 0.05)


def test_seconds_are_the_hosts_where_it_is_slower(sim, model, caplog):
    """The floor, and what a shape takes the first time, are in the forecast."""
    sim.set_hollow(sim.CARDS["h100"], sim.HOST)
    model.to(torch.bfloat16)
    draw = random.Random(3)
    optimizer = torch.optim.AdamW(model.parameters())
    errors = []
    with mimose.attach(model, "360MiB", refine=False) as session:
        for update in range(130):
            length = draw.randint(10, 150) if update % 2 else 8 * draw.randint(2, 18)
            told = session.forecast({"input.1": length}) if update > 60 else None
            x = torch.zeros(16, length, 256, device="sim", dtype=torch.bfloat16)
            before = sim.clock()
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if told is not None:
                errors.append(told.seconds / sim.clock().since(before).user - 1.0)
        found = session.summary().first_times
        report = " ".join(session.report().split())
    assert np.median(np.abs(errors)) < 0.05
    assert 0 < found.n_new < found.n_steps
    assert 0.2 < found.share < 0.9
    assert "pad_to_multiple_of" in report
    assert "pad_to_multiple_of" in caplog.text


def test_seconds_are_not_known_of_one_shape(model):
    """One shape's seconds do not tell what of them is fixed."""
    optimizer = torch.optim.SGD(model.parameters())
    with mimose.attach(model, "360MiB", refine=False) as session:
        for _ in range(N_UPDATES):
            _update(model, optimizer, [(8, 64)], has_closure=False)
        assert session.forecast().fits
        assert session.forecast().seconds is None
