"""TorchScript anywhere in a model: it trains exactly, and what runs it is kept."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import mimose
from mimose.exceptions import MimoseError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
]
# The executor knows what it has run before: each training has code of its own.


class Base(nn.Module):
    """What all layers here have; none of it is scripted."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(16))
        self.b = nn.Linear(16, 16)

    def forward(self, x):
        """Run a product."""
        return x + torch.tanh(self.b(x) * self.w)


def _function():
    def gate(x, w):
        return gelu(x * w) * torch.sigmoid(x) * x

    return torch.jit.script(gate)


def _module():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            y = gelu(self.linear(x)) * torch.sigmoid(x) * x
            return self.norm(y.transpose(1, 2)).transpose(1, 2)

    return Inner


def _in_a_closure():
    gate = _function()

    class Layer(Base):
        def forward(self, x):
            return x + self.b(gate(x, self.w))

    return Layer


def _as_a_layer():
    inner = _module()
    return lambda: torch.jit.script(inner())


PLACES = [_in_a_closure, _as_a_layer]


def _out_of_sight():
    class Tools:
        gate = staticmethod(_function())

    class Layer(Base):
        def forward(self, x):
            return x + self.b(getattr(Tools, "gat" + "e")(x, self.w))

    return Layer


class Chain(nn.Module):
    """Some layers, one behind the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        """Return a loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train(make, n_steps=12, **options):
    """Return gradients and buffers of each step, errors, and which layers are kept."""
    torch.manual_seed(0)
    model, found, failed, session = make(), [], [], None
    if options:
        session = mimose.attach(model, **options)
    for i in range(n_steps):
        x = torch.randn(4, 8 + i % 4, 16, requires_grad=i % 3 == 2)
        try:
            model(x).backward()
        except mimose.MimoseError as error:
            failed.append(error)
        tensors = [p.grad for p in model.parameters()]
        found.append([*tensors, *(b.clone() for b in model.buffers())])
        model.zero_grad()
    kept = {}
    if session is not None:
        kept = session.summary().kept_units
        session.report()
        session.detach()
    return found, failed, kept


def _are_equal(one, other):
    pairs = zip(one, other, strict=True)
    return all(all(map(torch.equal, a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("place", "how"), [*((place, "full") for place in PLACES), (PLACES[0], "fine")]
)
def test_layers_that_run_it_are_kept_and_exact(toys, place, how):
    """With a reason from the start; the other layers are recomputed."""

    def make():
        layer = place()
        return Chain([layer(), layer(), *(nn.Sequential(Base()) for _ in range(3))])

    options = {"budget": "1TiB", "meter": toys.BlindMeter()}
    options |= {"full": {"planner": "full"}, "fine": {"actions": "selective"}}[how]
    layers = {"layers": "layers"}
    bare, _, _ = _train(make)
    ours, failed, kept = _train(make, **options, **layers)
    assert _are_equal(bare, ours)
    assert not failed
    assert list(kept) == ["layers.0", "layers.1"]
    assert all("TorchScript" in why for why in kept.values())


def test_it_may_stand_beside_the_layers(toys):
    """These are recomputed as ever."""

    def make():
        return Chain([torch.jit.script(_module()()), *(Base() for _ in range(3))])

    full = {"budget": "1TiB", "planner": "full", "meter": toys.BlindMeter()}
    bare, _, _ = _train(make)
    ours, failed, kept = _train(make, **full)
    assert _are_equal(bare, ours)
    assert (failed, kept) == ([], {})


@pytest.mark.parametrize("n_layers", [1, 3])
def test_what_cannot_be_seen_fails_once_at_most(toys, n_layers):
    """In words; the steps behind it are exact."""

    def make():
        layer = _out_of_sight()
        return Chain([*(layer() for _ in range(n_layers)), Base()])

    full = {"budget": "1TiB", "planner": "full", "meter": toys.BlindMeter()}
    bare, _, _ = _train(make)
    ours, failed, kept = _train(make, **full, layers="layers")
    assert _are_equal(bare[1:], ours[1:])
    assert len(failed) <= 1
    assert any("TorchScript" in why for why in kept.values())


def test_a_model_scripted_as_a_whole_is_refused():
    """In words that say why."""
    with pytest.raises(MimoseError, match="scripted as a whole"):
        mimose.attach(torch.jit.script(_module()()), "1GiB")
