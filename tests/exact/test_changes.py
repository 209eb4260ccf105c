"""What layers change or read besides their inputs: served, or found and kept; exact.

Each model trains bare and under a session; everything must agree to the bit.
"""

import contextlib
import copy
import dataclasses
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mimose
from mimose.exact.changes import BufferSlot, Saved, SavedBuffers, buffer_slots
from mimose.exact.impurities import AttributesSlot
from mimose.exact.input_watch import is_edited, marks
from mimose.exceptions import RecomputationError
from mimose.planners.actions import EXACT_MENU
from mimose.tensors import same_bits

KEEP, RECOMPUTE = EXACT_MENU.names

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


class _Lazy(_Block):
    """Makes its counter in its first call."""

    def forward(self, x):
        self.n_calls = getattr(self, "n_calls", 0) + 1
        return x + self.compute(x) * (1 + 0.1 * self.n_calls)


class _Penalty(_Block):
    """Leaves a loss of its own where the model finds it; it has a graph."""

    penalty = 0.0

    def forward(self, x):
        y = self.compute(x)
        self.penalty = y.square().mean()
        return x + y


class _Penalised(nn.Module):
    """Adds up what its layers left."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Penalty() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block.penalty for block in self.blocks)


class _Table(_Block):
    """Keeps a tuple of tensors for the longest batch so far."""

    table = (torch.ones(0),)

    def forward(self, x):
        if len(self.table[0]) < len(x):
            self.table = (torch.linspace(1, 2, len(x))[:, None],)
        return x + self.compute(x) * self.table[0][: len(x)]


SERVED = {"buffers of other names": _OtherNames, "late": _Late}
IMPURE = {
    "python": (_Python, "its forward draws from Python's generator"),
    "numpy": (_Numpy, "its forward draws from NumPy's generator"),
    "generators": (_Generators, "its forward draws from a generator of its own"),
    "counter": (_Counter, "its attribute 'n_calls' is changed by the forward"),
    "lazy": (_Lazy, "its attribute 'n_calls' is changed by the forward"),
    "edited": (_Edited, "its attribute 'mean' is changed by the forward"),
    "table": (_Table, "its attribute 'table' is changed by the forward"),
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
@pytest.mark.parametrize("name", SERVED)
def test_buffers_that_change_are_served(toys, name, planner):
    """Gradients, buffers, attributes and random states are the bare model's."""
    session = _compare(toys.chain(4, make=SERVED[name]), planner)
    assert {} == session.summary().kept_units


@PLANNERS
@pytest.mark.parametrize("name", IMPURE)
def test_impure_layers_are_found_and_kept(toys, name, planner):
    """All in the first step, which is run again at once: each step is the bare one."""
    kind, why = IMPURE[name]
    session = _compare(toys.chain(4, make=kind), planner)
    assert {f"blocks.{i}": why for i in range(4)} == session.summary().kept_units
    assert [1, 0, 0, 0, 0, 0] == [record.retries for record in session.records]
    if planner == "auto":
        assert {"keep"} == set(session.records[-1].actions)


@PLANNERS
def test_a_loss_left_in_an_attribute(planner):
    """It has a graph, is not held by the session, and its layer is kept."""
    torch.manual_seed(0)
    kept = _compare(_Penalised(), planner).summary().kept_units
    assert {"its attribute 'penalty' is changed by the forward"} == set(kept.values())
    assert 4 == len(kept)


def test_impure_layers_that_are_kept_anyway_cost_nothing(toys):
    """Under a plan that keeps them they are found all the same, and nothing is run."""
    session = _compare(toys.chain(4, make=_Counter), "none")
    assert 4 == len(session.summary().kept_units)
    assert 0 == session.summary().retries


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
    assert "blocks.2" in session.summary().kept_units


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
    session = _compare(_Masked(), planner, step=step, make=make)
    whys = session.summary().kept_units.values()
    assert ["its attribute 'mask' is changed by the forward"] * 3 == list(whys)


@pytest.mark.parametrize("is_edited", [False, True])
def test_an_attribute_that_the_loop_changes_before_the_backward(is_edited):
    """An error names it, before a gradient could be wrong; then the layer is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Attribute() for _ in range(2)))
    first, second = torch.rand(16), torch.rand(16)
    model[0].mask, model[1].mask = first.clone(), second
    with mimose.attach(model, "1TiB", planner="full", meter="prediction") as session:
        model(torch.randn(5, 16)).sum().backward()
        loss = model(torch.randn(5, 16)).sum()
        if is_edited:
            model[0].mask.add_(1.0)
        else:
            model[0].mask = None
        with pytest.raises(RecomputationError, match=r"attribute 'mask' was changed"):
            loss.backward()
        del loss
        model.zero_grad()
        model[0].mask = first
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each(torch.ones(5, 16)).sum().backward()
    assert ["0"] == list(session.summary().kept_units)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


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


def test_buffers_are_swapped_in_for_a_while():
    """Entered, the old values are there; left, the present tensor is."""
    layer = nn.Module()
    layer.register_buffer("mean", torch.zeros(2))
    layer.register_buffer("scale", torch.ones(2))
    saved = SavedBuffers(buffer_slots([layer]))
    mean = layer.mean
    mean.add_(1.0)
    changed, unclear = saved.changed(())
    assert ([BufferSlot], []) == ([*map(type, changed)], unclear)
    for _ in range(2):
        with saved:
            assert 0.0 == layer.mean.sum()
            layer.mean.add_(5.0)
        assert layer.mean is mean
        assert 2.0 == mean.sum()


def test_what_was_saved_is_restored():
    """Buffers and attributes in place; what was not there goes."""
    layer, fixed = nn.Module(), torch.ones(3)
    layer.register_buffer("mean", torch.zeros(2))
    layer.scale, layer.table, layer.pair = 1.0, torch.zeros(2), (fixed, 4)
    loss = torch.ones(1, requires_grad=True) * 2
    layer.loss = loss
    attributes = AttributesSlot(layer, 100)
    saved = Saved([*buffer_slots([layer]), attributes])
    state = attributes.read()
    assert [] == saved.compare().changed
    layer.scale = float("1")
    assert [] == saved.compare().changed
    mean, table = layer.mean, layer.table
    mean.add_(1.0)
    table.add_(1.0)
    assert "its attribute 'table' is changed by the forward" == attributes.why(state)
    layer.scale, layer.table, layer.loss, layer.new = 2.0, None, loss * 2, "text"
    fixed.add_(1.0)
    assert 2 == len(saved.compare().changed)
    saved.restore()
    assert (mean, table, loss) == (layer.mean, layer.table, layer.loss)
    assert 0.0 == mean.sum() == table.sum()
    assert 3.0 == fixed.sum()
    assert 1.0 == layer.scale
    assert not hasattr(layer, "new")


def test_a_tensor_with_a_graph_is_not_held():
    """Another graph's tensor could keep a chain of old steps alive."""
    layer = nn.Module()
    layer.loss = torch.ones(1, requires_grad=True) * 2
    gone = weakref.ref(layer.loss)
    saved = Saved([AttributesSlot(layer, 100)])
    layer.loss = layer.loss.detach()
    assert gone() is None
    assert 1 == len(saved.compare().changed)


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


class _Draws(nn.Module):
    """Draws from NumPy's generator."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        """Scale by a number that is drawn."""
        return x + torch.relu(self.linear(x)) * float(np.random.rand())  # noqa: NPY002


class _FailsOnce(nn.Module):
    """Raises an error in its first forward."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.has_failed = [False]  # of a kind that is not looked at

    def forward(self, x):
        """Fail once, then go on."""
        if not self.has_failed[0]:
            self.has_failed[0] = True
            msg = "for the test"
            raise ValueError(msg)
        return x + torch.relu(self.linear(x))


class _Counts(nn.Module):
    """Multiplies by how often it was called."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.n = 0

    def forward(self, x):
        """Count, and multiply."""
        self.n += 1
        return x + torch.relu(self.linear(x)) * (1 + 0.1 * self.n)


def _is_block(name, module):
    """Whether a module is one of a chain's blocks."""
    del module
    return name.startswith("blocks.") and name.count(".") == 1


@pytest.mark.parametrize("planner", ["auto", "full", "every-2"])
@pytest.mark.parametrize("kind", [_Draws, _Counts])
def test_a_failed_first_forward_hides_nothing(toys, meter, planner, kind):
    """What a first call showed is known although its forward did not end."""
    bare = toys.chain(4)
    bare.blocks[0], bare.blocks[3] = kind(16), _FailsOnce(16)
    planned = copy.deepcopy(bare)

    def train(model):
        np.random.seed(3)  # noqa: NPY002
        with contextlib.suppress(ValueError):
            model(toys.inputs(8))
        return toys.train(model, [toys.inputs(n) for n in (8, 24, 16)])

    expected = train(bare)
    options = {"meter": meter, "planner": planner, "units": _is_block}
    with mimose.attach(planned, "1TiB", **options) as session:
        actual = train(planned)
    assert [] == toys.differences(expected, actual)
    assert ["blocks.0"] == list(session.summary().kept_units)


def test_models_with_kept_layers_are_planned(toys, meter):
    """Two layers that draw are kept; the others are planned, and predicted exactly."""
    model = toys.chain(5)
    model.blocks[1], model.blocks[3] = _Draws(16), _Draws(16)
    batches = [toys.inputs(64 * n) for n in (8, 24, 16, 12, 20, 32, 28, 10) * 3]
    budget = toys.budget_between(toys.chain(5), batches, 0.7, meter)
    with mimose.attach(model, budget, meter=meter, units=_is_block) as session:
        toys.train(model, batches)
    last = list(session.records)[-8:]
    assert ["blocks.1", "blocks.3"] == sorted(session.summary().kept_units)
    assert {"plan"} == {record.phase for record in last}
    assert any("recompute" in record.actions for record in last)
    assert max(abs(record.prediction_error) for record in last) < 0.001
    assert not any(record.is_over for record in last)


class _Lazy(nn.Module):
    """Turns an array into a tensor in its first forward."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.mask = np.ones(width, dtype="f4")

    def forward(self, x):
        """Multiply by the mask, which is a tensor from now on."""
        if not isinstance(self.mask, torch.Tensor):
            self.mask = torch.from_numpy(self.mask)
        return x + torch.relu(self.linear(x * self.mask))


def test_an_attribute_that_becomes_a_tensor_is_put_back(toys, meter):
    """The forward that is run again finds the array that was there."""
    model = toys.chain(3, make=_Lazy)
    batches = [toys.inputs(n) for n in (8, 24, 16)]
    found, _ = toys.compare(model, batches, meter=meter)
    assert [] == found
    assert isinstance(model.blocks[0].mask, torch.Tensor | np.ndarray)
