"""The budget on an accelerator: the allocator keeps it, in training steps alone."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mimose

pytestmark = pytest.mark.sim

MIB = 2**20
WIDTH = 1024


@pytest.fixture(autouse=True)
def _hollow(sim):
    """Nothing here is about numbers."""
    sim.set_hollow(sim.CARDS["h100"])


class _Layer(nn.Module):
    """Takes a product, and looks at the wall in its forward and its backward."""

    def __init__(self, seen):
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.seen = seen

    def forward(self, x):
        self.seen.append(torch.sim.get_per_process_memory_fraction())
        h = torch.relu(self.product(x))
        if h.requires_grad:
            h.register_hook(self._look)
        return h

    def _look(self, _):
        self.seen.append(torch.sim.get_per_process_memory_fraction())


class _Training:
    """Six layers on the device, an optimizer, and what was seen of the wall."""

    def __init__(self):
        torch.manual_seed(0)
        self.seen = []
        self.model = nn.Sequential(*(_Layer(self.seen) for _ in range(6))).to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self, n):
        return self.model(torch.ones(n, WIDTH, device="sim")).sum()

    def step(self, n):
        self.loss(n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _fraction(n_bytes):
    return n_bytes / torch.sim.mem_get_info()[1]


def test_it_stands_from_forward_to_the_end_of_backward(sim):
    """Neither before nor behind, in an optimizer's step or an evaluation."""
    training, outside = _Training(), []

    def look(*_):
        outside.append(sim.get_per_process_memory_fraction())

    training.optimizer.register_step_pre_hook(look)
    with mimose.attach(training.model, "400MiB"):
        training.step(64)
        look()
        assert set(training.seen) == {_fraction(400 * MIB)}
        training.seen.clear()
        training.loss(64)  # no backward follows
        training.model.eval()
        training.seen.clear()
        with torch.no_grad():
            training.loss(64)
        assert {*training.seen, *outside} == {1.0}
        training.model.train()
        kept = training.loss(64)
    assert sim.get_per_process_memory_fraction() == 1.0
    kept.backward()  # of a session that is gone
    assert sim.get_per_process_memory_fraction() == 1.0


def test_it_stands_in_a_backward_whatever_ran_before(sim):
    """An evaluation of the model, another model's optimizer, a backward before."""
    training, other = _Training(), nn.Linear(4, 4).to("sim")
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    with mimose.attach(training.model, "400MiB"):
        loss = training.loss(64)
        with torch.no_grad():
            training.loss(64)
        other(torch.ones(1, 4, device="sim")).sum().backward()
        others.step()
        for _ in range(2):
            training.seen.clear()
            loss.backward(retain_graph=True)
            # But the first look, at the output, comes before the session's own.
            assert set(training.seen[1:]) == {_fraction(400 * MIB)}
        assert sim.get_per_process_memory_fraction() == 1.0


def test_it_falls_with_a_forwards_graph(sim):
    """A batch that is left out behind its forward leaves no wall to others."""
    training = _Training()
    with mimose.attach(training.model, "400MiB"):
        loss = training.loss(64)
        assert sim.get_per_process_memory_fraction() < 1.0
        del loss
        assert sim.get_per_process_memory_fraction() == 1.0


def test_a_users_own_fraction_comes_back(sim):
    """And where that is lower than the budget it holds in the step, too."""
    training = _Training()
    sim.set_per_process_memory_fraction(_fraction(300 * MIB))
    with mimose.attach(training.model, "400MiB"):
        training.step(64)
    assert set(training.seen) == {_fraction(300 * MIB)}
    assert sim.get_per_process_memory_fraction() == pytest.approx(_fraction(300 * MIB))


def test_without_a_wall_and_for_baselines_there_is_none(sim):
    """Baselines do as they would by themselves."""
    training = _Training()
    for options in ({"wall": False}, {"planner": "full"}):
        with mimose.attach(training.model, "400MiB", **options):
            training.step(64)
    assert set(training.seen) == {1.0}


def test_cached_blocks_are_freed_by_the_allocator_alone(sim):
    """Many lengths, a budget that binds: no segment is freed but at a flush."""
    training = _Training()
    with mimose.attach(training.model, "420MiB") as session:
        for n in (1024, 2048, 3072, 4096, 5120, 6144) * 8:
            before = sim.memory_stats()
            training.step(n)
            after = sim.memory_stats()
            freed = after["num_device_free"] - before["num_device_free"]
            flushed = after["num_alloc_retries"] - before["num_alloc_retries"]
            assert bool(freed) == bool(flushed)
    summary = session.summary()
    assert (summary.steps_over, summary.retries) == (0, 0)
    assert session.records[-1].phase == "plan"
    assert session.peak_bytes <= 420 * MIB
    assert summary.fragmentation >= 1.0


def test_blocks_above_the_budget_are_freed_as_a_step_begins(sim):
    """What others have cached does not count against it."""
    training = _Training()
    with mimose.attach(training.model, "300MiB") as session:
        torch.empty(500 * MIB, dtype=torch.uint8, device="sim")
        training.step(64)
    assert session.records[-1].reserved_peak_bytes <= 300 * MIB


@pytest.mark.parametrize("wall", [True, False])
def test_blocks_above_a_lowered_budget_are_freed_at_once(sim, wall):
    """So that whoever wakes beside training has them before the next step."""
    training = _Training()
    sim.set_total_memory(2**32)
    with mimose.attach(training.model, None, wall=wall) as session:
        assert session.budget == 2**32 - 2**29
        training.step(8192)
        assert sim.memory_reserved() > 320 * MIB
        session.budget = "320MiB"
        assert sim.memory_reserved() <= 320 * MIB
        n_freed = sim.memory_stats()["num_device_free"]
        training.step(64)
        assert n_freed == sim.memory_stats()["num_device_free"]
        sim.set_total_memory(2**33)
        session.budget = "50%"
        assert session.budget == 2**32
        session.budget = "+100MiB"
        assert session.budget == sim.memory_reserved() + 100 * MIB


class _Greedy(_Layer):
    """Asks for more than there is, in so many of its forwards."""

    n_greedy = 0
    held, alive = [], []  # of the class: those of the layer are put back

    def forward(self, x):
        _Greedy.alive.append([each() is not None for each in _Greedy.held])
        h = super().forward(x)
        if _Greedy.n_greedy:
            _Greedy.n_greedy -= 1
            _Greedy.held.append(weakref.ref(h))
            torch.empty(2**40, dtype=torch.uint8, device="sim")
        return h


@pytest.fixture
def _no_collector():
    """Nothing is collected but by counts of references, or by hand."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("n_greedy", [1, 2])
def test_nothing_of_a_forward_that_ran_out_is_left(sim, monkeypatch, n_greedy):
    """As it runs again, and as the loop has caught the error."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    training = _Training()
    training.model[3] = _Greedy(training.seen).to("sim")
    _Greedy.held, _Greedy.alive = [], []
    with mimose.attach(training.model, "400MiB") as session:
        for n in (256, 512, 768, 1024) * 5:
            training.step(n)
        assert "keep" in session.records[-1].actions
        _Greedy.n_greedy = n_greedy
        with pytest.raises(torch.OutOfMemoryError) if n_greedy == 2 else nullcontext():
            training.loss(1024).backward()
        assert [each() for each in _Greedy.held] == [None] * n_greedy
        assert not any(map(any, _Greedy.alive))
        assert sim.get_per_process_memory_fraction() == 1.0
    assert session.summary().retries == 1


def test_less_is_planned_for_where_others_hold_the_device(sim):
    """A device that has less than the budget: one failure shows how much there is."""
    training = _Training()
    with mimose.attach(training.model, "900MiB") as session:
        for n in (1024, 2048, 3072, 4096) * 3:
            training.step(n)
        sim.set_limit(270 * MIB)
        sim.empty_cache()
        for _ in range(4):
            training.step(4096)
        record = session.records[-1]
        sim.set_limit(None)
        session.budget = "1GiB"  # what ran out in a smaller one tells nothing of it
        training.step(4096)
    assert session.summary().retries <= 1
    assert record.reserved_peak_bytes <= 270 * MIB
    assert set(session.records[-1].actions) == {"keep"}
