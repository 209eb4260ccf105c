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
        with mimose.attach(model, "1TiB", planner=toys.Always(action), **how):
            with toys.StorageTracker() as tracker:
                loss = toys.forward(model, batches[0])
                held[action] = tracker.live_bytes
            loss.backward()
            del loss
    for action, n_bytes in zip(told.actions, told.held_bytes.sum(0), strict=True):
        freed = held["keep"] - held[action]
        assert told.held_bytes[:, 0].sum() - n_bytes == pytest.approx(freed, rel=0.05)


class Hidden(nn.Module):
    """One element of what nobody saves is edited where autograd does not see it."""

    at, amount = -1, 0.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x, at=-1, fill=0.0):
        """Pad a side, and edit an element."""
        h = torch.tanh(self.a(x)) * 2.0
        at = max(at, self.at)
        if at >= 0:
            with torch.no_grad():
                h.view(-1)[at] += 1.0
        h = functional.gelu(h * 2.0)
        h = functional.pad(h, (0, 1), value=fill) * 3.0
        return self.b(torch.sigmoid(h)[:, :512])


class Normed(nn.Module):
    """Its norm's epsilon is a number of the module, and in some calls another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 512), nn.Linear(512, 64)
        self.norm = nn.LayerNorm(512)

    def forward(self, x, eps):
        """Normalize between two products."""
        weight, bias = self.norm.weight, self.norm.bias
        h = functional.layer_norm(self.a(x), (512,), weight, bias, eps[0])
        return self.b(functional.gelu(h))


class One(nn.Module):
    """One layer behind something that has a graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *args, **options):
        """Map (rows, 64) to a number."""
        return self.layer(x * 1.0, *args, **options).square().mean()


class AtOfList(Hidden):
    """Reads the place from an object that stays the same."""

    def forward(self, x, at):
        """Pad a side, and edit an element."""
        return super().forward(x, at.place)


class Place:
    """A plain object."""

    place = -1


@pytest.mark.parametrize("what", ["attribute", "argument", "fill", "object"])
def test_what_changes_unseen_is_an_error_at_once(toys, what):
    """One element differs, outside of the stripe whose turn it is; or a side does."""
    place = Place()
    model = One(AtOfList() if what == "object" else Hidden())
    options = {"at": place} if what == "object" else {}
    how = {"actions": "selective", "planner": toys.Always("selective_all")}
    with mimose.attach(model, "1TiB", **how, layers=["layer"]) as session:
        for _ in range(6):
            model(toys.inputs(1024, width=64), **options).backward()
        assert "selective_all" in session.records[-1].actions
        if what == "object":
            place.place = 511
        elif what == "attribute":
            model.layer.at = 511
        else:
            options = {"fill": 1.0} if what == "fill" else {"at": 511}
        with pytest.raises(mimose.RecomputationError, match="something else"):
            model(toys.inputs(1024, width=64), **options).backward()


def test_an_epsilon_that_changes_is_an_error_at_once(toys):
    """No node saves it; the deviations that the norm saves tell it."""
    model, eps = One(Normed()), [1e-5]
    how = {"actions": "selective", "planner": toys.Always("selective_all")}
    with mimose.attach(model, "1TiB", **how, layers=["layer"]) as session:
        for _ in range(6):
            model(toys.inputs(1024, width=64), eps).backward()
        assert "selective_all" in session.records[-1].actions
        eps[0] = 1.1e-5
        with pytest.raises(mimose.RecomputationError, match="something else"):
            model(toys.inputs(1024, width=64), eps).backward()


def test_calls_in_which_nothing_is_new_compare_a_stripe(toys, monkeypatch):
    """Each in its turn; new sizes, strides or attributes are compared whole."""
    model, asked = One(Hidden()), []
    summed = selective._sum_of
    monkeypatch.setattr(
        selective, "_sum_of", lambda t, n: asked.append(n) or summed(t, n)
    )
    how = {"actions": "selective", "planner": toys.Always("selective_all")}

    def compared(n_rows, **options):
        asked.clear()
        model(toys.inputs(n_rows, width=64), **options).backward()
        return {*asked} - {None}, None in asked

    with mimose.attach(model, "1TiB", **how, layers=["layer"]):
        assert [compared(64) for _ in range(3)] == [
            (set(), True),
            ({0}, True),  # what comes behind the padding
            ({1}, True),
        ]
        assert compared(96) == (set(), True)
        assert compared(96)[0]
        model.layer.other = 1
        assert compared(96) == (set(), True)
        assert compared(64)[0]
        torch.set_num_threads(2)
        assert compared(64) == (set(), True)
        torch.set_num_threads(1)


def test_stripes_have_every_word(toys):
    """Together their sums are the whole storage's."""
    for n in (2**18, 2**18 + 40_001):
        tensor = torch.randn(n)
        parts = [selective._sum_of(tensor, at) for at in range(17)]
        assert sum(parts) == selective._sum_of(tensor, None)
        assert len({*map(int, parts)}) == 17


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
