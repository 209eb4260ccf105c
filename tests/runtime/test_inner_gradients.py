"""Gradients taken inside a forward: steps train exactly, and records tell the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mimose
from mimose.memory.marks import INNER_GRADIENT

Take = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
FULL = {"budget": "1TiB", "planner": "full", "meter": "prediction"}
PLANNED = {"budget": "+300MiB", "meter": "prediction", "refine": False}


def _forces(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + force.square().mean()


def _backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.square().sum().backward(retain_graph=True)
    return y.mean()


def _twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return y.mean() + second.square().mean()


def _partly(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = model.layers[0](x)
    weight = model.layers[0][0].weight
    (found,) = torch.autograd.grad(z.square().sum(), weight, create_graph=True)
    return y.mean() + found.square().mean()


class Model(nn.Module):
    """Three layers, and something taken of them in chosen steps."""

    def __init__(self, take: Take, is_odd: Callable[[int], bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)
        )
        self.take, self.is_odd, self.n = take, is_odd, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers, and take the gradient."""
        x.requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        self.n += 1
        return self.take(self, x, y) if self.is_odd(self.n - 1) else y.square().mean()


def _train(
    make: Callable[[], nn.Module],
    options: dict[str, Any] | None,
    n: int,
) -> tuple[list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    model, got, told = make(), [], []
    session = mimose.attach(model, **options) if options else None
    for i in range(n):
        model(torch.randn(4, 5 + i % 4, 16)).backward()
        got += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    if session is not None:
        told = [record.reason for record in session.records]
        session.detach()
    return got, told


def _check(
    make: Callable[[], nn.Module], options: dict[str, Any], n: int = 3
) -> list[str]:
    bare, _ = _train(make, None, n)
    ours, told = _train(make, options, n)
    assert len(bare) == len(ours)
    assert all(map(torch.equal, bare, ours))
    return told


EACH = [_forces, _backward, _twice, _partly]


@pytest.mark.parametrize(
    ("take", "options"),
    [*((take, PLANNED) for take in EACH), (_twice, FULL)],
)
def test_every_step_takes_one(take: Take, options: dict[str, Any]) -> None:
    """Every way to take one trains exactly, and each step's record says so."""
    told = _check(lambda: Model(take, lambda _: True), options)
    expected = INNER_GRADIENT if options is PLANNED else ""  # full is a baseline
    assert set(told) == {expected}


def test_some_steps_take_one() -> None:
    """Steps without one are planned, those with one train exactly."""
    told = _check(lambda: Model(_forces, lambda i: i % 3 == 0), PLANNED, n=12)
    assert told[0] == INNER_GRADIENT
    assert "" in told
