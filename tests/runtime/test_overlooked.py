"""Layers that training never calls are told of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mimose


class Layer(nn.Module):
    """A small layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    """Layers, some of which are called, run in parts or left out."""

    def __init__(self, manners: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in manners)
        self.manners = manners

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run each layer in its manner: called, in parts or not at all."""
        x = self.first(x)
        for manner, layer in zip(self.manners, self.layers, strict=True):
            if manner == "c":
                x = layer(x)
            elif manner == "p":
                x = x + layer.b(torch.tanh(layer.a(x)))
        return x.square().mean()


def _session(model: nn.Module) -> mimose.Session:
    return mimose.attach(model, "+300MiB", meter="prediction", refine=False)


def _train(model: nn.Module, n: int) -> None:
    for i in range(n):
        model(torch.randn(2, 4 + i % 3, 8)).backward()


def _told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [message for message in caplog.messages if words in message]


@pytest.mark.parametrize("manners", ["ppppp", "ccnnn"])
def test_layers_never_called_are_told_of(
    manners: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names them; report and records too."""
    model = Model(manners)
    with _session(model) as session:
        _train(model, 4)
        assert not _told(caplog, "never called")
        _train(model, 8)
        report = session.report(100)
        names = session.summary().uncalled_units
        reason = session.records[-1].reason
    (told,) = _told(caplog, "never called")
    n_left = len(manners) - manners.count("c")
    assert f"{n_left} of 5 layers were never called" in told
    assert names[0] in told
    assert "attach(layers=...)" in told
    assert [f"layers.{i}" for i, m in enumerate(manners) if m != "c"] == list(names)
    assert all(name in report for name in names)
    assert ("no layer" in reason) == ("c" not in manners)
