"""Ways to train, small: what each gets within a budget, and the bare model's results.

Each trains twice from the same weights and random state: bare, and within a budget of
some of what that grew by. The page on ways to train (``docs/patterns.md``) names them.
"""

from __future__ import annotations

import itertools
import random
import re
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import mimose

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "patterns.md"
_WIDTH, _WORDS, _ROWS, _LAYERS, _STEPS = 32, 24, 4, 3, 12
SETTINGS = {}


def setting(expects="planned", share=0.8):
    """Add a builder: it returns the models that get sessions, and a step.

    The budget leaves a share of what the bare run grows by.
    """

    def add(build):
        SETTINGS[build.__name__.replace("_", "-")] = (build, expects, share)
        return build

    return add


class Block(nn.Module):
    """Attention and two linear layers, with dropout and residuals."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.before, self.after = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 96), nn.Linear(96, _WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """Map (rows, length, width) to the same."""
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.dropout((q @ k.mT / 6).softmax(-1) @ v)
        return x + self.feed(x)

    def feed(self, x):
        """Run the linear layers."""
        return self.dropout(self.down(functional.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    """Tokens to logits through layers."""

    def __init__(self, layers=None, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        layers = layers or [Block(dropout) for _ in range(_LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, ids):
        """Return logits."""
        return self.head(self.run(self.embed(ids)))

    def run(self, x):
        """Run the layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def ids_of(length, rows=_ROWS):
    """Draw texts."""
    return torch.randint(1, _WORDS, (rows, length))


def loss_of(model, length=None, ids=None):
    """Return a language model's loss on texts."""
    ids = ids_of(length) if ids is None else ids
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def descend(model, loss, optimizer=None):
    """Do what follows a forward in most loops."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(model, loss=None):
    """Return a model and its step: one loss, one backward."""
    loss = loss or (lambda length: loss_of(model, length))
    return [model], lambda length: descend(model, loss(length))


# ------------------------------------------------------------------ several calls


@setting()
def simclr_two_calls():
    """One encoder called on either view before one backward."""
    model = Model()

    def loss(length):
        ids = ids_of(length)
        one, other = (
            functional.normalize(model(i).mean(1)) for i in (ids, ids.flip(1))
        )
        return functional.cross_entropy(one @ other.t() / 0.1, torch.arange(_ROWS))

    return trained(model, loss)


@setting("recomputed", share=0.95)
def gradient_penalty():
    """The gradient of a score is a part of the loss (create_graph)."""
    model = nn.Sequential(*(Block(0.0) for _ in range(_LAYERS)))

    def loss(length):
        x = torch.randn(_ROWS, length, _WIDTH).requires_grad_()
        score = model(x).mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.square().sum()

    return trained(model, loss)


@setting()
def reinforcement():
    """A rollout in eval mode under no_grad, then two epochs on it."""
    model = Model(dropout=0.0)

    def step(length):
        model.eval()
        with torch.no_grad():
            ids = model(ids_of(length)).softmax(-1).flatten(0, 1).multinomial(1)
        model.train()
        ids = ids.view(_ROWS, length)
        return sum(descend(model, loss_of(model, ids=ids)) for _ in range(2))

    return [model], step


# ------------------------------------------------------------------ which layers run


@setting()
def layerdrop():
    """The model's loop skips layers at random."""

    class Dropped(Model):
        def run(self, x):
            for layer in self.layers:
                if random.random() >= 0.2:
                    x = layer(x)
            return x

    return trained(Dropped())


@setting()
def experts():
    """Each token through one of three experts, rows gathered by the routing."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(_WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

        def forward(self, x):
            flat, output = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
            weights, chosen = self.gate(flat).softmax(-1).max(-1)
            for number, expert in enumerate(self.experts):
                (rows,) = (chosen == number).nonzero(as_tuple=True)
                given = functional.gelu(expert(flat[rows])) * weights[rows, None]
                output = output.index_add(0, rows, given)
            return x + output.view_as(x)

    return trained(Model([m for _ in range(3) for m in (Block(), Experts())]))


@setting("recomputed")
def rows_by_content():
    """Padding is left out before the layers: how many rows there are depends on it."""

    class Selects(Model):
        def forward(self, ids):
            return self.head(self.run(self.embed(ids)[ids > 8][None]))

    model = Selects()
    return trained(model, lambda length: model(ids_of(length)).square().mean())


# ------------------------------------------------------------------ layers of a kind


@setting()
def batch_norm():
    """Images of changing sizes through residual blocks with batch normalization."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            return x + functional.relu(self.norm(self.conv(x)))

    model = nn.Sequential(*(Residual() for _ in range(6)))
    return trained(
        model, lambda size: model(torch.randn(2, 8, size, size)).square().mean()
    )


@setting("recomputed", share=1.3)
def edits_in_place():
    """Layers that add to their input in place: found, and kept."""

    class InPlace(Block):
        def forward(self, x):
            return x.add_(super().forward(x.clone()))

    class Fed(Model):
        def run(self, x):
            return super().run(x * 1.0)

    return trained(Fed([InPlace() for _ in range(_LAYERS)]))


@setting()
def layer_hooks():
    """Hooks that change the output, and two inner layers' outputs in the loss."""
    model, inner = Model(), []
    for layer in model.layers[1:]:
        layer.register_forward_hook(lambda _m, _i, output: output * 1.001)
        layer.register_forward_hook(lambda _m, _i, output: inner.append(output))

    def loss(length):
        inner.clear()
        total = loss_of(model, length)
        return total + 0.01 * sum(states.square().mean() for states in inner)

    return trained(model, loss)


@setting()
def carried_memory():
    """Detached states are carried over from batch to batch; zeros at first."""

    class Memory(Model):
        memory = torch.zeros(_ROWS, 4, _WIDTH)

        def forward(self, ids):
            x = self.run(torch.cat([self.memory, self.embed(ids)], 1))
            self.memory = x[:, -4:].detach()
            return self.head(x[:, 4:])

    return trained(Memory())


# ------------------------------------------------------------------ weights, loops


@setting()
def gradual_unfreezing():
    """First the head alone is trained, then the layers too."""
    model, steps = Model().requires_grad_(False), itertools.count()
    model.head.requires_grad_(True)

    def loss(length):
        if next(steps) == 4:
            model.layers.requires_grad_(True)
        return loss_of(model, length)

    return trained(model, loss)


@setting()
def other_weights():
    """functional_call with weights made of the model's own (weight noise)."""
    model = Model()

    def loss(length):
        own = model.named_parameters()
        noisy = {name: w * (1 + 0.01 * torch.randn_like(w)) for name, w in own}
        return functional_call(model, noisy, (ids_of(length),)).square().mean()

    return trained(model, loss)


@setting()
def gradient_scaler():
    """Mixed precision with a scaler of gradients."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(length):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, length)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return [model], step


@setting()
def optimizer_in_backward():
    """Each parameter is stepped as soon as its gradient is there."""
    model = Model()

    def at_once(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(at_once)

    def step(length):
        loss = loss_of(model, length)
        loss.backward()
        return loss.detach()

    return [model], step


@setting()
def interrupted_backward():
    """Ctrl-C in the backward; the loop catches it and goes on."""
    model, steps = Model(), itertools.count()

    def interrupt(*_):
        if next(steps) == 3:
            raise KeyboardInterrupt

    model.layers[1].register_full_backward_hook(interrupt)

    def step(length):
        with suppress(KeyboardInterrupt):
            return descend(model, loss_of(model, length))
        model.zero_grad()
        return torch.zeros(())

    return [model], step


# ------------------------------------------------------------------ the test


def _run(build, meter, share=None, growth_bytes=0):
    """Train; return all that came of it, what was grown by, and the sessions."""
    torch.manual_seed(1)
    random.seed(1)
    roots, step = build()
    lengths = torch.randint(
        2, 12, (_STEPS,), generator=torch.Generator().manual_seed(2)
    )
    base_bytes, highest = meter.live_bytes(), 0
    with ExitStack() as stack:
        sessions = []
        if share is not None:
            budget = base_bytes + int(share * growth_bytes)
            options = {"meter": meter, "refine": False}
            enter = stack.enter_context
            sessions = [enter(mimose.attach(root, budget, **options)) for root in roots]
        found = []
        for length in [11, *lengths.tolist()]:
            if share is None:
                meter.reset_peak()
            found.append(step(4 * length))
            highest = max(highest, meter.peak_bytes())
        found += [p.detach().clone() for root in roots for p in root.parameters()]
        found += [b.clone() for root in roots for b in root.buffers()]
    return found, highest - base_bytes, sessions


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_as_expected(name, meter):
    """Results equal to the last bit, the budget kept, and planned if expected."""
    build, expects, share = SETTINGS[name]
    expected, growth_bytes, _ = _run(build, meter)
    actual, _, sessions = _run(build, meter, share, growth_bytes)

    assert all(map(torch.equal, expected, actual))
    records = [record for session in sessions for record in session.records]
    planned = [record for record in records if record.phase == "plan"]
    assert 0 == sum(record.is_over for record in records)
    if expects == "planned":
        assert any("keep" in record.actions for record in planned)
    else:
        assert not planned
        assert all(record.reason for record in records)


@pytest.mark.skipif(not _PAGE.exists(), reason="runs in a checkout")
def test_every_setting_is_in_the_docs():
    """The page on ways to train names each, and none that is not tried."""
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.rsplit("|", 2)[1] for line in lines if line.startswith("| ")]
    assert set(SETTINGS) == {n for c in cells for n in re.findall(r"`([\w-]+)`", c)}
