"""Copies of weights that autocast keeps count once, whatever becomes of the layer."""

import contextlib
import gc
import json

import numpy as np
import pytest
import torch
from torch import nn

import mimose
from mimose.planners.timeline import judge

_WIDTH = 64
_BF16 = torch.bfloat16


class _Wide(nn.Module):
    """Weights as large as what is computed with them."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def _inside(model, caches):
    """Enter autocast in the model's own forward, as accelerate does."""
    context = torch.autocast("cpu", _BF16, cache_enabled=caches)
    model.forward = context(model.forward)


def _step(model, x, *, is_inside, caches=True):
    """Train a step; the context ends before the backward."""
    around = torch.autocast("cpu", _BF16, cache_enabled=caches)
    with contextlib.nullcontext() if is_inside else around:
        loss = model(x)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def _trained(toys, meter, *, is_inside=False, caches=True, state=None, n=30, **how):
    """Train with room for everything; return the records and what was learned."""
    gc.collect()  # what was trained before is not to go in the midst of a step
    model = toys.chain(6, _WIDTH, _Wide)
    if is_inside:
        _inside(model, caches)
    with mimose.attach(model, "1TiB", meter=meter, **how) as session:
        if state is not None:
            session.load_state_dict(state)
        for i in range(n):
            x = toys.inputs(64 + 8 * (i * 5 % 13), _WIDTH)
            _step(model, x, is_inside=is_inside, caches=caches)
        return list(session.records), session.state_dict()


def _errors(records):
    """Return by how much predictions are off, as shares of the growth observed."""
    return [
        (r.predicted_peak_bytes - r.observed_peak_bytes) / r.observed_growth_bytes
        for r in records
        if r.predicted_peak_bytes is not None and "keep" in r.actions
    ]


@pytest.mark.parametrize("actions", ["whole", "selective"])
@pytest.mark.parametrize(
    ("is_inside", "caches"), [(False, True), (True, True), (True, False)]
)
def test_predictions_hold_under_autocast(toys, meter, is_inside, caches, actions):
    """Whether the context ends in the model or behind it, or there are no copies."""
    how = {"is_inside": is_inside, "caches": caches, "actions": actions}
    records, _ = _trained(toys, meter, **how)
    assert {"collect", "step_down", "plan"} == {record.phase for record in records}
    errors = _errors(records)
    assert 12 <= len(errors)
    assert -0.01 <= min(errors)
    assert max(errors) <= 0.03


def test_what_was_learned_of_copies_is_saved(toys, meter):
    """Another session plans with it from its first step on, and counts none twice.

    Counted twice they are a third of the growth here.
    """
    _, state = _trained(toys, meter)
    said = json.loads(json.dumps(state))
    layer = _Wide(_WIDTH)
    n_bytes = 2.0 * sum(p.numel() for p in layer.parameters())
    assert [{"keep": n_bytes}] == list(said["cost_model"]["copied"].values())
    records, _ = _trained(toys, meter, state=said, n=8)
    errors = _errors(records)
    assert 8 == len(errors)
    assert max(map(abs, errors)) <= 0.02


class _Scores(nn.Module):
    """Layers that save their outputs, under scores as large as all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Wide(_WIDTH) for _ in range(4))
        self.head = nn.Linear(_WIDTH, 2000)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def test_a_loss_inside_the_context_and_outside_of_the_model(meter):
    """Plans are made, though copies and the last scores go in the midst of the loss.

    Predictions were 22% too low, so that the first plans never passed their check.
    """
    torch.manual_seed(3)
    model = _Scores()
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for i in range(22):
            x = torch.randn(200 + 8 * (i * 5 % 13), _WIDTH)
            with torch.autocast("cpu", _BF16):
                scores = model(x)
                labels = torch.zeros(len(x), dtype=torch.long)
                loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            model.zero_grad(set_to_none=True)
    records = list(session.records)
    assert {"plan"} == {record.phase for record in records[-8:]}
    assert -0.02 <= min(_errors(records[-8:]))
    assert max(_errors(records[-8:])) <= 0.02


class _Masked(nn.Module):
    """Layers under one mask, which nobody saves: it goes if all are kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_UnderMask(16, 16) for _ in range(4))

    def forward(self, x):
        mask = torch.zeros(len(x), len(x))
        for layer in self.layers:
            x = layer(x, mask)
        del mask
        return x.sum()


class _UnderMask(nn.Linear):
    def forward(self, x, mask):
        return torch.tanh(super().forward(torch.softmax(x @ x.T + mask, 1) @ x))


class _Turns:
    """Plans that keep all, or not."""

    name, kept = "turns", ("0001", "1111", "0111", "1101", "1110")

    def __init__(self):
        self.n_made = 0

    def plan(self, problem):
        self.n_made += 1
        kept = self.kept[self.n_made % len(self.kept)]
        choice = np.array([not int(each) for each in kept], dtype=np.intp)
        return judge(problem, choice, planner=self.name)


def test_what_layers_share_goes_only_if_all_are_kept(meter):
    """Plans that keep the last layer are told well, with the others kept or not."""
    torch.manual_seed(4)
    model, options = _Masked(), {"planner": _Turns(), "actions": "whole"}
    with mimose.attach(model, "1TiB", meter=meter, refine=False, **options) as session:
        for n in range(100, 140):
            model(torch.randn(n * 37 % 83 + 200, 16)).backward()
            model.zero_grad(set_to_none=True)
    records = [r for r in session.records if r.prediction_error is not None][-12:]
    assert {True, False} == {"recompute" in record.actions for record in records}
    errors = [record.prediction_error for record in records]
    assert -0.03 <= min(errors)  # the mask is a sixth of the growth
    assert max(errors) <= 0.0
