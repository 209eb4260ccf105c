"""Steps that run nothing of what was learned, between ordinary ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose

OPTIONS: list[dict[str, Any]] = [
    {"planner": planner, "actions": actions, "refine": False, "meter": "prediction"}
    for planner, actions in itertools.product(("full", "auto"), ("exact", "fine"))
]


class Layer(nn.Module):
    """A small layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


class Model(nn.Module):
    """Layers that run in the manner that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.manner = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers, or some, or none."""
        y = self.first(x)
        if self.manner == "frozen":
            with torch.no_grad():
                for layer in self.layers:
                    y = layer(y)
        elif self.manner != "none":
            for at, layer in enumerate(self.layers):
                if self.manner == "subset" and at % 2:
                    continue
                if self.manner == "checkpointed":
                    y = checkpoint(layer, y, use_reentrant=False)
                else:
                    y = layer(y)
        return self.head(y).mean()


def _train(
    manner: str, odd: range, options: dict[str, Any] | None
) -> list[list[torch.Tensor | None]]:
    torch.manual_seed(0)
    model, got = Model(), []
    session = mimose.attach(model, "+300MiB", **options) if options else None
    for i in range(12):
        model.manner = manner if i in odd else ""
        model(torch.randn(4, 6 + i % 4, 16)).backward()
        got.append([p.grad for p in model.parameters()])
        model.zero_grad()
    if session is not None:
        session.detach()
    return got


@pytest.mark.parametrize("odd", [range(4), range(6, 9)], ids=["first", "midway"])
@pytest.mark.parametrize("manner", ["none", "frozen", "checkpointed", "subset"])
def test_odd_steps_train_exactly(manner: str, odd: range) -> None:
    """Whatever the layers do in some steps, all steps are equal to bare ones."""
    bare = _train(manner, odd, None)
    for options in OPTIONS:
        ours = _train(manner, odd, options)
        for theirs, own in zip(
            itertools.chain(*bare), itertools.chain(*ours), strict=True
        ):
            assert (theirs is None) == (own is None)
            assert theirs is None or own is None or torch.equal(theirs, own)
