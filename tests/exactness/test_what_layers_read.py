"""Recomputations read what their forwards read, and leave what they found."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import mimose

WIDTH = 8


class Layer(nn.Module):
    """Two products with something in between; what else it does is given."""

    def __init__(self, act=torch.tanh):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.act = act
        self.which, self.scale, self.flag = "a", 1.0, False
        self.factors, self.table, self.depth = [1.0, 2.0], {"x": 1.0}, 0
        self.seen = []

    def forward(self, x):
        """Run it."""
        return x + self.act(getattr(self, self.which)(x)) * self.scale


class Chain(nn.Module):
    """Three layers and a loss."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        """Run it."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _run(make, loop, planner):
    torch.manual_seed(0)
    model = make()
    drawn, found = torch.Generator().manual_seed(1), []
    budget = contextlib.nullcontext()
    if planner is not None:
        budget = mimose.attach(model, "1TiB", planner=planner, meter="prediction")
    with budget:
        for step in range(7):
            torch.manual_seed(step)
            x = torch.randn(2, 4 + step % 3, WIDTH, generator=drawn)
            loop(model, x, step)
            grads = [p.grad for p in model.parameters()]
            found.append([None if g is None else g.clone() for g in grads])
            found[-1] += [buffer.clone() for buffer in model.buffers()]
            model.zero_grad()
    kept = [] if planner is None else session_kept(budget)
    return found, kept, model


def session_kept(session):
    """Return the names of the layers that a session has to keep."""
    return list(session.summary().kept_units)


def _differences(make, loop=None, planner="full"):
    """Return the steps that are unequal, the layers kept, and both models."""
    loop = loop or (lambda model, x, step: model(x).backward())
    bare, _, alone = _run(make, loop, None)
    ours, kept, model = _run(make, loop, planner)
    unequal = [
        step
        for step, (one, other) in enumerate(zip(bare, ours, strict=True))
        if not all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(one, other, strict=True)
        )
    ]
    return unequal, kept, alone, model


class Reads(Layer):
    """Reads all its attributes."""

    def forward(self, x):
        """Run it."""
        y = self.drop(getattr(self, self.which)(x)) * self.factors[-1]
        y = y * getattr(self, "scale", 2.0)
        y = torch.tanh(y) if self.flag else torch.sigmoid(y)
        return x + self.act(y) * self.table["x"] * getattr(self, "extra", 1.0)


def _put_away(layer):
    del layer.scale


_CHANGES = {
    "function": lambda layer: setattr(layer, "act", torch.sin),
    "put in": lambda layer: setattr(layer, "extra", 2.0),
    "taken out": _put_away,
    "module": lambda layer: setattr(layer, "a", layer.b),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_what_is_changed_between_forward_and_backward(change):
    """The recomputation finds it as the forward did; the change stays."""

    def loop(model, x, step):
        loss = model(x)
        if step == 4:
            for layer in model.layers:
                _CHANGES[change](layer)
        loss.backward()

    unequal, kept, alone, model = _differences(lambda: Chain(Reads), loop)
    assert ([], []) == (unequal, kept)
    for one, other in zip(alone.layers, model.layers, strict=True):
        names = ("which", "flag", "factors", "table", "extra", "depth", "training")
        for name in names:
            assert getattr(one, name, None) == getattr(other, name, None)


def test_what_hooks_collect_is_let_go():
    """A list of activations that nobody has any more does not stay for a graph."""
    torch.manual_seed(0)
    model = Chain()
    with mimose.attach(model, "1TiB", planner="full", meter="prediction"):
        for _ in range(4):
            acts = []
            handle = model.layers[0].a.register_forward_hook(
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

    class Collects(Layer):
        def forward(self, x):
            self.seen = []
            y = torch.tanh(self.a(x))
            self.seen.append(y)
            return x + self.b(y)

    model = Chain(Collects)
    gone = []
    with mimose.attach(model, "1TiB", planner="full", meter="prediction"):
        for _ in range(5):
            model(torch.randn(2, 4, WIDTH)).backward()
            gone.append(weakref.ref(model.layers[0].seen[0]))
    model.layers[0].seen = model.layers[1].seen = model.layers[2].seen = []
    gc.collect()
    assert [None] * 5 == [ref() for ref in gone]


def _draws(_, __, ___):
    torch.rand(3)


def _edits_keyword(_, __, keywords):
    keywords["scale"] = 3.0


class Keywords(nn.Module):
    """Takes a number by name, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        """Run it."""
        return {"h": self.inner(x) * scale, "scale": 1.0}


class OfHooks(Layer):
    """Passes keywords on, and reads what a hook may have set."""

    def __init__(self):
        super().__init__()
        self.passes = Keywords()

    def forward(self, x):
        """Run it."""
        given = self.passes(self.drop(self.act(self.a(x))), scale=1.0)
        return x + torch.tanh(given["h"] * given["scale"]) * self.scale


_TAKE_PART = {
    "draws": lambda layer: layer.a.register_forward_hook(_draws),
    "edits a keyword": lambda layer: layer.passes.register_forward_pre_hook(
        _edits_keyword, with_kwargs=True
    ),
    "edits what is returned": lambda layer: layer.passes.register_forward_hook(
        lambda _, __, given: given.update(scale=2.0)
    ),
    "sets an attribute": lambda layer: layer.a.register_forward_hook(
        lambda _, __, y: setattr(layer, "scale", y.shape[1] / 3)
    ),
}


@pytest.mark.parametrize("hook", _TAKE_PART.values(), ids=_TAKE_PART)
def test_hooks_that_take_part(hook):
    """They run again, though they came late."""

    def loop(model, x, step):
        if step == 3:
            for layer in model.layers:
                hook(layer)
        model(x).backward()

    assert [] == _differences(lambda: Chain(OfHooks), loop)[0]


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

    assert ([], []) == _differences(Chain, loop)[:2]
