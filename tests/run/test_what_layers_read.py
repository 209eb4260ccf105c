"""Recomputations read what their forwards read, and leave what they found."""

import contextlib
import functools
import gc
import types
import weakref
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

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


def _rrelu_late(layer, x):
    layer.depth += 0
    hidden = layer.a(x)
    rectify = functional.rrelu if x.shape[1] == 6 else torch.tanh
    return x + (rectify(hidden, training=True) if x.shape[1] == 6 else rectify(hidden))


class Late(Layer):
    """Ends in an operator that fills later what it saves, for one length alone."""

    def forward(self, x):
        """Run it."""
        return _rrelu_late(self, x)


class Normed(Layer):
    """Has running statistics, so that `checkpoint` serves it."""

    def __init__(self):
        super().__init__()
        self.norm, self.noise = nn.BatchNorm1d(WIDTH), nn.RReLU()

    def forward(self, x):
        """Run it."""
        return x + self.noise(self.norm(self.a(x).mT).mT)


@pytest.mark.parametrize(
    "layer",
    [
        functools.partial(Layer, nn.RReLU()),
        functools.partial(Layer, nn.RReLU(inplace=True)),
        functools.partial(Layer, lambda x: torch.rrelu(x, 0.1, 0.4, training=True)),
        Late,
        Normed,
    ],
    ids=["module", "in-place", "function", "one-length", "running-statistics"],
)
@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_an_operator_that_fills_later_what_it_saves(layer, planner):
    """Its recomputation does not end in its midst."""
    unequal, kept, *_ = _differences(lambda: Chain(layer), planner=planner)
    assert ([], []) == (unequal, kept)


class _Noted(torch.autograd.Function):
    """Saves a tensor that the layer fills after it, past autograd's eyes."""

    @staticmethod
    def forward(ctx, x, noise):
        ctx.save_for_backward(noise)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (noise,) = ctx.saved_tensors
        return gradient * noise, None


class FillsItself(Layer):
    """Fills, last of all, what its own Function has saved."""

    def forward(self, x):
        """Run it."""
        noise = torch.full_like(x, 7.0)
        output = x + _Noted.apply(self.a(x), noise)
        noise.data.fill_(0.5)
        return output


def test_a_tensor_of_an_own_function_that_is_filled_later():
    """It is found by comparing, in the first recomputation."""
    assert ([], []) == _differences(lambda: Chain(FillsItself))[:2]


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
    "text": lambda layer: setattr(layer, "which", "b"),
    "number": lambda layer: setattr(layer, "scale", 3.0),
    "flag": lambda layer: setattr(layer, "flag", True),
    "function": lambda layer: setattr(layer, "act", torch.sin),
    "list": lambda layer: layer.factors.append(5.0),
    "other list": lambda layer: setattr(layer, "factors", [9.0]),
    "dict": lambda layer: layer.table.update(x=4.0),
    "rate": lambda layer: setattr(layer.drop, "p", 0.75),
    "put in": lambda layer: setattr(layer, "extra", 2.0),
    "taken out": _put_away,
    "module": lambda layer: setattr(layer, "a", layer.b),
    "mode": lambda layer: layer.eval(),
    "hook": lambda layer: layer.a.register_forward_hook(lambda *_: _[2] * 2),
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


class GoesUp(Layer):
    """Counts, lists and sets something, and takes it back at its end."""

    def forward(self, x):
        """Run it."""
        self.depth += 1
        self.seen.append(self.depth)
        self.hidden = True
        y = x + torch.tanh(self.b(torch.tanh(self.a(x)))) * self.depth * len(self.seen)
        y = torch.sigmoid(y)
        self.depth -= 1
        self.seen.pop()
        del self.hidden
        return y


@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_what_a_forward_sets_and_takes_back(planner):
    """A recomputation that ends before takes it back, too."""
    unequal, kept, _, model = _differences(lambda: Chain(GoesUp), planner=planner)
    assert ([], []) == (unequal, kept)
    for layer in model.layers:
        assert (0, []) == (layer.depth, layer.seen)
        assert not hasattr(layer, "hidden")


class Counts(Layer):
    """Begins to count in mid-run, and reads its count."""

    is_on = False

    def forward(self, x):
        """Run it."""
        if self.is_on:
            self.depth += 1
            self.seen.append(x.shape[1])
        return x + self.drop(torch.tanh(self.a(x)) * (1 + self.depth + len(self.seen)))


def test_a_count_that_begins_late():
    """Each forward counts once, and each recomputation finds its own count."""

    def loop(model, x, step):
        Counts.is_on = step >= 4
        model(x).backward()

    unequal, kept, alone, model = _differences(lambda: Chain(Counts), loop)
    assert ([], []) == (unequal, kept)
    assert [layer.depth for layer in alone.layers] == [
        layer.depth for layer in model.layers
    ]
    assert alone.layers[0].seen == model.layers[0].seen


class Grows(Layer):
    """Makes its table anew for a longer input, with the length beside it."""

    def __init__(self):
        super().__init__()
        self.grow(4)

    def grow(self, n):
        """Make a table of n rows."""
        self.n = n
        self.register_buffer("rows", torch.linspace(0, 1, n)[:, None], persistent=False)

    def forward(self, x):
        """Run it."""
        if x.shape[1] > self.n:
            self.grow(x.shape[1])
        return x + torch.tanh(self.a(x)) * self.rows[: x.shape[1]]


class GrowsAndFollows(Grows):
    """Follows a mean in place besides."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        """Run it."""
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x) - torch.sin(x - self.mean)


@pytest.mark.parametrize("layer", [Grows, GrowsAndFollows])
@pytest.mark.parametrize("planner", ["full", "every-2", "none"])
def test_a_table_that_grows_late(planner, layer):
    """Buffers that are replaced late and numbers beside them go together."""

    def loop(model, x, step):
        model(torch.cat([x] * (1 + (step > 3)), 1)).backward()

    unequal, kept, alone, model = _differences(lambda: Chain(layer), loop, planner)
    assert ([], []) == (unequal, kept)
    assert [layer.n for layer in alone.layers] == [layer.n for layer in model.layers]


def _put_norm_in(model):
    for layer in model.layers:
        layer.act = None
        layer.add_module("act", nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))


class _Doubled(nn.Module):
    def forward(self, weight):
        """Run it."""
        return weight * 2


def _parametrize(model):
    for layer in model.layers:
        parametrize.register_parametrization(layer.a, "weight", _Doubled())


def _replace(model):
    for layer in model.layers:
        torch.manual_seed(7)
        layer.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def _replace_weight(model):
    for layer in model.layers:
        layer.a.weight = nn.Parameter(layer.a.weight.detach() * 2)


def _put_buffer_in(model):
    def hook(module, args):
        module.count += 1
        return args[0] * module.count

    for layer in model.layers:
        layer.a.register_buffer("count", torch.zeros(()))
        layer.a.register_forward_pre_hook(hook)


_SURGERY = {
    "replaced": _replace,
    "parametrized": _parametrize,
    "weight": _replace_weight,
    "buffer": _put_buffer_in,
    "hook": lambda model: [
        layer.a.register_forward_hook(lambda _, __, y: y * 2) for layer in model.layers
    ],
    "taken out": lambda model: [setattr(layer, "drop", None) for layer in model.layers],
}


@pytest.mark.parametrize("surgery", _SURGERY)
@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_surgery_between_steps(surgery, planner):
    """What is put in, taken out or replaced is read as it is from then on."""

    def loop(model, x, step):
        if step == 3:
            _SURGERY[surgery](model)
        model(x).backward()

    unequal, kept, *_ = _differences(Chain, loop, planner)
    assert ([], []) == (unequal, kept)


def test_surgery_that_is_undone():
    """A parametrization that is taken off again leaves a layer as any."""

    def loop(model, x, step):
        if step == 2:
            _parametrize(model)
        if step == 4:
            for layer in model.layers:
                parametrize.remove_parametrizations(layer.a, "weight")
        model(x).backward()

    assert ([], []) == _differences(Chain, loop)[:2]


class Attends(Layer):
    """Attends, and makes a tensor of the default type."""

    def forward(self, x):
        """Run it."""
        q = self.a(x)[:, None]
        y = functional.scaled_dot_product_attention(q, q, q)[:, 0]
        return x + self.b(y) * torch.rand(()).to(x.dtype)


@contextlib.contextmanager
def _doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _hooked(model):
    handles = [
        layer.a.register_forward_hook(lambda _, __, y: y * 3) for layer in model.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    "around",
    [
        lambda _: sdpa_kernel(SDPBackend.MATH),
        lambda _: _doubles(),
        lambda _: _deterministic(),
        _hooked,
    ],
    ids=["attention", "default-dtype", "determinism", "hooks"],
)
def test_what_stands_around_the_forward_alone(around):
    """It stands around the recomputations, and around nothing else."""

    def loop(model, x, step):
        with around(model):
            loss = model(x)
        loss.backward()

    unequal, kept, *_ = _differences(lambda: Chain(Attends), loop)
    assert ([], []) == (unequal, kept)
    assert torch.get_default_dtype() == torch.float32


def _append(calls, _, __, output):
    calls.append(output.detach())


def _change(calls, _, __, output):
    calls.append(1)
    return output * 2


@pytest.mark.parametrize("hook", [_append, _change])
def test_hooks_inside_a_layer(hook):
    """One that only watches runs once a forward; one that takes part runs again."""
    counts = []
    for planner in (None, "full"):
        calls = []

        def make(calls=calls):
            model = Chain()
            for layer in model.layers:
                layer.a.register_forward_hook(functools.partial(hook, calls))
            return model

        loop = _run(make, lambda model, x, _: model(x).backward(), planner)[0]
        counts.append((len(calls), loop))
    (bare, one), (ours, other) = counts
    flat = zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
    assert all(a is b or torch.equal(a, b) for a, b in flat)
    assert ours == (bare if hook is _append else 2 * bare)


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


class Configured(Layer):
    """Reads numbers of an object that all layers hold, and of one of its own."""

    shared = types.SimpleNamespace(scale=1.0, sizes=[1.0])

    def __init__(self):
        super().__init__()
        self.config, self.own = self.shared, types.SimpleNamespace(power=1)

    def forward(self, x):
        """Run it."""
        y = torch.tanh(self.a(x)) * self.config.scale * self.config.sizes[-1]
        return x + torch.sigmoid(y) ** self.own.power


@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_objects_that_layers_hold(planner):
    """Their numbers are those of the forward; what was set meanwhile stays."""

    def loop(model, x, step):
        config = model.layers[0].config
        config.scale, config.sizes = 1.0 + step, [2.0]
        loss = model(x)
        if step > 2:
            config.scale, model.layers[1].own.power = 9.0, 1 + step
            config.sizes.append(3.0)
        loss.backward()

    unequal, kept, alone, model = _differences(lambda: Chain(Configured), loop, planner)
    assert ([], []) == (unequal, kept)
    assert (9.0, [2.0, 3.0]) == (Configured.shared.scale, Configured.shared.sizes)
    assert alone.layers[1].own == model.layers[1].own


class TakesGradient(Layer):
    """Counts in a dict, and takes a gradient of what it has computed so far."""

    def forward(self, x):
        """Run it."""
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        self.table["x"] += 1.0
        y = functional.softplus(self.a(x)).sum() * self.table["x"]
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return x - slope / 9 + self.b(x) * self.table["x"]


@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_a_recomputation_in_the_midst_of_its_forward(planner):
    """It reads what the forward has found, and leaves what that has set by then."""
    counts = []

    def make():
        model, calls = Chain(TakesGradient), []
        for layer in model.layers:
            layer.a.register_forward_hook(functools.partial(_append, calls))
        counts.append(calls)
        return model

    unequal, _, alone, model = _differences(make, planner=planner)
    assert [] == unequal
    assert len(counts[0]) == len(counts[1])
    for one, other in zip(alone.layers, model.layers, strict=True):
        assert one.table == other.table


class UpAndDown(Layer):
    """Changes something for as long as it saves what it needs last."""

    def __init__(self):
        super().__init__()
        self.now = types.SimpleNamespace(depth=0)
        self.nested = {"k": [1.0]}
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        """Run it."""
        h = self.b(self.drop(self.act(self.a(x))))
        self.set(1)
        h = torch.sigmoid(self.drop(self.b(h))) * self.gain * (1 + self.now.depth)
        h = h * sum(self.nested["k"])
        self.set(-1)
        return x + h


def _mode(layer, by):
    layer.drop.train(by < 0)


def _learns(layer, by):
    layer.b.requires_grad_(by < 0)


def _module(layer, by):
    if by > 0:
        layer.was, layer.drop = layer.drop, nn.Tanh()
    else:
        layer.drop = layer.was


def _buffer(layer, by):
    layer.gain = torch.full((), 1.0 + max(by, 0))


def _hook(layer, by):
    if by > 0:
        layer.handle = layer.b.register_forward_hook(lambda _, __, y: y * 2)
    else:
        layer.handle.remove()


def _object(layer, by):
    layer.now.depth += by


def _nested(layer, by):
    layer.nested["k"].append(2.0) if by > 0 else layer.nested["k"].pop()


def _dtype(layer, by):
    torch.set_default_dtype(torch.float64 if by > 0 else torch.float32)


@pytest.mark.parametrize("planner", ["full", "every-2"])
@pytest.mark.parametrize(
    "change", [_mode, _learns, _module, _hook, _object, _nested, _dtype, _buffer]
)
def test_what_is_set_back_behind_the_last_tensor_saved(change, planner):
    """A recomputation does not end in between, and leaves nothing behind."""

    class Changes(UpAndDown):
        set = change

    unequal, _, alone, model = _differences(lambda: Chain(Changes), planner=planner)
    assert [] == unequal
    assert torch.get_default_dtype() == torch.float32
    for one, other in zip(alone.layers, model.layers, strict=True):
        assert one.now == other.now
        assert one.nested == other.nested
        assert type(one.drop) is type(other.drop)
        assert one.drop.training == other.drop.training
        assert len(one.b._forward_hooks) == len(other.b._forward_hooks)


class OfObject(Layer):
    """Reads an object, and may count on it."""

    shared = types.SimpleNamespace(scale=1.0, names=["a"])

    def __init__(self):
        super().__init__()
        self.own = types.SimpleNamespace(scale=1.0, n=0)
        self.of_all = OfObject.shared

    def forward(self, x):
        """Run it."""
        self.own.n += 1
        return x + self.act(self.a(x)) * self.own.scale * self.of_all.scale


class SetsObjects(Chain):
    """Sets objects of its layers between these, from a step on."""

    step, late = 0, 0

    def __init__(self):
        super().__init__(OfObject)
        OfObject.shared.scale = 1.0

    def forward(self, x):
        """Run it."""
        for index, layer in enumerate(self.layers):
            if self.step >= self.late:
                layer.of_all.scale = 1.0 + index + self.step
                layer.own.scale = index + self.step
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("planner", ["full", "every-2"])
def test_objects_that_a_forward_sets(planner, late):
    """Each layer finds again what it has found, also where that is new."""

    def loop(model, x, step):
        model.step, model.late = step, late
        model(x).backward()

    unequal, kept, alone, model = _differences(SetsObjects, loop, planner)
    assert ([], []) == (unequal, kept)
    for one, other in zip(alone.layers, model.layers, strict=True):
        assert one.own == other.own


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


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("hook", _TAKE_PART.values(), ids=list(_TAKE_PART))
def test_hooks_that_take_part(hook, late):
    """They run again, whenever they came."""

    def loop(model, x, step):
        if step == late:
            for layer in model.layers:
                hook(layer)
        model(x).backward()

    assert [] == _differences(lambda: Chain(OfHooks), loop)[0]


class Averages(Layer):
    """Begins late to keep an average of its activations."""

    step = 0

    def __init__(self):
        super().__init__()
        self.average = None

    def forward(self, x):
        """Run it."""
        h = self.act(self.a(x))
        if Averages.step >= 3:
            mean = h.detach().mean()
            self.average = mean if self.average is None else (self.average + mean) / 2
            h = h * self.average
        return x + h


def test_a_tensor_that_comes_late_among_the_attributes():
    """It is seen before a recomputation would begin with another."""

    def loop(model, x, step):
        Averages.step = step
        model(x).backward()

    assert [] == _differences(lambda: Chain(Averages), loop)[0]


class _Sines(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.sin if function is torch.tanh else function
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("late", [0, 4])
def test_modes_around_a_forward(late):
    """They are found again in backward."""

    def loop(model, x, step):
        with _Sines() if step >= late else contextlib.nullcontext():
            loss = model(x)
        loss.backward()

    assert ([], []) == _differences(Chain, loop)[:2]


def test_warnings_alone_of_what_is_not_deterministic():
    """The flag is set back as it was, warnings and all."""

    def loop(model, x, step):
        loss = model(x)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            loss.backward()
            assert torch.get_deterministic_debug_mode() == 1
        finally:
            torch.use_deterministic_algorithms(False)

    assert ([], []) == _differences(Chain, loop)[:2]


def test_containers_that_hold_themselves_or_much():
    """They are let alone; a hook's attribute on one of torch's modules is, too."""

    class Holds(Layer):
        def __init__(self):
            super().__init__()
            self.itself, self.much = {}, list(range(5000))
            self.itself["me"] = self.itself

        def forward(self, x):
            return x + self.act(self.a(x)) * (self.itself["me"] is self.itself)

    def loop(model, x, step):
        if step == 3:
            for layer in model.layers:
                layer.a.gain = 2.0
                layer.a.register_forward_hook(lambda m, _, y: y * m.gain)
        model(x).backward()

    assert ([], []) == _differences(lambda: Chain(Holds), loop)[:2]


def test_a_session_that_is_kept_holds_no_layer():
    """Neither the model nor a layer of it outlives the session's end."""
    model = Chain()
    session = mimose.attach(model, "1TiB", planner="full", meter="prediction")
    model(torch.randn(2, 4, WIDTH)).backward()
    session.detach()
    gone = weakref.ref(model.layers[1].a.weight)
    del model
    gc.collect()
    assert gone() is None
    assert session.summary().steps == 1
