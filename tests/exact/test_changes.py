"""What layers change or read besides their inputs: all exact, or an error that says so.

Each model trains bare and under a session; everything must agree to the bit.
"""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mimose
from mimose.exact.changes import AttributeSlot, Before, BufferSlot, all_slots
from mimose.exact.input_watch import is_edited, marks
from mimose.exceptions import RecomputationError
from mimose.tensors import same_bits
from mimose.types import KEEP

PLANNERS = pytest.mark.parametrize("planner", ["auto", "full", "every-2"])


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


class _OtherNames(_Block):
    def __init__(self, width=16):
        super().__init__(width)
        self.register_buffer("moving_mean", torch.zeros(width))
        self.register_buffer("moving_var", torch.ones(width))

    def forward(self, x):
        x = functional.batch_norm(x, self.moving_mean, self.moving_var, training=True)
        return x + self.compute(x)


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


class _Counter(_Block):
    def __init__(self, width=16):
        super().__init__(width)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return x + self.compute(x) * (1 + 0.1 * self.n_calls)


class _Edited(_Block):
    """A tensor that is no buffer, averaged in place."""

    def __init__(self, width=16):
        super().__init__(width)
        self.mean = torch.ones(width)

    def forward(self, x):
        y = x + self.compute(x * self.mean.clone())
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


CHANGING = {
    "python": _Python,
    "numpy": _Numpy,
    "generators": _Generators,
    "buffers of other names": _OtherNames,
    "late": _Late,
    "counter": _Counter,
    "edited": _Edited,
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
        counts = [getattr(block, "n_calls", 0) for block in model.blocks]
        left.append((found, torch.get_rng_state(), drawn, counts))
        model.zero_grad()
    return left


def _compare(model, planner, n_steps=6, step=None, make=None, budget="1TiB"):
    """Train a copy bare and the model attached; return the session if all agree."""
    make = make or (lambda i: (torch.randn(5, 16, generator=_seeded(i)),))
    batches = [make(i) for i in range(n_steps)]
    bare = _train(copy.deepcopy(model), copy.deepcopy(batches), step)
    with mimose.attach(model, budget, planner=planner, meter="prediction") as session:
        attached = _train(model, batches, step)
    for i, (one, other) in enumerate(zip(bare, attached, strict=True)):
        assert all(map(torch.equal, one[0], other[0])), f"step {i}"
        assert torch.equal(one[1], other[1]), f"step {i}"
        assert one[2:] == other[2:], f"step {i}"
    return session


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


@PLANNERS
@pytest.mark.parametrize("name", CHANGING)
def test_layers_that_change_things(toys, name, planner):
    """Gradients, buffers, attributes and random states are the bare model's."""
    session = _compare(toys.chain(4, make=CHANGING[name]), planner)
    assert {} == session.summary().kept_units


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


class _Residual(nn.Module):
    """Adds to its stream in place, outside of the layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Plain() for _ in range(3))

    def forward(self, x):
        x = x * 1.0
        for block in self.blocks:
            x += block(x)
        return x.square().mean()


class _Plain(_Block):
    """Needs a copy of its input, so that the edit breaks no bare training."""

    def forward(self, x):
        return self.compute(torch.relu(x))


@PLANNERS
def test_a_residual_added_in_place(planner):
    """Layers whose input is edited later are kept, and the step is run again."""
    torch.manual_seed(0)
    session = _compare(_Residual(), planner)
    names = ["blocks.0", "blocks.1", "blocks.2"]
    assert names == sorted(session.summary().kept_units)
    assert 0 == sum(r.retries for r in list(session.records)[3:])


@dataclasses.dataclass
class _State:
    x: torch.Tensor


class _Stateful(nn.Module):
    """Edits a tensor in a dataclass between its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Reads() for _ in range(3))

    def forward(self, x):
        state = _State(torch.zeros(16))
        for block in self.blocks:
            x = block(x, state)
            state.x.add_(x.detach().mean(0))
        return x.square().mean()


class _Reads(_Block):
    def forward(self, x, state):
        return x + self.compute(x + state.x)


@PLANNERS
def test_a_tensor_in_a_dataclass_edited_between_layers(planner):
    """It is looked into, like lists and dicts."""
    torch.manual_seed(0)
    assert _compare(_Stateful(), planner).summary().kept_units


def test_a_tensor_in_a_dataclass_edited_after_the_forward():
    """Too late for another forward: an error names the layer, which is kept then."""
    torch.manual_seed(0)
    model = _Stateful()
    states = []
    state = model.blocks[2]
    state.register_forward_pre_hook(lambda _m, args: states.append(args[1]))
    model.forward = lambda x: state(x, _State(torch.ones(16))).square().mean()
    with mimose.attach(model, "1TiB", planner="full", meter="prediction") as session:
        loss = model(torch.randn(5, 16))
        states[0].x.add_(1.0)
        with pytest.raises(RecomputationError, match=r"blocks\.2 cannot"):
            loss.backward()
        model(torch.randn(5, 16)).backward()
    assert ["blocks.2"] == list(session.summary().kept_units)


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
    _compare(_Masked(), planner, step=step, make=make)


class _Routes(_Block):
    """Saves tensors of other shapes when it is told to."""

    taken = 5

    def forward(self, x):
        return x + functional.pad(self.compute(x[: _Routes.taken]), (0, 0, 0, 0)).sum()


def test_a_recomputation_that_fails_names_the_layer(toys):
    """In a plain loop the error says what to do, and the next step is exact."""
    model = toys.chain(2, make=_Routes)
    with mimose.attach(model, "1TiB", planner="full", meter="prediction") as session:
        model(toys.inputs()).backward()
        loss = model(toys.inputs())
        _Routes.taken = 3
        with pytest.raises(RecomputationError, match=r"blocks\.1.*session\.step"):
            loss.backward()
        _Routes.taken = 5
        model.zero_grad()
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each(toys.inputs()).backward()
    assert ["blocks.1"] == list(session.summary().kept_units)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class _Collects(nn.Module):
    """Sums what a hook on an inner layer, and the layers' own lists, collect."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Lists() for _ in range(3))

    def forward(self, x):
        found = []
        inner = self.blocks[0].up
        handle = inner.register_forward_hook(lambda _m, _a, y: found.append(y.mean()))
        for block in self.blocks:
            block.losses.clear()
            x = block(x)
        handle.remove()
        return x.square().mean() + sum(found) + sum(sum(b.losses) for b in self.blocks)


class _Lists(_Block):
    def __init__(self, width=16):
        super().__init__(width)
        self.losses = []

    def forward(self, x):
        y = x + self.compute(x)
        self.losses.append(y.mean())
        return y


@PLANNERS
def test_what_is_collected_inside_of_a_layer_is_collected_once(planner):
    """The second run of a first call adds nothing to lists, in hooks or layers."""
    torch.manual_seed(0)
    _compare(_Collects(), planner)


class _OwnCheckpoints(nn.Module):
    """Checkpoints its layers itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("planner", ["auto", "full"])
def test_layers_that_the_root_checkpoints_are_kept(planner):
    """What the model recomputes by itself is not recomputed twice."""
    torch.manual_seed(0)
    session = _compare(_OwnCheckpoints(), planner)
    whys = session.summary().kept_units
    assert {"the model itself checkpoints it"} == set(whys.values())
    assert 3 == len(whys)
    assert 0 == sum(record.retries for record in session.records)


def test_a_caught_error_in_backward_costs_one_step(toys):
    """The steps after it get their plans as before."""
    model = toys.chain(3)
    batches = [toys.inputs(4 + i % 5) for i in range(30)]
    with mimose.attach(model, "1TiB", meter=toys.BlindMeter()) as session:
        for i, batch in enumerate(batches):
            loss = model(batch)
            if i == 15:
                handle = loss.grad_fn.register_hook(_fail)
                with pytest.raises(ArithmeticError):
                    loss.backward()
                handle.remove()
            else:
                loss.backward()
    assert "the backward did not run to its end" in session.records[15].reason
    assert {"plan"} == {record.phase for record in list(session.records)[16:]}


def _fail(*_):
    raise ArithmeticError


class _Object:
    """Holds a tensor where nobody looks."""

    def __init__(self, logits):
        self.logits = logits


class _Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return _Object(x)


def test_outputs_that_hold_no_tensors_are_told_of(caplog):
    """The record names the type, and a warning comes once."""
    model = _Opaque()
    with mimose.attach(model, "1TiB", meter="prediction") as session:
        for _ in range(3):
            model(torch.randn(5, 16)).logits.sum().backward()
    reason = "no tensors were found in what the model returned (_Object)"
    assert session.records[0].reason.startswith(reason)
    assert 1 == caplog.text.count("no tensors were found")
    assert KEEP not in session.records[-1].actions


def test_slots_put_back_what_they_read():
    """Entered, the old state is there; left, the present one."""
    layer = nn.Module()
    layer.register_buffer("mean", torch.zeros(2))
    layer.scale, layer.table = 1.0, torch.zeros(2)
    before = Before(all_slots([layer]))
    assert [] == before.compare().changed
    mean = layer.mean
    layer.mean.add_(1.0)
    layer.scale, layer.table = 2.0, torch.ones(2)
    kinds = [type(slot) for slot in before.compare().changed]
    assert {BufferSlot, AttributeSlot} == set(kinds)
    assert 3 == len(kinds)
    with before:
        assert 0.0 == layer.mean.sum() == layer.table.sum()
        assert 1.0 == layer.scale
    assert layer.mean is mean
    assert 2.0 == layer.scale
    before.restore()
    assert layer.mean is mean
    assert 0.0 == layer.mean.sum()
    assert 1.0 == layer.scale


def test_bits_are_compared_not_numbers():
    """Not-a-number equals itself; zeros of both signs differ."""
    nan = torch.full((2,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert same_bits(nan.bfloat16(), nan.bfloat16())
    assert same_bits(torch.ones(2, dtype=torch.complex64), torch.ones(2) + 0j)


def test_marks_hold_nothing():
    """A tensor that is gone was not edited; one in a dataclass is found."""
    x, y = torch.ones(2), torch.ones(2)
    noted = marks((x, _State(y)), {"z": torch.ones(3)})
    assert not is_edited(noted)
    del x
    y.add_(1)
    assert is_edited(noted)
