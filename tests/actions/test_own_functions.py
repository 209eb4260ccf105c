"""Users' own autograd Functions, recomputed as torch's documentation allows them.

More of them, plainer ones, are parts of random programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose


def _product(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    return grad * w, (grad * x).sum(0)


class _Inputs(torch.autograd.Function):
    """Saves what it is given, and nothing in between; the others differ from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, None, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, _, w = ctx.saved_tensors
        return _product(grads[0], x, w)


class _Needed(_Inputs):
    """Saves and gives what is needed alone, and lets go of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        x_grad, w_grad = _product(grads[0], x, w)
        return (x_grad if ctx.needs_input_grad[0] else None), w_grad


class _ReadAgain(_Inputs):
    """Reads what it saved three times, once inside of another backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, *_) = ctx.saved_tensors
        found: list[Any] = []
        with torch.enable_grad():
            leaf = torch.ones(1, requires_grad=True)
            inner = leaf * 2
            inner.register_hook(lambda _: found.extend(ctx.saved_tensors))
            torch.autograd.grad(inner.sum(), leaf)
        (*_, w) = ctx.saved_tensors
        return _product(grads[0], x + 0 * found[0], w)


class _View(_Inputs):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, None, w)
        return x.view_as(x)


class _Nested(_Inputs):
    """Runs another one, and a checkpoint, within a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.enable_grad():
            both = x.detach().requires_grad_(), w.detach().requires_grad_()
            ctx.y = checkpoint(_Inputs.apply, *both, use_reentrant=False).tanh()
        ctx.save_for_backward(*both)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        both = ctx.saved_tensors
        return torch.autograd.grad(ctx.y, both, grads[0], retain_graph=True)


@torch.library.custom_op("mimose_tests::product", mutates_args=())
def _operator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


_operator.register_autograd(
    lambda ctx, grad: _product(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


_FUNCTIONS = [_Inputs, _Needed, _ReadAgain, _View, _Nested]
_WAYS = [*(f.apply for f in _FUNCTIONS), _operator]
_NAMES = [f.__name__ for f in _FUNCTIONS] + ["operator"]
_DIFFERENTIABLE = [_Inputs, _ReadAgain, _View]


class _Layer(nn.Module):
    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.full((4,), 1.5))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.way(self.linear(x).tanh() * 1, self.weight)
        y = y[0] if isinstance(y, tuple) else y
        return y.sin()


def _plainly(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _penalised(model: nn.Module, x: torch.Tensor) -> None:
    x.requires_grad_()
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.pow(2).sum()).backward()


def _train(
    way: Callable[..., Any],
    run: Callable[[nn.Module, torch.Tensor], None],
    n_steps: int = 3,
    **options: Any,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Layer(way) for _ in range(3)])
    session = mimose.attach(model, **options) if options else None
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for n_rows in range(2, 2 + n_steps):
        run(model, torch.ones(n_rows, 4))
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        assert not session.summary().kept_units
        session.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("way", _WAYS, ids=_NAMES)
def test_gradients_are_those_of_bare_training(way: Callable[..., Any]) -> None:
    """No layer is kept, nothing fails, and weights are equal to the bit."""
    plain = _train(way, _plainly)
    mine = _train(way, _plainly, budget="1TiB", planner="full")
    assert all(map(torch.equal, mine, plain))
    mine = _train(way, _plainly, budget="1TiB", actions="selective")
    assert all(map(torch.equal, mine, plain))


@pytest.mark.parametrize("function", _DIFFERENTIABLE)
def test_gradients_of_gradients(function: Any) -> None:
    """So it is where a gradient is taken of a gradient."""
    plain = _train(function.apply, _penalised)
    mine = _train(function.apply, _penalised, budget="1TiB", planner="full")
    assert all(map(torch.equal, mine, plain))
