"""Plans made ahead, and plans that are replaced by proven ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mimose
from mimose.planners import make_planner

LENGTHS = [64, 20, 64, *range(22, 62, 4)]


def _model(toys, meter):
    model = toys.chain(6)
    ends = [toys.inputs(LENGTHS[0]), toys.inputs(LENGTHS[-1])]
    return model, toys.budget_between(model, ends, 0.6, meter)


def _train(toys, session, lengths):
    """Train on, without an optimizer's state that comes and goes."""
    model = session._model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    toys.train(model, [toys.inputs(n) for n in lengths], optimizer=optimizer)


@pytest.fixture
def planned(toys, meter):
    """A session that has learned what a chain of layers takes."""
    model, budget = _model(toys, meter)
    with mimose.attach(model, budget, meter=meter) as session:
        _train(toys, session, LENGTHS)
        assert "plan" == session.records[-1].phase
        yield session


def _prepare(session, name, length):
    engine = session._engine
    facts, table = engine.describer.last
    sizes = table.fill({name: length}, facts.sizes)
    memory = engine.driver.memory_now()
    engine.policy.prepare(facts._replace(sizes=sizes), table, memory)


def test_a_plan_made_ahead_is_there_when_its_shape_comes(toys, planned):
    """Its step makes none; what comes out is what it would have made itself."""
    plans = planned._engine.policy.plans
    name = next(iter(planned.records[-1].shape))
    _prepare(planned, name, 51)
    made = plans.n_made
    plans._maker.make = None  # nobody makes one any more
    _train(toys, planned, [51])
    last = planned.records[-1]
    assert (last.phase, last.cache_hit) == ("plan", True)
    assert (plans.n_ready, plans.n_made) == (1, made)
    assert last.observed_peak_bytes <= last.budget_bytes
    assert last.observed_growth_bytes == pytest.approx(last.predicted_growth_bytes)
    assert 1 == planned.summary().plans_ready
    assert "made ahead" in planned.report()


def test_a_plan_that_does_not_fit_any_more_is_made_anew(toys, planned, meter):
    """Less is free than when it was made."""
    name = next(iter(planned.records[-1].shape))
    _prepare(planned, name, 63)
    plans = planned._engine.policy.plans
    last = planned.records[-1]
    meter.extra_bytes = (last.budget_bytes - last.start_bytes) * 2 // 5
    made = plans.n_made
    _train(toys, planned, [63])
    assert (plans.n_ready, plans.n_made) == (0, made + 1)
    last = planned.records[-1]
    assert last.observed_peak_bytes <= last.budget_bytes


def test_a_plan_without_proof_is_replaced_by_a_proven_one(toys, meter, monkeypatch):
    """From the next time on its shape comes, at no higher cost."""

    def unproven(self, problem):
        # What recomputes everything is a plan, and never proven.
        least = mimose.planners.safest_plan(problem)
        return replace(least, planner=self.name, optimal=False)

    model, budget = _model(toys, meter)
    with mimose.attach(model, budget, meter=meter) as session:
        _train(toys, session, LENGTHS)
        proven = make_planner("optimal")
        plans = session._engine.policy.plans
        monkeypatch.setattr(type(plans._maker.planner), "plan", unproven)
        monkeypatch.setattr(plans, "_refiner", proven)
        _train(toys, session, [61, 61])
        first, second = list(session.records)[-2:]
        assert [False, True] == [first.is_optimal, second.is_optimal]
        assert [False, True] == [first.cache_hit, second.cache_hit]
        assert second.recomputed_flops < first.recomputed_flops
        assert second.observed_peak_bytes <= budget
        problem = session.planning_problem()
        assert problem.events == second.events
