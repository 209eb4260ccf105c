"""Phases, plans and the cache, step by step, on an exact meter."""

from dataclasses import replace

import pytest
import torch
from sklearn.tree import DecisionTreeRegressor

import mimose
from mimose.planners import Static
from mimose.policy import planning


def test_a_shape_seen_before_is_a_hit(toys, meter):
    """Plans are cached by shape, once the stepping down is over."""
    model = toys.chain(4)
    batches = [toys.inputs(n) for n in (8, 24) * 5]
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    planned = [record for record in session.records if record.phase == "plan"]
    hits = [record.cache_hit for record in planned]
    assert hits.index(True) == 2
    assert all(hits[2:])
    summary = session.summary()
    assert (sum(hits), len(hits) - sum(hits)) == (summary.cache_hits, 2)


def test_less_headroom_makes_a_new_plan(toys, meter):
    """A cached plan that no longer fits is dropped, and made anew for what is left."""
    model = toys.chain(6)
    batches = [toys.inputs(64)] * 6
    budget = toys.budget_between(model, batches[:2], 0.9, meter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with mimose.attach(model, budget, meter=meter) as session:
        toys.train(model, batches, optimizer=optimizer)
        before = session.records[-1]
        assert before.cache_hit
        most = before.actions.count("keep")
        spare = budget - before.observed_peak_bytes
        meter.extra_bytes = spare + 10_000
        toys.train(model, batches[:2], optimizer=optimizer)
        after = list(session.records)[-2:]
        assert [False, True] == [record.cache_hit for record in after]
        assert after[0].actions.count("keep") < most
        assert max(record.observed_peak_bytes for record in after) <= budget
        meter.extra_bytes = 0
        toys.train(model, batches[:1], optimizer=optimizer)
        assert not session.records[-1].cache_hit
        assert most == session.records[-1].actions.count("keep")


def test_accumulated_gradients_are_another_case(toys, meter):
    """A step that starts with gradients grows by fewer bytes and has its own plan."""
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for _ in range(8):
            model.zero_grad()
            for _ in range(2):
                model(toys.inputs(32)).backward()
    first, second = list(session.records)[-2:]
    assert ("plan", "plan") == (first.phase, second.phase)
    assert (True, True) == (first.cache_hit, second.cache_hit)
    assert second.observed_growth_bytes < first.observed_growth_bytes
    assert second.predicted_growth_bytes == second.observed_growth_bytes


def test_stepping_down_uses_the_room_little_by_little(toys, meter):
    """Between the safest plan and the final one lie two checked steps."""
    model = toys.chain(8)
    batches = [toys.inputs(64)] * 6
    _, session = toys.compare(model, batches, meter=meter)
    later = [record for record in session.records if record.phase != "collect"]
    assert 4 <= len(later)
    phases = [record.phase for record in later]
    assert ["step_down", "step_down", "plan", "plan"] == phases[:4]
    kept = [record.actions.count("keep") for record in later]
    assert 0 < kept[0] < kept[1] < kept[2] == kept[3] == 8


def test_a_static_planner_plans_for_its_shape(toys, meter):
    """One plan, made for the longest shape, serves all shapes."""
    model = toys.chain(6)
    sizes = (8, 64, 24, 40, 16, 48, 32, 56) * 2
    batches = [toys.inputs(n) for n in sizes]
    budget = toys.budget_between(model, [toys.inputs(64)] * 2, 0.5, meter)
    planner = Static(shape={"0.0": 64})
    options = {"planner": planner, "budget": budget, "meter": meter}
    found, session = toys.compare(model, batches, **options)
    assert [] == found
    planned = {r.actions for r in session.records if r.phase in ("plan", "step_down")}
    assert 1 == len(planned)
    assert {"keep", "recompute"} == set(*planned)
    assert 0 == session.summary().steps_over


@pytest.mark.parametrize("planner", ["greedy", "optimal"])
def test_named_planners_keep_the_budget(toys, meter, planner):
    """Every planner by name trains exactly; those that know peaks keep the budget."""
    model = toys.chain(6)
    batches = [toys.inputs(n) for n in (48, 64) * 6]
    budget = toys.budget_between(model, batches[:2], 0.5, meter)
    options = {"planner": planner, "budget": budget, "meter": meter}
    found, session = toys.compare(model, batches, **options)
    assert [] == found
    assert "plan" == session.records[-1].phase
    if planner != "greedy":
        assert 0 == session.summary().steps_over


def test_other_predictors_train_exactly(toys, meter):
    """A tree may predict worse, but never changes a result."""
    model = toys.chain(4)
    batches = [toys.inputs(n) for n in (8, 24) * 4]
    tree = DecisionTreeRegressor()
    found, session = toys.compare(model, batches, meter=meter, predictor=tree)
    assert [] == found
    assert 8 == len(session.records)


def test_autocast_has_its_own_plans(toys, meter):
    """Steps under autocast are another context than those without."""
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for _ in range(5):
            model(toys.inputs(32)).backward()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(toys.inputs(32))
            loss.backward()
            del loss
            model.zero_grad()
    plain, cast = list(session.records)[-2:]
    assert ("plan", "plan") == (plain.phase, cast.phase)
    assert plain.predicted_growth_bytes == plain.observed_growth_bytes
    # Copies of biases are in autocast's cache alone, those of weights in the graph too.
    off = cast.predicted_growth_bytes - cast.observed_growth_bytes
    assert abs(off) <= 0.005 * cast.observed_growth_bytes
    assert plain.observed_growth_bytes != cast.observed_growth_bytes


def test_a_prediction_alone_does_not_end_a_training(toys, meter, monkeypatch):
    """Where no plan is predicted to fit, all is recomputed, and what it takes decides.

    The budget has room for the batch, but not for what is predicted of it.
    """
    model = toys.chain(4)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        lengths = (8, 24, 16, 12, 20, 32, 28, 10, 14, 18, 22, 26)
        toys.train(model, [toys.inputs(n) for n in lengths])
        assert "plan" == session.records[-1].phase
        original = planning.fill_problem

        def heavier(*args, **kwargs):
            problem = original(*args, **kwargs)
            return replace(problem, gap_bytes=problem.gap_bytes + 2.0**41)

        monkeypatch.setattr(planning, "fill_problem", heavier)
        model(toys.inputs(30)).backward()
    record = session.records[-1]
    assert ("fallback", {"recompute"}) == (record.phase, set(record.actions))
    assert "1024.00 GiB" in record.reason
    assert record.observed_peak_bytes is not None
