"""Hooks of saved tensors forbidden, transforms of torch.func, forward-mode gradients.

Each inside of layers, around layers in the model's forward, and around the model.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import mimose

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def _hooks_forbidden(f, x):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return f(x)


def _dual(f, x):
    with forward_ad.dual_level():
        both = f(forward_ad.make_dual(x, torch.ones_like(x)))
        value, tangent = forward_ad.unpack_dual(both)
        return value + tangent


def _jvp(f, x):
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def _grad(f, x):
    return x + torch.func.grad(lambda z: f(z).sum())(x)


def _vmap(f, x):
    return torch.func.vmap(f)(x)


def _cached(f, x):
    with parametrize.cached():
        return f(x)


def _plainly(f, x):
    return f(x)


WAYS = [_hooks_forbidden, _dual, _jvp, _grad, _vmap, _cached]


class _Layer(nn.Module):
    """Counts its calls in a buffer, and draws; a part of it runs in some way."""

    def __init__(self, way) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(4, 4))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(()) if self.way is not _plainly else 1
        return self.way(lambda z: self.linear(self.linear(z)).sin(), x) * noise


class _Model(nn.Module):
    def __init__(self, within, around) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(within) for _ in range(3))
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.around(layer, x)
        return x


def _train(session_of, within, around, outside) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Model(within, around)
    session = session_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for n_rows in (2, 3, 4):
        outside(model, torch.ones(n_rows, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.detach()
    return [p.detach() for p in model.parameters()]


def _check(planner: str, *ways) -> None:
    plain = _train(lambda _: None, *ways)
    ours = _train(lambda m: mimose.attach(m, "1TiB", planner=planner), *ways)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("way", WAYS)
def test_within_and_around_layers(way) -> None:
    """No step fails, and weights are those of bare training."""
    _check("full", way, _plainly, _plainly)
    _check("full", _plainly, way, _plainly)


@pytest.mark.parametrize("way", WAYS)
def test_around_the_model(way) -> None:
    """So they are around the model; planners refuse transforms of torch.func."""
    _check("full", _plainly, _plainly, way)
    refuses = way in (_jvp, _grad, _vmap)
    refused = pytest.raises(mimose.MimoseError, match="transform")
    with refused if refuses else contextlib.nullcontext():
        _check("auto", _plainly, _plainly, way)


@pytest.mark.parametrize(
    ("within", "outside"), [(_grad, _plainly), (_plainly, _hooks_forbidden)]
)
def test_layers_that_forbid_hooks_are_kept_at_once(within, outside) -> None:
    """They are found in the first step, which does not fail, and the reason is told."""
    model = _Model(within, _plainly)
    with mimose.attach(model, budget="1TiB", planner="full") as session:
        outside(model, torch.ones(2, 4)).sum().backward()
    kept = session.summary().kept_units
    assert len(kept) == 3
    assert "hooks of saved tensors" in kept["layers.0"]
