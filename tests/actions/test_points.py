"""What is dropped inside a layer: the best choices, known before they run."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose
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


class Padded(nn.Module):
    """Its layer's fill is an argument of the call, which no saved tensor shows."""

    def __init__(self):
        super().__init__()
        self.before, self.layer = nn.Linear(64, 64), PaddedLayer()

    def forward(self, x, fill):
        """Map (rows, 64) to a number."""
        return self.layer(self.before(x), fill=fill).square().mean()


class PaddedLayer(nn.Module):
    """Two paddings, and products between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(66, 66), nn.Linear(68, 64)

    def forward(self, h, fill):
        """Pad twice."""
        h = functional.gelu(self.a(functional.pad(h, (1, 1), value=fill)))
        return self.b(functional.gelu(functional.pad(h, (1, 1), value=fill)))


def test_an_argument_that_changes_is_an_error_at_once(toys):
    """Every storage is compared in every call: no step passes with other gradients."""
    model = Padded()
    how = {"actions": "selective", "planner": toys.everywhere("selective_all")}
    with mimose.attach(model, "1TiB", **how, layers=["layer"]) as session:
        for _ in range(6):
            model(toys.inputs(8, width=64), 0.0).backward()
        assert "selective_all" in session.records[-1].actions
        with pytest.raises(mimose.RecomputationError):
            model(toys.inputs(8, width=64), 1.0).backward()


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
