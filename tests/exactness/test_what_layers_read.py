"""Recomputations read what their forwards read, and leave what they found."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from toys import chain

import mimose

WIDTH = 8


class Reads(nn.Module):
    """Two products, dropout, and attributes that are all read."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)
        self.act = torch.tanh
        self.which, self.scale, self.flag = "a", 1.0, False
        self.factors, self.table = [1.0, 2.0], {"x": 1.0}

    def forward(self, x):
        """Run it."""
        y = self.drop(getattr(self, self.which)(x)) * self.factors[-1]
        y = y * getattr(self, "scale", 2.0)
        y = torch.tanh(y) if self.flag else torch.sigmoid(y)
        return x + self.act(y) * self.table["x"] * getattr(self, "extra", 1.0)


def _run(loop, planner):
    """Train; return gradients of each step, the layers kept, and the model."""
    model = chain(3, WIDTH, Reads)
    drawn, found, kept = torch.Generator().manual_seed(1), [], {}
    around = contextlib.nullcontext()
    if planner is not None:
        around = mimose.attach(model, "1TiB", planner=planner, meter="prediction")
    with around:
        for step in range(7):
            torch.manual_seed(step)
            x = torch.randn(2, 4 + step % 3, WIDTH, generator=drawn)
            loop(model, x, step)
            found += [p.grad for p in model.parameters()]
            model.zero_grad()
    if planner is not None:
        kept = around.summary().kept_units
    return found, kept, model


def _check(loop):
    """Train bare and under a session: all is equal, and no layer is kept."""
    bare, _, alone = _run(loop, None)
    ours, kept, model = _run(loop, "full")
    assert {} == kept
    pairs = zip(bare, ours, strict=True)
    assert all(one is other or torch.equal(one, other) for one, other in pairs)
    return alone, model


_CHANGES = {
    "function": lambda layer: setattr(layer, "act", torch.sin),
    "put in": lambda layer: setattr(layer, "extra", 2.0),
    "taken out": lambda layer: delattr(layer, "scale"),
    "module": lambda layer: setattr(layer, "a", layer.b),
    "hook": lambda layer: layer.a.register_forward_hook(lambda _, __, out: 2.0 * out),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_is_changed_between_forward_and_backward(change):
    """The recomputation finds it as the forward did; the change stays."""

    def loop(model, x, step):
        loss = model(x)
        if step == 4:
            for layer in model.blocks:
                _CHANGES[change](layer)
        loss.backward()

    alone, model = _check(loop)
    for one, other in zip(alone.blocks, model.blocks, strict=True):
        for name in ("act", "scale", "which", "flag", "factors", "table", "extra"):
            assert getattr(one, name, None) == getattr(other, name, None)
        assert (one.a is one.b) == (other.a is other.b)


def test_what_hooks_collect_is_let_go():
    """A list of activations that nobody has any more does not stay for a graph."""
    model = chain(3, WIDTH, Reads)
    with mimose.attach(model, "1TiB", planner="full", meter="prediction"):
        for _ in range(4):
            acts = []
            handle = model.blocks[0].a.register_forward_hook(
                lambda _, __, y, acts=acts: acts.append(y)
            )
            loss = model(torch.randn(2, 4, WIDTH))
            loss.backward()
            handle.remove()
            gone = weakref.ref(acts[0])
            del acts, loss, handle
            gc.collect()
            assert gone() is None


def test_old_values_hold_no_old_steps():
    """A layer that collects its activations anew each time keeps one step's alive."""

    class Collects(Reads):
        def forward(self, x):
            self.seen = []
            y = torch.tanh(self.a(x))
            self.seen.append(y)
            return x + self.b(y)

    model = chain(3, WIDTH, Collects)
    gone = []
    with mimose.attach(model, "1TiB", planner="full", meter="prediction"):
        for _ in range(5):
            model(torch.randn(2, 4, WIDTH)).backward()
            gone.append(weakref.ref(model.blocks[0].seen[0]))
    model.blocks[0].seen = model.blocks[1].seen = model.blocks[2].seen = []
    gc.collect()
    assert [None] * 5 == [ref() for ref in gone]


class _Sines(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.sin if function is torch.tanh else function
        return function(*args, **kwargs or {})


def test_modes_around_a_forward():
    """They are found again in backward."""

    def loop(model, x, step):
        with _Sines() if step >= 4 else contextlib.nullcontext():
            loss = model(x)
        loss.backward()

    _check(loop)
