"""Layers whose recomputation cannot be right cost one step, whatever their number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mimose

_SEEN: list[int] = []


class _Grows(nn.Module):
    """Saves another number of tensors whenever a list outside has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in _SEEN:
            x = x.sin()
        return self.linear(x).tanh()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[_Grows() for _ in range(3)])


def _forward(model: nn.Module) -> torch.Tensor:
    _SEEN.clear()
    loss: torch.Tensor = model(torch.ones(2, 4)).sum()
    _SEEN.append(0)
    return loss


def _check(model: nn.Module) -> None:
    """Compare gradients with those of a bare step."""
    bare = _model()
    _forward(bare).backward()
    for mine, plain in zip(model.parameters(), bare.parameters(), strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        assert torch.equal(mine.grad, plain.grad)


def test_a_plain_loop_loses_one_step() -> None:
    """After one failed step the whole family is kept."""
    model = _model()
    session = mimose.attach(model, budget="1TiB", planner="full")
    with pytest.raises(mimose.RecomputationError, match=r"2 .*session\.step"):
        _forward(model).backward()
    model.zero_grad()
    _forward(model).backward()
    session.detach()
    _check(model)


def test_a_repeated_step_loses_none() -> None:
    """`session.step` gives what bare training gives."""
    model = _model()
    session = mimose.attach(model, budget="1TiB", planner="full")
    session.step(lambda: _forward(model).backward())
    session.detach()
    _check(model)
