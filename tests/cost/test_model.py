"""The cost model: one immutable value, and who may replace it."""

import json

from mimose.cost.learner import Learner
from mimose.cost.measured import MeasuredStep
from mimose.cost.model import CostModel
from mimose.cost.series import kinds_of
from mimose.planners.actions import EXACT_MENU
from mimose.types import MOST_CONTEXTS, SegmentSample, StepInput, StepSample

KEEP, RECOMPUTE = EXACT_MENU.names


def _nothing():
    return CostModel(kinds_of(None, 0.0))


def test_contexts_and_families_are_forgotten_at_last():
    """Of inputs that differ ever again, the last contexts and their series stay."""
    learner = Learner(_nothing())
    sample = StepSample((), (), SegmentSample(1.0, 1.0), None, True)
    for n in range(3 * MOST_CONTEXTS):
        learner.use("context 0")
        step_input = StepInput(f"context {n}", (n,), False, f"structure {n}")
        learner.absorb(MeasuredStep(step_input, (), sample, 0.0, ()))
    model = learner.model
    assert MOST_CONTEXTS == len(model.patterns)
    assert 2 * MOST_CONTEXTS == len(model.series)
    assert "context 0" in model.patterns
    assert "context 1" not in model.patterns
    again = Learner(_nothing())
    saved = json.dumps(learner.state_dict())
    again.load_state_dict(json.loads(saved))
    assert saved == json.dumps(again.state_dict())
