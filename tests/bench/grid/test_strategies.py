"""Strategies of the library's own sessions, and what their menus are."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode

from mimose.bench.grid import menu
from mimose.bench.grid.registry import STRATEGIES
from mimose.bench.grid.strategies import Everywhere, Setup
from mimose.bench.grid.workloads import WORKLOADS
from mimose.bench.step_meter import budget_meter
from mimose.planners import PlanningProblem
from mimose.run.actions import registry

WORKLOAD = WORKLOADS["qa-bert"]


class _Trained:
    """A tiny model, the setup for a strategy, and what a step of it gives."""

    def __init__(
        self, folder, headroom_bytes=2**40, lengths=(16, 24, 32), device="cpu"
    ):
        torch.manual_seed(0)
        self.model = WORKLOAD.build("tiny").to(device)
        self.n_tried = 0
        self.sizes = [{"length": length} for length in lengths]
        self.setup = Setup(
            model=self.model,
            device=torch.device(device),
            meter=budget_meter(torch.device(device)),
            headroom_bytes=headroom_bytes,
            sizes=self.sizes,
            longest=self.sizes[-1],
            loss=self.loss,
            try_step=self.try_step,
            shared=folder,
        )

    def loss(self, model, sizes):
        generator = torch.Generator().manual_seed(0)
        batch = WORKLOAD.batch(sizes, "tiny", generator)
        batch = {name: tensor.to(self.setup.device) for name, tensor in batch.items()}
        return model(**batch).loss

    def try_step(self, sizes):
        self.n_tried += 1
        self.loss(self.model, sizes).backward()
        self.model.zero_grad()

    def step(self):
        """Return loss and gradients of the longest batch."""
        torch.manual_seed(1)
        loss = self.loss(self.model, self.sizes[-1])
        loss.backward()
        gradients = {n: p.grad for n, p in self.model.named_parameters()}
        self.model.zero_grad()
        return loss.detach(), gradients

    def flops(self):
        """Return what such a step computes."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return counter.get_total_flops()


def _assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert gradient is other[1][name] or torch.equal(gradient, other[1][name]), name


@pytest.mark.parametrize("name", ["lean", "full", "hf-full", "selective-attention"])
def test_one_thing_for_every_layer_is_exact(name, tmp_path):
    """And the model is given back as it was."""
    trained = _Trained(tmp_path)
    bare = trained.step()
    applied = STRATEGIES[name].apply(trained.setup)
    _assert_equal(bare, trained.step())
    plan = applied.facts().plan
    assert plan == {"lean": "llllll", "full": "rrrrrr"}.get(name, "")
    applied.close()
    assert not any("forward" in vars(module) for module in trained.model.modules())
    _assert_equal(bare, trained.step())


def test_transformers_and_a_session_recompute_as_much(tmp_path):
    """All layers are rebuilt under either."""
    trained = _Trained(tmp_path)
    flops = [trained.flops()]
    for name in ("full", "hf-full"):
        applied = STRATEGIES[name].apply(trained.setup)
        flops.append(trained.flops())
        applied.close()
    assert flops[0] < flops[1] == flops[2]


@pytest.mark.parametrize(("name", "plan"), [("pool", "pppppp"), ("quantize", "qqqqqq")])
def test_a_lossy_one_leaves_the_loss_as_it_is(name, plan, tmp_path):
    """Gradients are others, and as they were when it is closed."""
    trained = _Trained(tmp_path)
    bare = trained.step()
    applied = STRATEGIES[name].apply(trained.setup)
    loss, gradients = trained.step()
    assert applied.facts().plan == plan
    assert torch.equal(bare[0], loss)
    changed = [n for n in bare[1] if not _is_equal(bare[1][n], gradients[n])]
    assert changed
    assert all(".layer." in name or "embeddings" in name for name in changed)
    applied.close()
    _assert_equal(bare, trained.step())


def _is_equal(one, other):
    return one is other or torch.equal(one, other)


@pytest.mark.sim
def test_who_is_told_plans_from_the_first_step_on(tmp_path):
    """What one has learned beforehand the other takes over; both are exact.

    Where bytes are exact: a process's own readings decide what is tried, and when.
    """
    trained = _Trained(tmp_path, lengths=(16, 20, 24, 28, 32), device="sim")
    bare = trained.step()
    tried = []
    for name in ("oracle-menu", "static-menu"):
        applied = STRATEGIES[name].apply(trained.setup)
        tried.append(trained.n_tried)
        _assert_equal(bare, trained.step())
        facts = applied.facts()
        assert facts.predicted_growth_bytes is not None
        assert len(facts.plan) == 6
        applied.close()
    assert tried[0] >= 2 * len(trained.sizes)
    assert tried[1] == tried[0] + 1  # for the longest sizes' names


def test_every_action_is_a_strategy():
    """A session can be asked for the whole menu, and each runs everywhere."""
    assert menu.menu_named("fine").names == menu.FINE
    assert (menu.ALL[0], menu.ALL[-1]) == menu.WHOLE_LAYERS
    ours = [action.spec for action in registry._ACTIONS]
    assert list(menu.menu_named("all").specs) == ours
    assert set(menu.BETWEEN) <= set(STRATEGIES)
    lossy = {spec.name for spec in ours if not spec.is_exact}
    inexact = {name for name, each in STRATEGIES.items() if not each.is_exact}
    assert inexact == {"mimose-all", "oracle-all", *lossy}


def test_what_waits_on_the_host_needs_an_accelerator():
    """On a CPU there is no other place; without a host all others run there."""
    needs = {spec.name for spec in menu.ALL_MENU.specs if spec.needs_host}
    assert needs == {"offload", "offload_input"}
    for name in (*menu.BETWEEN, "mimose-all"):
        assert bool(STRATEGIES[name].why_not("cpu")) == (name in needs)
        assert not STRATEGIES[name].why_not("sim")


def test_one_action_everywhere_is_a_plan_too():
    """Where an event may not run under it, the least takes its place."""
    zeros = np.zeros((3, 3))
    problem = PlanningProblem(
        events=("a", "b", "c"),
        actions=("keep", "lean", "recompute"),
        allowed=np.array([[True, True, True], [True, False, True], [True] * 3]),
        held_bytes=np.array([[3.0, 2.0, 1.0]] * 3),
        forward_excess_bytes=zeros,
        backward_excess_bytes=zeros,
        backward_net_bytes=zeros,
        cost=zeros,
        gap_bytes=np.zeros(4),
        gap_excess_bytes=np.zeros(4),
        start_bytes=0.0,
        optimizer_state_bytes=0.0,
        step_excess_bytes=0.0,
        budget_bytes=1.0,
        host_bytes=zeros,
        host_budget_bytes=0.0,
    )
    planner = Everywhere("lean")
    assert planner.plan(problem).actions == ("lean", "recompute", "lean")
    assert planner.action_at(1) == "lean"
