"""What is dropped inside a layer: the best choices, known before they run."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose
from mimose.actions import selective
from mimose.actions.points import corners, few
from mimose.cost.prices import prices_of

REBUILDING = ("selective", "selective_more", "selective_all")


def _problem(rng):
    """Return what may be dropped, and what its operators cost."""
    n_goods, n_costs = rng.randint(1, 6), rng.randint(1, 6)
    costs = {name: float(rng.randint(0, 30)) for name in range(n_costs)}
    goods = {}
    for name in "abcdef"[:n_goods]:
        needs = rng.sample(range(n_costs), rng.randint(0, min(3, n_costs)))
        goods[name] = float(rng.randint(1, 20)), frozenset(needs)
    return goods, costs


def test_no_choice_is_below_the_corners():
    """Of all subsets none is cheaper than the line between two corners."""
    rng = random.Random(3)
    for _ in range(60):
        goods, costs = _problem(rng)
        found = corners(goods, costs)
        assert [found[0].dropped, found[-1].dropped] == [frozenset(), frozenset(goods)]
        assert {*few(found, 2)} <= {*found[1:]}
        for n in range(len(goods) + 1):
            for names in itertools.combinations(goods, n):
                freed = sum(goods[name][0] for name in names)
                run = frozenset().union(*(goods[name][1] for name in names))
                cost = sum(costs[name] for name in run)
                for low, high in itertools.pairwise(found):
                    slope = (high.cost - low.cost) / (high.n_bytes - low.n_bytes)
                    assert cost >= low.cost + slope * (freed - low.n_bytes) - 1e-4


def test_bytes_are_known_before_an_action_ran(toys, meter):
    """Measured recomputations tell what each would hold, and it comes out."""
    model, batches = toys.chain(4, width=128), [toys.inputs(64, width=128)] * 2
    how = {"meter": meter, "actions": ("keep", *REBUILDING, "recompute")}
    with mimose.attach(model, "1TiB", refine=False, **how) as session:
        toys.train(model, batches)
        told = session.planning_problem()
        ran = {name for record in session.records for name in record.actions}
    assert {"recompute"} == ran
    assert told.allowed.all()
    assert (told.held_bytes[:, :-1] >= told.held_bytes[:, 1:]).all()
    assert (told.cost[:, :-1] <= told.cost[:, 1:]).all()
    held = {}
    for action in told.actions:
        with mimose.attach(model, "1TiB", planner=toys.everywhere(action), **how):
            with toys.StorageTracker() as tracker:
                loss = toys.forward(model, batches[0])
                held[action] = tracker.live_bytes
            loss.backward()
            del loss
    for action, n_bytes in zip(told.actions, told.held_bytes.sum(0), strict=True):
        freed = held["keep"] - held[action]
        assert told.held_bytes[:, 0].sum() - n_bytes == pytest.approx(freed, rel=0.05)


SETTINGS = {"fill": 0.0, "epsilon": 1e-5, "training": True}
"""What layers read that nothing shows."""


class Two(nn.Module):
    """Two products, for something to lie between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 512), nn.Linear(512, 64)
        self.norm = nn.LayerNorm(512)


class Hidden(Two):
    """One element of what nobody saves is edited where autograd does not see it."""

    at = -1

    def forward(self, x, at=-1):
        """Map (rows, 64) to the same."""
        h = torch.tanh(self.a(x)) * 2.0
        at = max(at, self.at)
        if at >= 0:
            with torch.no_grad():
                h.view(-1)[at] += 1.0
        return self.b(functional.gelu(h * 2.0))


class Filled(Two):
    """No node saves what a padding is filled with: here in one row of all."""

    def forward(self, x):
        """Map (rows, 64) to the same."""
        h = torch.tanh(self.a(x))
        h = functional.pad(h, (0, 0, 0, 1), value=SETTINGS["fill"])
        return self.b(functional.gelu(h * 2.0)[1:])


class Normed(Two):
    """No node saves the epsilon, which counts in one row."""

    def forward(self, x):
        """Map (rows, 64) to the same."""
        own = (512,), self.norm.weight, self.norm.bias, SETTINGS["epsilon"]
        h = functional.layer_norm(self.a(x), *own)
        return self.b(functional.gelu(h))


class Dropped(Two):
    """No node saves whether a dropout trains: here one row is above zero."""

    def forward(self, x):
        """Map (rows, 64) to the same."""
        torch.manual_seed(1)
        h = functional.relu(0.5 - self.a(x).abs())
        h, _ = torch.native_dropout(h, 0.5, SETTINGS["training"])
        return self.b(functional.gelu(h * 2.0))


class One(nn.Module):
    """One layer behind something that has a graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *args, **options):
        """Map (rows, 64) to a number."""
        return self.layer(x * 1.0, *args, **options).square().mean()


class Place:
    """A plain object, which stands for no place."""

    def __lt__(self, other):
        """Be less than any."""
        return True


N_ROWS = 530
"""So that tensors are striped: 4 of 17 stripes have a part of a row."""


def _always(model):
    how = {
        "actions": "selective",
        "planner": mimose.planners.everywhere("selective_all"),
    }
    return mimose.attach(model, "1TiB", **how, layers=["layer"])


@pytest.mark.parametrize(
    "what", ["attribute", "argument", "fill", "epsilon", "training"]
)
def test_what_changes_unseen_is_an_error_at_once(toys, monkeypatch, what):
    """In one row, which is outside of the stripe whose turn it is."""
    kinds = {"fill": Filled, "epsilon": Normed, "training": Dropped}
    model = One(kinds.get(what, Hidden)())
    x, args = toys.inputs(N_ROWS, width=64) * 1e4, ()
    x[2] *= 1e-8
    with _always(model) as session:
        for _ in range(4):
            model(x).backward()
        assert "selective_all" in session.records[-1].actions
        if what == "attribute":
            model.layer.at = 1024
        elif what == "argument":
            args = (1024,)
        else:
            other = {"fill": 1.0, "epsilon": 1.1e-5, "training": False}[what]
            monkeypatch.setitem(SETTINGS, what, other)
        with pytest.raises(mimose.RecomputationError, match="something else"):
            model(x, *args).backward()


def test_calls_in_which_nothing_is_new_compare_a_stripe(toys, monkeypatch):
    """Each in its turn; new sizes, attributes and threads are compared whole."""
    model, asked = One(Hidden()), []
    summed = selective._sum_of
    monkeypatch.setattr(
        selective, "_sum_of", lambda t, n: asked.append(n) or summed(t, n)
    )

    def compared(n_rows, *args):
        asked.clear()
        model(toys.inputs(n_rows, width=64), *args).backward()
        return {*asked}

    with _always(model):
        assert [compared(8) for _ in range(3)] == [{None}, {0}, {1}]
        assert [compared(12) for _ in range(2)] == [{None}, {0}]
        assert compared(8) == {1}  # since 12 was compared whole
        model.layer.other = 1
        assert [compared(8) for _ in range(2)] == [{None}, {0}]
        assert [compared(8, Place()) for _ in range(2)] == [{None}] * 2
        torch.set_num_threads(torch.get_num_threads() + 1)
        assert compared(8) == {None}
        torch.set_num_threads(torch.get_num_threads() - 1)


def test_stripes_have_every_word():
    """A change shows in one stripe and in the whole; so do changes that cancel."""
    for n in (2**18, 2**18 + 40_001):
        tensor = torch.randn(n)
        stripes = [None, *range(17)]
        before = [selective._sum_of(tensor, at) for at in stripes]
        for place in (0, 1, n // 2, n - 40_000, n - 2, n - 1):
            other = tensor.clone()
            other[place] += 1.0
            after = [selective._sum_of(other, at) for at in stripes]
            differ = [one != two for one, two in zip(before, after, strict=True)]
            assert differ[0]
            assert sum(differ) == 2
        for other in (-tensor, tensor.roll(1), tensor.roll(n // 2)):
            assert before[0] != selective._sum_of(other, None)


def test_a_price_follows_the_card_and_the_precision(sim, toys):
    """Of a hollow card by its name; TF32 where torch's flags allow it."""
    sim.set_hollow(sim.CARDS["a100"])
    found = []
    for allowed, is_half in ((False, False), (True, False), (True, True)):
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        model = toys.chain(2, width=64).to("sim")
        with mimose.attach(model, "1GiB") as session:
            with torch.autocast("sim", torch.bfloat16, enabled=is_half):
                loss = toys.forward(model, toys.inputs(8, width=64).to("sim"))
            loss.backward()
            del loss
        flops, precision, _ = session.summary().byte_price
        found.append((flops, precision))
    torch.set_float32_matmul_precision("highest")
    assert found == [(8.6, "single"), (50.0, "TF32"), (117.0, "half")]
    assert prices_of("cuda", "NVIDIA A100-SXM4-80GB").single == 8.6
    assert prices_of("cuda", "NVIDIA A10G").source.startswith("of no card")
    assert prices_of("cpu", "").half == prices_of("cpu", "").single
