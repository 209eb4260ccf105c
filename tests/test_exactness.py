"""Whatever the plan: losses, gradients, buffers, random state as in the bare model."""

import copy

import pytest
from torch.utils.flop_counter import FlopCounterMode

import mimose

ZOO = ("bert", "t5", "resnet")
N_STEPS = 12


@pytest.mark.parametrize("name", ZOO)
def test_every_plan_trains_like_the_bare_model(toys, name):
    """Twelve steps under four planners equal as many bare ones, bit for bit."""
    model = toys.zoo_model(name)
    batches = toys.zoo_batches(name, N_STEPS)
    bare = toys.train(copy.deepcopy(model), batches)
    assert [] == _compared(toys, bare, model, batches, {"recompute"}, planner="full")
    mixed = {"keep", "recompute"}
    assert [] == _compared(toys, bare, model, batches, mixed, planner="every-2")
    options = {"meter": toys.BlindMeter(), "planner": toys.RandomPlanner()}
    assert [] == _compared(toys, bare, model, batches, mixed, **options)
    with toys.counting() as meter:
        budget = toys.budget_between(model, batches[:2], 0.5, meter)
        options = {"meter": meter, "budget": budget}
        assert [] == _compared(toys, bare, model, batches, mixed, **options)


def _compared(toys, bare, model, batches, actions, *, budget="1TiB", **options):
    """Train a copy under a session; return in what it differs."""
    with toys.untracked():
        twin = copy.deepcopy(model)
    with mimose.attach(twin, budget, **options) as session:
        trained = toys.train(twin, batches)
    planned = [record for record in session.records if record.phase == "plan"]
    assert len(batches) // 3 <= len(planned)
    assert actions == {action for record in planned for action in record.actions}
    assert 0 == sum(record.retries for record in session.records)
    return toys.differences(bare, trained)


@pytest.mark.parametrize("name", ZOO)
def test_flops_are_exact_in_every_phase(toys, name):
    """The backward's FLOPs exceed the bare ones by exactly what the record says."""
    model = toys.zoo_model(name)
    batches = toys.zoo_batches(name, 2) * 6
    bare = _backward_flops(toys, copy.deepcopy(model), batches)
    with (
        toys.counting() as meter,
        mimose.attach(
            model, "1TiB", planner=toys.RandomPlanner(2), meter=meter
        ) as session,
    ):
        planned = _backward_flops(toys, model, batches)
    recomputed = [record.recomputed_flops for record in session.records]
    assert [a - b for a, b in zip(planned, bare, strict=True)] == recomputed
    assert {"collect", "step_down", "plan"} == {r.phase for r in session.records}


def _backward_flops(toys, model, batches):
    counts = []
    for batch in batches:
        loss = toys.forward(model, batch)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(counter.get_total_flops())
        del loss
        model.zero_grad()
    return counts


def test_budget_is_kept_at_every_step(toys, meter):
    """No step under a budget that needs plans exceeds it, and the room is used."""
    model = toys.zoo_model("bert")
    batches = toys.text_batches([9, 30, 17, 24, 38, 12, 27, 35, 21, 14] * 3)
    budget = toys.budget_between(model, batches[:5], 0.5, meter)
    found, session = toys.compare(model, batches, budget=budget, meter=meter)
    assert [] == found
    assert 0 == session.summary().steps_over
    assert session.peak_bytes <= budget
    last = [record for record in session.records if record.phase == "plan"][-8:]
    assert {"keep", "recompute"} == {action for r in last for action in r.actions}
