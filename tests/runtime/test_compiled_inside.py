"""Layers that run compiled code without being compiled: exact, counted, recomputed."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import mimose

# dynamo itself looks at .grad of what it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _afresh():
    """Compile nothing that another test has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _gate(x, w):
    return gelu(x * w) * torch.sigmoid(x) * x


class Base(nn.Module):
    """What all layers here have."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(16))
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def gate(self, x):
        """Run what is compiled; here nothing is."""
        return _gate(x, self.w)

    def forward(self, x):
        """Run it between two products."""
        return x + self.b(self.gate(self.a(x)))


def _closure(backend):
    compiled = torch.compile(_gate, backend=backend)

    class Layer(Base):
        def gate(self, x):
            return compiled(x, self.w)

    return Layer


def _out_of_sight(backend):
    class Tools:
        gate = staticmethod(torch.compile(_gate, backend=backend))

    class Layer(Base):
        def gate(self, x):
            return getattr(Tools, "gat" + "e")(x, self.w)

    return Layer


ALL = [_closure, _out_of_sight]


class Chain(nn.Module):
    """A few of a kind, one behind the other."""

    def __init__(self, layer, n_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(n_layers))

    def forward(self, x):
        """Return a loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train(layer, n_steps=4, **options):
    """Return the gradients of each step, and the session, if there is one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found, session = Chain(layer), [], None
    if options:
        session = mimose.attach(model, **options)
    for i in range(n_steps):
        x = torch.randn(4, 8 + 3 * i % 7, 16)
        loss = model(x)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    if session is not None:
        session.detach()
    return found, session


def _are_equal(one, other):
    pairs = zip(one, other, strict=True)
    return all(all(map(torch.equal, a, b)) for a, b in pairs)


@pytest.mark.parametrize("make", ALL)
def test_it_is_recomputed_from_the_first_step_on(toys, make):
    """Exactly; and no layer is kept."""
    layer = make("aot_eager")
    bare, _ = _train(layer)
    full = {"budget": "1TiB", "planner": "full", "meter": toys.BlindMeter()}
    ours, session = _train(layer, **full)
    assert _are_equal(bare, ours)
    assert session.summary().kept_units == {}
    assert {r.actions for r in session.records} == {2 * ("recompute",)}


def test_it_is_exact_under_any_plan(toys):
    """Whatever is known of it when it is measured and planned for."""
    layer = _closure("aot_eager")
    bare, _ = _train(layer, 7)
    ours, session = _train(
        layer,
        7,
        budget="1TiB",
        actions="selective",
        planner=toys.RandomPlanner(),
        cache_size=1,
        meter=toys.BlindMeter(),
    )
    assert _are_equal(bare, ours)
    assert session.summary().kept_units == {}
    assert not any("selective" in a for r in session.records for a in r.actions or ())
