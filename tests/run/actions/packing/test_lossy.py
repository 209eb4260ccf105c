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
    return {"actions": menu, "planner": toys.Always(action), "units": _Residual, **more}


def _error(exact, other):
    off = sum((exact[n] - other[n]).double().square().sum() for n in exact)
    return float((off / sum(g.double().square().sum() for g in exact.values())).sqrt())


@pytest.mark.parametrize("action", LOSSY)
def test_gradients_come_close_and_random_numbers_stay(toys, action):
    """Dropout draws the same; what is measured a layer is of the size of the whole."""
    exact, state, _ = _gradients(_Images(), _smooth())
    options = _always(toys, action, max_error=10.0)
    found, after, summary = _gradients(_Images(), _smooth(), options)
    error = _error(exact, found)
    most = {"pool": 0.5, "pool4": 0.7, "quantize": 0.02, "quantize4": 0.2}[action]
    assert 0 < error < most
    assert torch.equal(state, after)
    errors = summary.gradient_errors[action]
    assert {"blocks.0", "blocks.1", "blocks.2"} == set(errors)
    assert all(0 < each < 2 * most for each in errors.values())


def test_pooling_changes_weights_of_convolutions_alone(toys):
    """What goes back to the layers before is exact, and so is what they learn."""
    exact, _, _ = _gradients(_Images(1), _smooth())
    found, _, _ = _gradients(_Images(1), _smooth(), _always(toys, "pool"))
    changed = {name for name in exact if not torch.equal(exact[name], found[name])}
    assert {"blocks.0.first.weight"} == changed


@pytest.mark.parametrize("action", ["pool", "quantize"])
def test_a_bound_is_kept(toys, action):
    """A layer that is changed by more does not run so again."""
    exact, _, _ = _gradients(_Images(), _smooth())
    options = _always(toys, action, max_error=1e-4)
    found, _, summary = _gradients(_Images(), _smooth(), options)
    assert all(torch.equal(exact[name], found[name]) for name in exact)
    assert min(summary.gradient_errors[action].values()) > 1e-4


def test_a_bound_that_is_wide_refuses_nobody(toys):
    """What stays below it goes on running so."""
    exact, _, _ = _gradients(_Images(), _smooth(), n_steps=2)
    options = _always(toys, "quantize", max_error=0.1)
    found, _, _ = _gradients(_Images(), _smooth(), options, n_steps=2)
    assert 0 < _error(exact, found) < 0.02


def test_who_cannot_be_measured_is_refused_under_a_bound(toys):
    """Hooks on weights would be called for gradients that are none."""
    seen = []
    model = _Images()
    model.blocks[1].first.weight.register_hook(seen.append)
    options = _always(toys, "quantize", max_error=0.1)
    _, _, summary = _gradients(model, _smooth(), options)
    assert 1 == len(seen)
    assert "blocks.1" not in summary.gradient_errors["quantize"]


def test_measuring_writes_no_gradient(toys):
    """Neither to weights nor to what the layer was given."""
    model, x = _Images(), _smooth()
    with mimose.attach(model, "1TiB", **_always(toys, "quantize", max_error=1.0)):
        loss = model(x).sum()
        assert all(p.grad is None for p in model.parameters())
        loss.backward()


class _Scaled(torch.autograd.Function):
    """Scales the gradient that it holds, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.held = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.held.mul_(gradient)


def test_who_cannot_run_backward_twice_is_refused_under_a_bound(toys):
    """An autograd function of somebody's own may hold what it changes."""

    class Own(_Residual):
        def forward(self, x):
            return _Scaled.apply(super().forward(x))

    def made():
        model = _Images(1)
        model.blocks[0].__class__ = Own
        return model

    exact, _, _ = _gradients(made(), _smooth())
    options = {**_always(toys, "quantize", max_error=0.1), "units": Own}
    found, _, summary = _gradients(made(), _smooth(), options)
    assert all(torch.equal(exact[name], found[name]) for name in exact)
    assert not summary.gradient_errors


def test_layers_that_share_a_weight_are_refused_under_a_bound(toys):
    """The gradient of one goes on through the other."""
    model = _Images(2)
    model.blocks[1].first.weight = model.blocks[0].first.weight
    options = _always(toys, "quantize", max_error=0.1)
    _, _, summary = _gradients(model, _smooth(), options)
    assert not summary.gradient_errors


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


def test_hooks_around_the_model_are_left_alone(toys):
    """Who has hooks on what is saved keeps them: the layer is recomputed."""
    seen = []

    def noted(tensor):
        seen.append(tensor)
        return tensor

    def trained(options):
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            return _gradients(_Images(), _smooth(), options)

    exact, _, _ = trained(None)
    n_bare = len(seen)
    found, _, _ = trained(_always(toys, "quantize"))
    assert all(torch.equal(exact[name], found[name]) for name in exact)
    assert len(seen) > n_bare


def test_hooks_within_a_layer_keep_what_they_have(toys):
    """What they have packed is theirs; what else the layer saved is packed."""

    class Hooked(_Residual):
        def forward(self, x):
            hooks = torch.autograd.graph.saved_tensors_hooks
            with hooks(lambda t: (t * 2, 2), lambda pair: pair[0] / pair[1]):
                made = self.first(x)
            return torch.relu(self.second(torch.relu(self.norm(made))) + x)

    def model():
        made = _Images(2)
        made.blocks = nn.ModuleList(Hooked(8) for _ in range(2))
        return made

    torch.manual_seed(0)
    one = model()
    two = copy.deepcopy(one)
    exact, _, _ = _gradients(one, _smooth())
    options = {**_always(toys, "quantize"), "units": Hooked}
    found, _, summary = _gradients(two, _smooth(), options)
    assert 0 < _error(exact, found) < 0.02
    assert not summary.kept_units


def test_bounds_that_are_none():
    """An error that says what to give."""
    for wrong in (0, -1.0, True, "small", float("nan")):
        with pytest.raises(ValueError, match="max_error must be None or a number"):
            mimose.attach(_Images(), "1TiB", units=_Residual, max_error=wrong)
