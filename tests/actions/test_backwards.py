"""Whatever a backward does: under each action gradients are the bare model's."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose

WIDTH, ROWS = 64, 128
ON_SIM = ("offload", "offload_input")


class _Layer(nn.Module):
    """Two products, a norm, activations and dropout."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = self.norm(self.a(x))
        return x + self.b(functional.dropout(functional.gelu(h) * h.sigmoid(), 0.2))


def _model():
    torch.manual_seed(7)
    return nn.Sequential(*(_Layer() for _ in range(3)))


def _twice(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _in_parts(model, x):
    loss = model(x).square().mean()
    last = list(model[-1].parameters())
    found = torch.autograd.grad(loss, last, retain_graph=True)
    found += torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward()
    return found


def _penalised(model, x):
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
    (loss + slope.square().sum()).backward()


def _elsewhere(model, x):
    thread = threading.Thread(target=model(x).square().mean().backward)
    thread.start()
    thread.join()


def _cast(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


def _cast_backward(model, x):
    loss = model(x).square().mean()
    with torch.autocast(x.device.type, torch.bfloat16):
        loss.backward()


WAYS = (_twice, _in_parts, _penalised, _cast)
ON_A_CPU = (*WAYS, _cast_backward, _elsewhere)
CASES = [(action, way) for action in ("recompute", "selective") for way in ON_A_CPU]
CASES += [
    pytest.param(each, way, marks=pytest.mark.sim) for each in ON_SIM for way in WAYS
]


def _under(toys, request, action):
    """Return options under which all layers run so, and the device."""
    if action in ON_SIM:
        request.getfixturevalue("sim")
    menu = dict.fromkeys(("keep", action, "recompute"))
    return {"actions": (*menu,), "planner": toys.everywhere(action)}, (
        "sim" if action in ON_SIM else "cpu"
    )


def _gradients(model, device, way, options=None):
    """Return every gradient of a third step: earlier ones are compared."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()
    session = mimose.attach(model, "1TiB", **options) if options else None
    with session or contextlib.nullcontext():
        for _ in range(3):
            model.zero_grad()
            x.grad = None
            torch.manual_seed(11)
            found = way(model, x) or ()
    if session is not None:
        assert not session.summary().kept_units
    return [x.grad, *(p.grad for p in model.parameters()), *found]


def _same(one, other):
    pairs = zip(one, other, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("action", "way"), CASES)
def test_ways_to_run_a_backward(toys, request, action, way):
    """Twice, in parts, differentiated again, in threads, under autocast."""
    options, device = _under(toys, request, action)
    model = _model().to(device)
    bare = _gradients(copy.deepcopy(model), device, way)
    assert _same(bare, _gradients(model, device, way, options))


@pytest.mark.parametrize(
    "action",
    [
        "recompute",
        "selective",
        *(pytest.param(a, marks=pytest.mark.sim) for a in ON_SIM),
    ],
)
def test_nothing_outlives_its_graph(toys, request, action):
    """With a backward or without, all goes without a collection."""
    options, device = _under(toys, request, action)
    model = _model().to(device)
    gc.collect()
    gc.disable()
    try:
        with mimose.attach(model, "1TiB", **options):
            for has_backward in (True, True, False, True):
                x = torch.ones(ROWS, WIDTH, device=device).requires_grad_() * 1.0
                gone, loss = weakref.ref(x.untyped_storage()), model(x).sum()
                if has_backward:
                    loss.backward()
                del x, loss
                assert gone() is None
    finally:
        gc.enable()


def test_the_recomputation_stops_early(toys):
    """A last product whose result nobody saved is not run again, but at first."""
    model = toys.chain(3, make=lambda width: toys.Block(width, rate=0.0))
    with mimose.attach(model, "1TiB", planner="full") as session:
        for _ in range(3):
            model(toys.inputs(8)).backward()
    product = 2 * 8 * 16 * 32
    assert 3 * product == session.records[-1].recomputed_flops


@pytest.mark.parametrize("rows", [16, 24])
def test_weights_that_learn_again_before_the_backward(toys, rows):
    """A critic frozen for its generator's step alone, square shapes or not."""

    def train(critic):
        found = []
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(rows, 16).requires_grad_()
            critic.requires_grad_(step % 2 == 0)
            loss = critic(x).square().mean()
            critic.requires_grad_(True)
            loss.backward()
            grads = [p.grad for p in critic.parameters()]
            found += [x.grad, *(None if g is None else g.clone() for g in grads)]
            critic.zero_grad()
        return found

    model = toys.chain(3)
    expected = train(copy.deepcopy(model))
    with mimose.attach(model, "1TiB", planner="full"):
        assert _same(expected, train(model))
