"""What changes after a recipe was made: another recipe, or an error."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import mimose
from mimose.exceptions import RecomputationError
from mimose.planners import Everywhere
from mimose.run.actions.replay import noise
from mimose.run.actions.replay.book import RecipeBook

WIDTH = 64


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Edited(_Layer):
    """Edits one column of what nobody saves, where autograd does not see it."""

    is_on = False

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + x
        if self.is_on:
            with torch.no_grad():
                h[:, 5] = 0.0
        return self.b(functional.gelu(h * 2.0))


class Masked(_Layer):
    """Adds a mask that it is given to what it computes."""

    def forward(self, x, mask, then=None):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + mask * -8.0
        h = h if then is None else h + then
        return self.b(functional.gelu(h))


class Normed(_Layer):
    """A norm between two products."""

    def forward(self, x):
        """Map (rows, width) to the same."""
        return self.b(functional.gelu(self.norm(self.a(x))))


class Branched(_Layer):
    """Two outputs of one activation."""

    def forward(self, x):
        """Map (rows, width) to two of the same."""
        h = functional.silu(self.norm(x))
        return self.a(h), self.b(h)


class Model(nn.Module):
    """One layer behind something that has a graph.

    Args:
        layer: The layer.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        """Return what the layer does."""
        return self.layer(x * 1.0, **options)


def _attach(model, **others):
    options = {"actions": "fine", "planner": Everywhere("lean"), **others}
    return mimose.attach(model, "1TiB", **{"units": ["layer"], **options})


def _x(n_rows=128):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n_rows, WIDTH, generator=generator)


def _gradients(model, *args, **options):
    model.zero_grad()
    loss = model(*args, **options).square().sum()
    loss.backward()
    gradients = (p.grad for p in model.parameters())
    return [loss.detach(), *(g for g in gradients if g is not None)]


def _same(one, other):
    return all(itertools.starmap(torch.equal, zip(one, other, strict=True)))


def test_an_edit_that_begins_later_is_an_error():
    """In one column alone; then the layer does not run so any more."""
    model = Model(Edited())
    bare = copy.deepcopy(model)
    with _attach(model) as session:
        for _ in range(4):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))
        model.layer.is_on = bare.layer.is_on = True
        with pytest.raises(RecomputationError, match="rebuilt to something else"):
            _gradients(model, _x())
        for _ in range(2):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))
    assert len(session.records) == 7


def test_a_mask_that_hides_nothing_at_first():
    """It is not taken for what gave the same by chance."""
    model = Model(Masked())
    bare = copy.deepcopy(model)
    nothing, something = torch.zeros(128, WIDTH), torch.zeros(128, WIDTH)
    something[64:, 32:] = 1.0
    with _attach(model):
        for mask in [nothing] * 4 + [something] * 4:
            found, expected = (_gradients(m, _x(), mask=mask) for m in (model, bare))
            assert _same(found, expected)


def test_arguments_that_change_places():
    """What was given as one is given as another."""
    model = Model(Masked())
    bare = copy.deepcopy(model)
    one, other = (torch.rand(128, WIDTH) for _ in range(2))
    calls = [{"mask": one, "then": other}] * 4 + [{"then": one, "mask": other}] * 3
    with _attach(model):
        for options in calls:
            found, expected = (_gradients(m, _x(), **options) for m in (model, bare))
            assert _same(found, expected)


def test_two_parts_of_a_graph_one_after_the_other():
    """Without keeping it: what the second needs is there yet."""
    model = Model(Branched())
    bare = copy.deepcopy(model)

    def gradients(one):
        a, b = one(_x())
        first = torch.autograd.grad(a.square().sum(), [one.layer.a.weight])
        return [*first, *torch.autograd.grad(b.square().sum(), [one.layer.b.weight])]

    with _attach(model):
        for _ in range(4):
            assert _same(gradients(model), gradients(bare))


def test_layers_of_one_kind_that_are_put_together_otherwise():
    """Their graphs are equal, and their norms have other names."""

    class Two(nn.Module):
        """Two rows of modules."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            ends = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
            norms = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-2)
            self.one = nn.Sequential(ends[0], norms[0], nn.GELU(), ends[1])
            self.two = nn.Sequential(
                ends[2], nn.Identity(), norms[1], nn.GELU(), ends[3]
            )

        def forward(self, x):
            """Map (rows, width) to the same."""
            return self.two(self.one(x * 1.0))

    model = Two()
    bare = copy.deepcopy(model)
    with _attach(model, units=["one", "two"]):
        for _ in range(4):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))


@pytest.mark.parametrize("n_rows", [(0, 64, 64), (64, 64, 64, 0, 64), (1, 64, 1)])
def test_empty_and_single_rows(n_rows):
    """Nothing is held of nothing."""
    model = Model(Normed())
    bare = copy.deepcopy(model)
    with _attach(model):
        for n in n_rows:
            assert _same(_gradients(model, _x(n)), _gradients(bare, _x(n)))


def test_another_session_finds_out_by_itself():
    """What a first one has tried is not taken for granted."""
    model = Model(Edited())
    bare = copy.deepcopy(model)
    with _attach(model):
        for _ in range(3):
            _gradients(model, _x())
    model.layer.is_on = bare.layer.is_on = True
    with _attach(model):
        for _ in range(3):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))


def test_a_norm_in_two_precisions_needs_one_recipe(freed):
    """Under autocast its statistics are more precise than what it is given."""
    model = Model(Normed())
    with _attach(model):
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(_x()).float().square().sum()
            loss.backward()
    assert len(freed) == 20
    assert min(freed) == max(freed) > 0


@pytest.mark.sim
@pytest.mark.parametrize("n_elements", [1024, 1156, 289])
def test_masks_of_an_accelerator_come_back_whole(sim, n_elements):
    """Of any number of elements, in a storage of their own."""
    del sim
    drawn = (torch.rand(n_elements) < 0.9).to("sim")
    found = noise.unpack(noise.pack(drawn))
    assert torch.equal(found.cpu(), drawn.cpu())
    assert found.untyped_storage().nbytes() == n_elements


def test_weights_that_are_trained_need_no_other_recipe(monkeypatch):
    """They are edited in place between any two calls."""
    made, make = [], RecipeBook._make

    def noted(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(RecipeBook, "_make", noted)
    model = Model(Normed())
    bare = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, bare)]
    with _attach(model):
        for _ in range(6):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))
            for optimizer in optimizers:
                optimizer.step()
    assert len(made) == 1


class Attending(nn.Module):
    """Attention whose scores, by length, are much or little of what it saves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Map (batch, length, width) to the same."""
        mixed = torch.softmax(x @ x.transpose(1, 2) / 8.0, -1) @ torch.tanh(x)
        return x + self.b(functional.gelu(self.a(mixed)))


def _settled(*lengths, state=None):
    """Return the state of a session that has met some lengths."""
    model = nn.Sequential(Attending(), Attending())
    options = {"actions": "fine", "planner": Everywhere("lean")}
    with mimose.attach(model, "1TiB", **options) as session:
        if state is not None:
            session.load_state_dict(json.loads(json.dumps(state)))
        for n in lengths:
            x = torch.randn(2, n, WIDTH, requires_grad=True)
            model(x).sum().backward()
        return session.state_dict()


def test_what_goes_is_the_same_after_a_state_was_loaded(freed):
    """No other tensors go than those that the state names."""
    state = _settled(512, 513)
    most = sum(freed)
    for slots in state["actions"]["lean"].values():
        del slots[1:]
    freed.clear()
    assert state["actions"] == _settled(512, 513, state=state)["actions"]
    assert 0 < sum(freed) < most


def test_a_small_call_settles_nothing():
    """Noise of a few elements cannot be told; what comes later is not bound by it."""
    assert {} == _settled(2, 3)["actions"]["lean"]
    for state in (None, _settled(2, 3)):
        small_first = _settled(2, 3, 512, 513, state=state)
        assert _settled(512, 513)["actions"] == small_first["actions"]


def test_many_small_calls_leave_large_ones_alone(freed):
    """They are no failures to make a recipe."""
    model = nn.Sequential(*(nn.Sequential(nn.Dropout(), nn.Linear(8, 8)) for _ in "ab"))
    options = {"actions": "fine", "planner": Everywhere("lean"), "units": ["0", "1"]}
    with mimose.attach(model, "1TiB", **options):
        for n in (*[2] * 70, 4096, 4096):
            freed.clear()
            model(torch.randn(n, 8, requires_grad=True)).sum().backward()
    assert sum(freed) > 2**16


class Sided(nn.Module):
    """Layers that read a tensor which none of them saves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.make = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Summing() for _ in range(3))
        self.side = None

    def forward(self, x):
        """Map (rows, width) to one number."""
        side = self.make(x) * 2.0
        self.side = StorageWeakRef(side.untyped_storage())
        for layer in self.layers:
            x = layer(x, side)
        return x.sum()


class Summing(_Layer):
    """Adds what it is given."""

    def forward(self, x, side):
        """Map (rows, width), twice, to the same."""
        return self.b(functional.gelu(self.a(x))) + side


@pytest.mark.parametrize(
    ("action", "is_held"), [("keep", False), ("lean", True), ("recompute", True)]
)
def test_what_layers_read_is_held_as_plans_have_it(action, is_held):
    """From the forward to the backward, unless all of its readers are kept."""
    model = Sided()
    options = {"actions": "fine", "planner": Everywhere(action)}
    with mimose.attach(model, "1TiB", **options):
        for _ in range(2):
            loss = model(torch.randn(8, WIDTH))
            assert is_held is not model.side.expired()
            loss.backward()
            assert model.side.expired()


class Gathering(Sided):
    """Adds every layer's result to the tensor that all of them read."""

    def forward(self, x):
        """Map (rows, width) to one number."""
        side = torch.zeros_like(x)
        self.side = StorageWeakRef(side.untyped_storage())
        for layer in self.layers:
            x = layer(x, side)
            side.add_(x)
        return side.sum()


def test_an_argument_that_is_edited_later_leaks_nothing():
    """It gets a graph then, which what the layer holds is part of."""
    model = Gathering()
    options = {"actions": "fine", "planner": Everywhere("lean")}
    with mimose.attach(model, "1TiB", **options):
        for _ in range(3):
            model(torch.randn(8, WIDTH))  # and no backward
            assert model.side.expired()
