"""Phases, plans and the cache, step by step, on an exact meter."""

from dataclasses import replace
from types import SimpleNamespace

import torch

import mimose
from mimose.cost.problem import Memory
from mimose.planners import Search
from mimose.policy import plans
from mimose.runtime.budget import LeastPeaks
from mimose.types import StepInput


def test_less_headroom_makes_a_new_plan(toys, meter):
    """Where the cached one does not fit; that is found again as soon as it does."""
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
        assert 0 < after[0].plan_seconds < after[0].seconds
        assert after[0].actions.count("keep") < most
        assert max(record.observed_peak_bytes for record in after) <= budget
        meter.extra_bytes = 0
        toys.train(model, batches[:1], optimizer=optimizer)
        assert session.records[-1].cache_hit
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


def test_new_plans_are_measured_until_predictions_are_right(toys, meter):
    """And again after one that is not."""
    model = toys.chain(4)

    def n_measured():
        return session.state_dict()["cost_model"]["n_steps"]

    with mimose.attach(model, "1TiB", meter=meter) as session:
        toys.train(model, [toys.inputs(n) for n in (96, *range(16, 36))])
        settled = n_measured()
        assert settled < 16
        toys.train(model, [toys.inputs(n) for n in range(36, 44)])
        assert settled == n_measured()
        loss = model(toys.inputs(44)).sum()
        meter.extra_bytes = 2**20  # what no layer holds
        loss.backward()
        meter.extra_bytes = 0
        model.zero_grad()
        toys.train(model, [toys.inputs(n) for n in range(45, 53)])
        assert settled + 4 == n_measured()


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
    # Autocast's copies of weights are counted on the safe side.
    assert cast.predicted_growth_bytes >= cast.observed_growth_bytes
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
        original = plans.fill_problem

        def heavier(*args, **kwargs):
            problem = original(*args, **kwargs)
            return replace(problem, gap_bytes=problem.gap_bytes + 2.0**41)

        monkeypatch.setattr(plans, "fill_problem", heavier)
        model(toys.inputs(30)).backward()
    record = session.records[-1]
    assert ("fallback", {"recompute"}) == (record.phase, set(record.actions))
    assert "1024.00 GiB" in record.reason
    assert record.observed_peak_bytes is not None


def test_a_plan_without_proof_is_replaced_by_a_proven_one(toys, meter):
    """From the next time on its shape comes, at no higher cost."""
    model = toys.chain(6)
    batches = [toys.inputs(n) for n in (64, 20, 44, 32, 56, 26, 38, 50, 61, 61)]
    budget = toys.budget_between(model, batches[:1] * 2, 0.5, meter)
    narrow = {"planner": Search(width=2), "meter": meter}
    with mimose.attach(model, budget, **narrow) as session:
        toys.train(model, batches)
    first, second = list(session.records)[-2:]
    assert [False, True] == [first.cache_hit, second.cache_hit]
    assert second.recomputed_flops <= first.recomputed_flops
    assert second.observed_peak_bytes <= second.budget_bytes


def test_a_larger_batch_needs_at_least_as_much():
    """By today's start, or by that peak with the state made since: the lower."""
    least = LeastPeaks()
    least.add(StepInput("text", (2, 10), False), 500.0, 200.0, 40.0)
    least.add(StepInput("text", (2, 20), False), 700.0, 400.0, 40.0)

    def bound(*sizes, start=400.0, state=40.0, context="text"):
        return least.bound(StepInput(context, sizes, False), start, state)

    sizes = [(2, 10), (4, 15), (2, 25), (2, 9), (1, 99)]
    assert [500.0, 500.0, 700.0, 0.0, 0.0] == [bound(*s) for s in sizes]
    assert 0.0 == bound(2, 10, context="images")
    assert 300.0 == bound(2, 10, start=100.0)
    assert 560.0 == bound(2, 10, start=900.0, state=100.0)


def test_what_is_planned_for_less_in_vain_is_not_again(monkeypatch):
    """By a hundredth at a time; with another budget anew."""
    monkeypatch.setattr(plans, "extrapolation_ratio", lambda *_: 0.0)
    made = plans.Plans(SimpleNamespace(model=None), None, 0.0, 8)
    own, memory = StepInput("text", (2, 10), False), Memory(100.0, 0.0, 0.0)
    whole = made.usable_bytes(own, memory)

    def shares(n, memory, **how):
        whole, found = made.usable_bytes(own, memory), []
        for _ in range(n):
            made.lacked_room(own, memory, **how)
            found.append(round(made.usable_bytes(own, memory) / whole, 2))
        return found

    fewer = [round(1.0 - n / 100, 2) for n in range(1, 10)]
    assert [*fewer[:5], 1.0, 1.0] == shares(7, memory, gives_up=True)
    assert whole == made.usable_bytes(own, memory)
    assert [*fewer, 0.9, 0.9] == shares(11, memory._replace(budget_bytes=50.0))
