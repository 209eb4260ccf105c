"""Users' own autograd Functions, recomputed as torch's documentation allows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mimose


class _ReadTwice(torch.autograd.Function):
    """Reads what it saved three times."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        (_, y) = ctx.saved_tensors
        (x, _) = ctx.saved_tensors
        return grad * y + 0 * x


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ReadTwice.apply(self.linear(x).tanh())
        return y


def _train(planner: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Layer() for _ in range(3)])
    session = None
    if planner is not None:
        session = mimose.attach(model, budget="1TiB", planner=planner)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_what_is_saved_may_be_read_again(planner: str) -> None:
    """`ctx.saved_tensors` read several times gives the same gradients."""
    for mine, plain in zip(_train(planner), _train(None), strict=True):
        assert torch.equal(mine, plain)
