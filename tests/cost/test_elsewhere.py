"""What becomes of inputs that layers pack, from samples to a plan's growth."""

import pytest

from mimose.cost.growth import plan_growth
from mimose.cost.measured_step import with_step
from mimose.cost.model import CostModel, kinds_of
from mimose.cost.problem import Memory, fill_problem, untold
from mimose.planners import ActionSpec, Menu
from mimose.planners.actions import KEEP, RECOMPUTE
from mimose.types import (
    EventSample,
    Measured,
    SegmentSample,
    StepInput,
    StepSample,
)

PACK = ActionSpec(name="pack", code="p", resources=frozenset({"pack"}))
MENU = Menu((KEEP, PACK, RECOMPUTE))
# Bytes for each row of the batch, by action.
HELD = {"keep": 100.0, "pack": 40.0, "recompute": 10.0}
BACKWARD = 50.0
INPUT = 10.0
MEMORY = Memory(1e9, 0.0, 0.0, 0.0)
SHAPES = (8, 24, 16, 12, 20, 32)
N = 28
HIGH = 1000.0


def _facts(n):
    return StepInput("context", (n,), False, "structure")


def _taught(action, *, saves=False, passes=0, is_gone=True, high=None, model=None):
    """Teach steps of four layers, each a family, the second of which packs its input.

    Args:
        action: Of the second.
        saves: Whether layers save what they return, if they are kept.
        passes: How many layers have been left when the input goes.
        is_gone: Whether it goes before the backward.
        high: The layer whose forward makes the peak; 4 for the loss.
        model: What was known before.
    """
    model = CostModel(kinds_of("polynomial", 0.0), MENU) if model is None else model
    for n in SHAPES:
        events, samples = [], []
        for i in range(4):
            own = action if i == 1 else "recompute"
            event = Measured(f"layer.{i}#0", i, 0, (n,), own, f"family {i}")
            event.held_bytes = {a: HELD[a] * n for a in HELD}
            event.kept_output_bytes = INPUT * n if saves else 0.0
            event.input_bytes = INPUT * n
            if own == "pack":
                event.handed_bytes = INPUT * n
                event.gone_bytes = INPUT * n if is_gone else 0.0
                event.n_passed = passes
            events.append(event)
            flat = {a: (HIGH if i == high else 100.0) * n for a in HELD}
            rises = {own: BACKWARD * n}
            samples.append(EventSample(i, event.held_bytes, flat, rises, {own: 0.0}))
        nothing = SegmentSample(0.0, 0.0)
        loss = SegmentSample(0.0, HIGH * n if high == 4 else 0.0)
        sample = StepSample(tuple(samples), (nothing,) * 4, nothing, loss, True)
        model = model.grown(1000.0 * n)
        model = with_step(model, _facts(n), events, sample, 0.0, (1,) * 4)
    return model


@pytest.fixture(scope="module")
def collected():
    """Steps in which all is recomputed."""
    return _taught("recompute")


def _grown(model, actions):
    """Return what a plan's growth is, and what its problem says, for each row."""
    problem = fill_problem(model, _facts(N), MEMORY)
    growth = plan_growth(model, _facts(N), problem, actions, 0.0).bytes(0.0)
    return growth / N, problem


def test_what_packs_is_tried_before_it_is_planned(collected):
    """What it would hold may be known: what becomes of its input is not."""
    allowed = fill_problem(collected, _facts(N), MEMORY).allowed
    assert [[True, False, True]] * 4 == allowed.tolist()
    assert (("pack",),) * 4 == untold(collected, _facts(N))
    model = _taught("pack", model=collected)
    allowed = fill_problem(model, _facts(N), MEMORY).allowed
    assert [False, True, False, False] == allowed[:, 1].tolist()


@pytest.mark.parametrize(
    ("passes", "high", "is_there"),
    [
        (0, 2, False),
        (1, 2, True),
        (2, 4, False),
        (3, 4, True),
    ],
)
def test_an_input_goes_when_it_was_seen_to_go(passes, high, is_there):
    """A plan's levels are lower from there, and not before."""
    model = _taught("recompute", high=high)
    model = _taught("pack", passes=passes, high=high, model=model)
    plan = ("recompute", "pack", "keep", "keep")
    growth, problem = _grown(model, plan)
    assert (passes == 0) == problem.releases_input[1, 1]
    levels = {2: 10 + 40, 3: 10 + 40 + 100, 4: 10 + 40 + 100 + 100}
    expected = levels[high] - (0.0 if is_there else INPUT) + HIGH
    assert expected == pytest.approx(growth)
