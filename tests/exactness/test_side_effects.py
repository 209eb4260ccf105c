"""What layers change or read besides their inputs: served, or found and kept; exact.

Each model trains bare and under a session; everything must agree to the bit.
"""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from toys import Chain

import mimose
from mimose.exceptions import RecomputationError

PLANNERS = pytest.mark.parametrize("planner", ["auto", "full"])


class _Block(nn.Module):
    """A residual block; the others change what they need."""

    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        """Run it."""
        return x + self.compute(x)

    def compute(self, x):
        """Compute what is added."""
        return self.down(torch.tanh(self.up(x)))


class _Python(_Block):
    def forward(self, x):
        return x + random.random() * self.compute(x)


class _Numpy(_Block):
    def forward(self, x):
        return x + np.random.random() * self.compute(x)  # noqa: NPY002


class _Generators(_Block):
    def __init__(self, width=16):
        super().__init__(width)
        self.torchs = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(3)
        self.pythons = random.Random(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.torchs)
        scale = self.numpys.random() + self.pythons.random()
        return x + noise * scale * self.compute(x)


class _Late(_Block):
    """Begins to average in its third call."""

    def __init__(self, width=16, size=1):
        super().__init__(width)
        self.register_buffer("n_seen", torch.zeros(()))
        self.register_buffer("mean", torch.ones(size, width))

    def forward(self, x):
        y = x + self.compute(x * self.mean[0].clone())
        self.n_seen += 1
        if self.n_seen >= 3:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


class _Edited(_Block):
    """A tensor that is no buffer, averaged in place."""

    def __init__(self, width=16):
        super().__init__(width)
        self.mean = torch.ones(width)

    def forward(self, x):
        y = x + self.compute(x * self.mean.clone())
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


class _Penalty(_Block):
    """Leaves a loss of its own where the model finds it; it has a graph."""

    penalty = 0.0

    def forward(self, x):
        y = self.compute(x)
        self.penalty = y.square().mean()
        return x + y


class _Penalised(Chain):
    """Adds up what its layers left."""

    def forward(self, x):
        return super().forward(x) + sum(block.penalty for block in self.blocks)


class _Clamped(_Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return x + self.compute(x)


IMPURE = {
    "python": (_Python, "Python"),
    "numpy": (_Numpy, "NumPy"),
    "generators": (_Generators, "its own generator"),
    "weights": (_Clamped, "its own weights"),
}


def _train(model, batches, step=None):
    """Train; return what each step left, random states of all kinds included."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    left = []
    for batch in batches:
        loss = model(*batch) if step is None else step(model, batch)
        if step is None:
            loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in model.buffers()]
        found += [
            getattr(block, "mean", loss).detach().clone() for block in model.blocks
        ]
        drawn = [random.random(), float(np.random.random())]  # noqa: NPY002
        left.append((found, torch.get_rng_state(), drawn))
        model.zero_grad()
    return left


def _compare(model, planner, step=None, make=None):
    """Train a copy bare and the model attached; return the session if all agree."""
    make = make or (lambda i: (torch.randn(5, 16, generator=_seeded(i)),))
    batches = [make(i) for i in range(6)]
    bare = _train(copy.deepcopy(model), copy.deepcopy(batches), step)
    with mimose.attach(model, "1TiB", planner=planner, meter="prediction") as session:
        attached = _train(model, batches, step)
    for i, (one, other) in enumerate(zip(bare, attached, strict=True)):
        assert all(map(torch.equal, one[0], other[0])), f"step {i}"
        assert torch.equal(one[1], other[1]), f"step {i}"
        assert one[2] == other[2], f"step {i}"
    return session


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", [_Late, _Edited])
def test_what_changes_is_served(toys, kind):
    """Gradients, buffers, attributes and random states are the bare model's."""
    session = _compare(toys.chain(4, make=kind), "full")
    assert {} == session.summary().kept_units


@PLANNERS
@pytest.mark.parametrize("name", IMPURE)
def test_impure_layers_are_found_and_kept(toys, name, planner):
    """All in the first step, which is run again at once: each step is the bare one."""
    kind, why = IMPURE[name]
    session = _compare(toys.chain(4, make=kind), planner)
    kept = session.summary().kept_units
    assert [f"blocks.{i}" for i in range(4)] == sorted(kept)
    assert all(why in told for told in kept.values())
    assert [1, 0, 0, 0, 0, 0] == [record.retries for record in session.records]
    if planner == "auto":
        assert {"keep"} == set(session.records[-1].actions)


def test_a_loss_left_in_an_attribute():
    """It has a graph, is not held by the session, and its layer is kept."""
    torch.manual_seed(0)
    kept = _compare(_Penalised(4, make=_Penalty), "full").summary().kept_units
    assert 4 == len(kept)
    assert all("'penalty' holds a tensor with a graph" in why for why in kept.values())


def test_a_large_buffer_that_begins_to_change_is_an_error_once(toys):
    """It was not saved, so the step cannot be run again; from then on it is."""
    model = toys.chain(2, make=lambda width: _Late(width, 1000))
    with mimose.attach(model, "1TiB", planner="full", meter="prediction"):
        for _ in range(2):
            model(toys.inputs()).backward()
        with pytest.raises(mimose.LateChangeError, match=r"blocks\.0 changed a buffer"):
            model(toys.inputs())
        model.zero_grad()
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each(toys.inputs()).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class _Residual(Chain):
    """Adds to its stream in place, outside of the layers."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x += block(x)
        return x.square().mean()


class _Plain(_Block):
    """Needs a copy of its input, so that the edit breaks no bare training."""

    def forward(self, x):
        return self.compute(torch.relu(x))


def test_a_residual_added_in_place():
    """Layers whose input is edited later are kept, and the step is run again."""
    torch.manual_seed(0)
    session = _compare(_Residual(3, make=_Plain), "full")
    names = ["blocks.0", "blocks.1", "blocks.2"]
    assert names == sorted(session.summary().kept_units)
    assert 0 == sum(r.retries for r in list(session.records)[3:])


@dataclasses.dataclass
class _State:
    x: torch.Tensor


class _Stateful(nn.ModuleList):
    """Hands a tensor in a dataclass to one of its layers."""

    def forward(self, x):
        return self[2](x, _State(torch.ones(16))).square().mean()


class _Reads(_Block):
    def forward(self, x, state):
        return x + self.compute(x + state.x)


def test_a_tensor_in_a_dataclass_edited_after_the_forward():
    """Too late for another forward: an error names the layer, which is kept then."""
    torch.manual_seed(0)
    model, states = _Stateful(_Reads() for _ in range(3)), []
    model[2].register_forward_pre_hook(lambda _m, args: states.append(args[1]))
    with mimose.attach(model, "1TiB", planner="full", meter="prediction") as session:
        model(torch.randn(5, 16)).backward()  # kept, for it is the first
        loss = model(torch.randn(5, 16))
        states[1].x.add_(1.0)
        with pytest.raises(RecomputationError, match=r"\b2 cannot"):
            loss.backward()
        model(torch.randn(5, 16)).backward()
    assert "2" in session.summary().kept_units


class _Masked(nn.Module):
    """Sets an attribute of its layers before they run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Attribute() for _ in range(3))

    def forward(self, x, mask):
        for block in self.blocks:
            block.mask = mask
        for block in self.blocks:
            x = block(x)
        return x


class _Attribute(_Block):
    def forward(self, x):
        return x + self.compute(x * self.mask)


@PLANNERS
def test_an_attribute_that_another_forward_replaces(planner):
    """Two forwards before one backward each find their own mask again."""

    def step(model, batch):
        loss = (model(*batch[:2]) - model(*batch[2:])).square().mean()
        loss.backward()
        return loss

    def make(i):
        return tuple(torch.randn(5, 16, generator=_seeded(4 * i + j)) for j in range(4))

    torch.manual_seed(0)
    kept = _compare(_Masked(), planner, step=step, make=make).summary().kept_units
    assert {} == kept
