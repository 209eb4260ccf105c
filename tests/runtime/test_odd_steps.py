"""Steps that run nothing of what was learned, between ordinary ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose
from mimose.measure.trace import INNER_GRADIENT

PLANNED = {"planner": "auto", "actions": "selective"}
OPTIONS: list[dict[str, Any]] = [
    {**options, "refine": False, "meter": "prediction"}
    for options in ({"planner": "full"}, PLANNED)
]


TAKES = ("force", "backward inside", "twice inside", "weights' gradient")
REASONS = {
    **dict.fromkeys(TAKES, INNER_GRADIENT),
    "none": "no layer",
    "frozen": "without gradients",
    "reentrant": "without gradients",
    "twice": "more layers ran",
    "nothing": "NoneType",
    "cut off": "need no gradient",
}


class Layer(nn.Module):
    """A small layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.manner = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it, or let it be checkpointed inside, or return what it is given."""
        if self.manner.startswith("inside"):
            is_reentrant = self.manner == "inside, reentrant"
            return x + checkpoint(self._change, x, use_reentrant=is_reentrant)
        return x if self.manner == "same" else x + self._change(x)

    def _change(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class Model(nn.Module):
    """Layers that run in the manner that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.manner = ""
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run the layers, or some, or none; return the loss, or hide it."""
        y = self.first(x)
        if self.manner == "frozen":
            with torch.no_grad():
                for layer in self.layers:
                    y = layer(y)
        elif self.manner != "none":
            for at, layer in enumerate(self.layers):
                if self.manner == "subset" and at % 2:
                    continue
                if self.manner in ("checkpointed", "reentrant"):
                    is_reentrant = self.manner == "reentrant"
                    y = checkpoint(layer, y, use_reentrant=is_reentrant)
                else:
                    y = layer(layer(y)) if self.manner == "twice" else layer(y)
        self.loss = self.head(y).mean()
        if self.manner in TAKES:
            self.loss = self.loss + _gradient_inside(self, x, y)
        if self.manner == "nothing":
            return None
        return self.loss.detach() if self.manner == "cut off" else self.loss


def _force(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return found


def _gradient_inside(
    model: Model, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor | float:
    """Take a gradient inside of the forward, in the way that is set."""
    if model.manner == "backward inside":
        y.square().sum().backward(retain_graph=True)
        return 0.0
    if model.manner == "weights' gradient":
        x = model.layers[0].a.weight
    found = _force(x, y)
    return (
        (_force(x, found) if model.manner == "twice inside" else found).square().mean()
    )


def _train(
    manner: str, odd: range, options: dict[str, Any] | None
) -> tuple[list[torch.Tensor | None], list[str], list[str]]:
    torch.manual_seed(0)
    model = Model()
    got: list[torch.Tensor | None] = []
    told: list[str] = []
    kept: list[str] = []
    session = mimose.attach(model, "+300MiB", **options) if options else None
    for i in range(odd.stop + 2):
        model.manner = manner if i in odd else ""
        for layer in model.layers:
            layer.manner = model.manner
        model(torch.randn(4, 6 + i % 4, 16, requires_grad=manner in TAKES))
        loss, model.loss = model.loss, None
        loss.backward()
        got += [p.grad for p in model.parameters()]
        model.zero_grad()
    if session is not None:
        session.detach()
        told = [record.reason for record in session.records]
        kept = list(session.summary().kept_units.values())
    return got, told, kept


MANNERS = ["checkpointed", "inside", "inside, reentrant", "same", "subset", *REASONS]


_AT_FIRST = [("checkpointed", range(2)), ("twice", range(2))]


@pytest.mark.parametrize(
    ("manner", "odd"), [*((manner, range(9, 11)) for manner in MANNERS), *_AT_FIRST]
)
def test_odd_steps_train_exactly(manner: str, odd: range) -> None:
    """Whatever layers do, all steps are equal to bare ones; the record says why."""
    bare, *_ = _train(manner, odd, None)
    for options in OPTIONS:
        ours, told, kept = _train(manner, odd, options)
        for theirs, own in zip(bare, ours, strict=True):
            assert (theirs is None) == (own is None)
            assert theirs is None or own is None or torch.equal(theirs, own)
        if options["planner"] == "full":
            own = ["the model itself checkpoints it"] * 3
            assert (own if manner == "checkpointed" else []) == kept
    if odd.start and manner in REASONS:
        assert REASONS[manner] in told[odd.start]
