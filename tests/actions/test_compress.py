"""Lossy actions in training: what they change, by how much, and what they do not."""

import copy

import pytest
import torch
from torch import nn

import mimose

LOSSY = ("pool", "pool4", "quantize", "quantize4")


class _Residual(nn.Module):
    """Ends with a ReLU, which saves what it returns."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        made = self.second(torch.relu(self.norm(self.first(x))))
        return torch.relu(made + x)


class _Images(nn.Module):
    def __init__(self, n_blocks=3, width=8):
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(n_blocks))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean((2, 3))))


def _smooth(side=16, batch=4, dtype=torch.float32):
    torch.manual_seed(11)
    small = torch.randn(batch, 3, side // 4, side // 4)
    return nn.functional.interpolate(small, size=(side, side), mode="bilinear").to(
        dtype
    )


def _gradients(model, x, options=None, *, n_steps=1):
    """Train some steps; return the last's gradients and where random numbers stand."""
    session = mimose.attach(model, "1TiB", **options) if options else None
    for _ in range(n_steps):
        model.zero_grad()
        torch.manual_seed(3)
        model(x).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    state, summary = torch.get_rng_state(), None
    if session is not None:
        summary = session.summary()
        session.detach()
    return found, state, summary


def _always(toys, action, **more):
    menu = ("keep", action, "recompute")
    return {
        "actions": menu,
        "planner": toys.everywhere(action),
        "layers": _Residual,
        **more,
    }


def _error(exact, other):
    off = sum((exact[n] - other[n]).double().square().sum() for n in exact)
    return float((off / sum(g.double().square().sum() for g in exact.values())).sqrt())


@pytest.mark.parametrize("action", LOSSY)
def test_gradients_come_close_and_random_numbers_stay(toys, action):
    """Dropout draws the same."""
    exact, state, _ = _gradients(_Images(), _smooth())
    options = _always(toys, action)
    found, after, _ = _gradients(_Images(), _smooth(), options)
    error = _error(exact, found)
    most = {"pool": 0.5, "pool4": 0.7, "quantize": 0.02, "quantize4": 0.2}[action]
    assert 0 < error < most
    assert torch.equal(state, after)


def test_pooling_changes_weights_of_convolutions_alone(toys):
    """What goes back to the layers before is exact, and so is what they learn."""
    exact, _, _ = _gradients(_Images(1), _smooth())
    found, _, _ = _gradients(_Images(1), _smooth(), _always(toys, "pool"))
    changed = {name for name in exact if not torch.equal(exact[name], found[name])}
    assert {"blocks.0.second.weight"} == changed


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "channels_last"])
@pytest.mark.parametrize("action", ["pool", "quantize"])
def test_other_precisions_and_layouts(toys, how, action):
    """The error is of the size that it is in full precision."""

    def trained(options):
        model, x = _Images(width=16), _smooth()
        if how == "bfloat16":
            model, x = model.bfloat16(), x.bfloat16()
        if how == "channels_last":
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", enabled=how == "autocast", dtype=torch.bfloat16):
            return _gradients(model, x, options)

    exact, _, _ = trained(None)
    found, _, summary = trained(_always(toys, action))
    assert 0 < _error(exact, found) < (0.6 if action == "pool" else 0.05)
    assert not summary.kept_units


class _Spectral(nn.Module):
    """Reads one storage as complex numbers and as their parts."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Parameter(torch.rand(33, 2))

    def forward(self, x):
        z = torch.fft.rfft(x)
        parts = torch.view_as_real(z) * self.mask
        return torch.fft.irfft(torch.view_as_complex(parts) * z.abs(), n=x.shape[-1])


class _Borrowing(nn.Module):
    """Multiplies with a weight that is another module's."""

    lender = [nn.Linear(64, 64)]  # noqa: RUF012 (a list, so that it is no part)

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.own(x)) @ self.lender[0].weight


@pytest.mark.parametrize("layer", [_Spectral, _Borrowing])
def test_views_of_other_kinds_and_weights_of_others_stay(toys, layer):
    """A storage is packed only if one kind of number is all that is read of it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 64), layer(), layer())
    x = torch.randn(64, 64)
    exact, _, _ = _gradients(copy.deepcopy(model), x)
    options = {**_always(toys, "quantize"), "layers": layer}
    found, _, summary = _gradients(model, x, options, n_steps=3)
    assert _error(exact, found) < 0.02
    assert not summary.kept_units
