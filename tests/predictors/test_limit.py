"""A limit that falls when memory runs out, and rises slowly."""

from __future__ import annotations

from mimose.predictors import LearnedLimit


def test_it_is_the_budget_at_first():
    """Nothing has run out yet."""
    limit = LearnedLimit(1000.0)
    limit.step()
    assert 1000.0 == limit.bytes
    assert not limit.is_lowered


def test_it_falls_below_what_was_held():
    """Plans for it leave what the failed step held out of reach."""
    limit = LearnedLimit(1000.0)
    limit.ran_out(600.0)
    assert limit.bytes < 600.0
    assert limit.is_lowered


def test_it_never_rises_by_running_out():
    """A failure at more than is planned for changes nothing."""
    limit = LearnedLimit(1000.0)
    limit.ran_out(600.0)
    before = limit.bytes
    limit.ran_out(900.0)
    assert before == limit.bytes


def test_it_rises_slowly_and_to_the_budget_at_most():
    """Hundreds of quiet steps come first; then it takes hundreds more."""
    limit = LearnedLimit(1000.0)
    limit.ran_out(600.0)
    low = limit.bytes
    for _ in range(256):
        limit.step()
    assert low == limit.bytes
    limit.step()
    assert low < limit.bytes < 1.01 * 600
    for _ in range(2000):
        limit.step()
    assert 1000.0 == limit.bytes


def test_each_failure_doubles_the_wait():
    """A wall that stands is met ever more rarely."""
    limit = LearnedLimit(1000.0)
    for _ in range(2):
        limit.ran_out(600.0)
    low = limit.bytes
    for _ in range(512):
        limit.step()
    assert low == limit.bytes
    limit.step()
    assert low < limit.bytes
