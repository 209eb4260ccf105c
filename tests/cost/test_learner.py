"""Lessons taken in beside training, and what steps write meanwhile."""

from __future__ import annotations

import pytest

from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.series import kinds_of
from mimose.planners.actions import KEEP, RECOMPUTE
from mimose.types import SegmentSample, StepInput, StepSample
from mimose.worker import Lane


class _Later:
    """Work that waits until the test says so."""

    is_inline = False

    def __init__(self):
        self.jobs = {}

    def submit(self, lane, key, job):
        assert lane is Lane.LEARN
        self.jobs[key] = job

    def catch_up(self):
        while self.jobs:
            for _ in self.jobs.popitem()[1]() or ():
                pass


@pytest.fixture
def later():
    """Work that nobody does yet."""
    return _Later()


@pytest.fixture
def learner(later):
    """One that has its lessons taken in later."""
    return Learner(CostModel(kinds_of(None, 0.0)), later)


def _step(n, context="c"):
    segment = SegmentSample(1.0, 2.0)
    facts = StepInput(context, (n,), False, "s")
    return facts, StepSample((), (), segment, segment, True)


def _absorb(learner, n, context="c", **others):
    facts, sample = _step(n, context)
    learner.absorb(facts, (), sample, 0.0, (), **others)


def test_lessons_wait_until_they_are_taken_in(learner, later):
    """In their order; how many steps were handed over is known before."""
    before = learner.model
    _absorb(learner, 8)
    _absorb(learner, 16, growth_bytes=100.0)
    assert learner.model is before
    assert learner.n_steps == 2
    assert len(later.jobs) == 1
    later.catch_up()
    assert (learner.model.n_steps, learner.model.scale) == (2, 100.0)
    assert learner.model.patterns["c"].high == (16,)


def _write_meanwhile(learner, write):
    """Teach a lesson during which steps write."""

    def lesson(model):
        write()
        return model

    learner._teach(lesson)


def test_what_steps_write_meanwhile_stays(learner, later):
    """A unit that must be kept, plans worth nothing, a context forgotten."""
    for context in ("a", "b"):
        _absorb(learner, 8, context)
    later.catch_up()

    def write():
        learner.restrict(0, [KEEP.name])
        learner.forget("b")
        learner.distrust_plans()

    _write_meanwhile(learner, write)
    _absorb(learner, 16, "a")
    later.catch_up()
    model = learner.model
    assert model.allowed(0) == (KEEP.name,)
    assert model.allowed(1) == (KEEP.name, RECOMPUTE.name)
    assert list(model.patterns) == ["a"]
    assert model.patterns["a"].high == (16,)
    assert model.n_steps == 3
    assert model.version > model.valid_since


def test_a_step_is_taken_back_whatever_steps_wrote_meanwhile(learner, later):
    """Its other half came later; the one before it stays."""
    _absorb(learner, 8)
    later.catch_up()
    _write_meanwhile(learner, learner.distrust_plans)
    _absorb(learner, 16)
    later.catch_up()
    assert learner.model.n_steps == 2
    learner.take_back()
    later.catch_up()
    assert learner.model.n_steps == 1
    assert learner.model.patterns["c"].high == (8,)


def test_a_lesson_that_fails_leaves_the_ones_before_it(learner, later):
    """And those behind it wait for their turn."""
    _absorb(learner, 8)
    _write_meanwhile(learner, lambda: 1 / 0)
    _absorb(learner, 16)
    with pytest.raises(ZeroDivisionError):
        later.catch_up()
    assert learner.model.n_steps == 1
    _absorb(learner, 24)
    later.catch_up()
    assert learner.model.n_steps == 3
