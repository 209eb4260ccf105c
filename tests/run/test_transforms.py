"""Forwards where hooks of saved tensors are forbidden: by a user, or by torch.func."""

from __future__ import annotations

import torch
from torch import nn

import mimose


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])


def test_hooks_that_are_forbidden_are_not_pushed() -> None:
    """Layers are kept, with a reason, and gradients are those of bare training."""
    x = torch.ones(2, 4)
    bare, model = _model(), _model()
    bare(x).sum().backward()
    session = mimose.attach(model, budget="1TiB", planner="full")
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = model(x).sum()
    loss.backward()
    session.detach()
    for mine, plain in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)


def test_a_functional_gradient_around_the_model() -> None:
    """`torch.func.grad` gives what it gives of the bare model."""
    x = torch.ones(2, 4)
    bare, model = _model(), _model()
    session = mimose.attach(model, budget="1TiB", planner="full")
    mine = torch.func.grad(lambda z: model(z).sum())(x)
    session.detach()
    assert torch.equal(mine, torch.func.grad(lambda z: bare(z).sum())(x))
