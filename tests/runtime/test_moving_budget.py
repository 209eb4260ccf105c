"""A budget that is set between steps, or asked for at each window."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mimose

pytestmark = pytest.mark.sim

GIB = 2**30
WIDTH = 1024
LENGTHS = (8192, 16384, 24576, 32768)


def _layer():
    wide = 3 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH))


class _Training:
    """Six layers on the device, and an optimizer."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(_layer() for _ in range(6))).to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def backward(self, n):
        self.model(torch.ones(n, WIDTH, device="sim")).sum().backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, n):
        self.backward(n)
        self.update()


@pytest.fixture
def training(sim):
    """Nothing here is about numbers."""
    sim.set_hollow(sim.CARDS["h100"])
    return _Training()


def _attached(training, budget, **options):
    session = mimose.attach(training.model, budget, layers=nn.Sequential, **options)
    for n in LENGTHS * 6:
        training.step(n)
    assert session.records[-1].phase == "plan"
    return session


def test_each_budget_is_kept_and_no_plan_is_made_twice(training):
    """Up and down between three: once the allowance rests, each plan is found again."""
    with _attached(training, "5GiB") as session:
        budgets = ("4GiB", "5GiB", "3GiB")
        for budget in budgets * 4:
            session.budget = budget
            for n in LENGTHS:
                training.step(n)
        made, first = session.summary().cache_misses, len(session.records)
        for budget in budgets * 2:
            session.budget = budget
            for n in LENGTHS:
                training.step(n)
                record = session.records[-1]
                assert record.budget_bytes == session.budget == session.budget_bytes
                assert record.reserved_peak_bytes <= record.budget_bytes
    summary, late = session.summary(), list(session.records)[first:]
    assert (summary.cache_misses, summary.steps_over) == (made, 0)
    assert all(record.cache_hit for record in late)
    assert len({record.actions for record in late}) > 2
    assert (3 * GIB, 5 * GIB) == summary.budget_range
    assert "3.00 GiB to 5.00 GiB" in session.report()


@pytest.mark.parametrize("wall", [True, False])
def test_blocks_above_a_lowered_budget_are_freed_at_once(training, sim, wall):
    """So that whoever wakes beside training has them before the next step."""
    with _attached(training, "5GiB", wall=wall) as session:
        assert sim.memory_reserved() > 3 * GIB
        session.budget = "3GiB"
        assert sim.memory_reserved() <= 3 * GIB
        n_freed = sim.memory_stats()["num_device_free"]
        training.step(64)
        assert n_freed == sim.memory_stats()["num_device_free"]


def test_less_than_what_is_held_is_refused(training, sim):
    """With the numbers; the budget stays, whether it was set or asked for."""
    answers = []
    with _attached(training, "5GiB") as session:
        for budget in ("20MiB", 0.001):
            with pytest.raises(mimose.InfeasibleBudgetError) as caught:
                session.budget = budget
            assert caught.value.least_peak_bytes >= sim.memory_allocated()
            assert caught.value.budget_bytes < GIB
        session.budget = lambda: answers.pop()
        answers[:] = ["4GiB", "20MiB"]
        with pytest.raises(mimose.InfeasibleBudgetError):
            training.step(64)
        assert 5 * GIB == session.budget
        training.step(64)
        assert 4 * GIB == session.budget
        with pytest.raises(mimose.BudgetError):
            session.budget = "forty"
        answers.append("6GiB")
        training.step(64)  # the function is still asked
    assert 6 * GIB == session.records[-1].budget_bytes
    with pytest.raises(mimose.MimoseError, match="detached"):
        session.budget = "1GiB"


def test_a_function_is_asked_once_a_window(training):
    """Of four micro-steps; they have one budget, that of the first."""
    asked = []

    def budget():
        asked.append(4 + len(asked))
        return f"{asked[-1]}GiB"

    with mimose.attach(training.model, budget, layers=nn.Sequential) as session:
        assert [4] == asked
        for _ in range(3):
            for _ in range(4):
                training.backward(64)
            training.update()
    assert [4, 5, 6, 7] == asked
    budgets = [record.budget_bytes // GIB for record in session.records]
    assert [5] * 4 + [6] * 4 + [7] * 4 == budgets


@pytest.mark.parametrize("where", ["forward", "between", "backward", "accumulating"])
def test_one_that_is_set_within_a_window_holds_from_the_next(training, where):
    """It is read when it is set; a step never has two."""
    with _attached(training, "5GiB") as session:

        def lower(*_):
            session.budget = "4GiB"
            assert 5 * GIB == session.budget

        middle = training.model[3]
        if where == "forward":
            middle.register_forward_hook(lower)
        elif where == "backward":
            middle.register_full_backward_hook(lower)
        loss = training.model(torch.ones(64, WIDTH, device="sim")).sum()
        if where == "between":
            lower()
        loss.backward()
        if where == "accumulating":
            lower()
        training.backward(64)
        assert {5 * GIB} == {r.budget_bytes for r in list(session.records)[-2:]}
        training.update()
        middle._forward_hooks.clear()
        middle._backward_hooks.clear()
        training.step(64)
    assert 4 * GIB == session.records[-1].budget_bytes


def test_shares_are_of_what_is_there_when_they_are_set(training, sim):
    """And all there is, too: another process may have come or gone."""
    sim.set_total_memory(10 * GIB)
    with _attached(training, 0.5) as session:
        assert 5 * GIB == session.budget
        sim.set_total_memory(20 * GIB)
        session.budget = "50%"
        assert 10 * GIB == session.budget
        session.budget = None
        assert session.budget == int(0.97 * 20 * GIB)
        session.budget = "+1GiB"
        assert session.budget == sim.memory_reserved() + GIB
