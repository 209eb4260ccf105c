"""What is learned of the allocator: its allowance, and where memory runs out."""

from __future__ import annotations

import json

import pytest

from mimose.predictors import FragmentationAllowance, LearnedLimit

ROOM = 100.0


def _taught(gaps, requested=80.0, **options):
    """Return an allowance after steps that leave so many bytes in gaps."""
    allowance = FragmentationAllowance(**options)
    for gap in gaps:
        allowance.observe(requested, requested + gap, ROOM)
    return allowance


def test_the_prior_counts_until_enough_is_known():
    """Few steps without gaps do not lower it, one with large ones raises it."""
    assert _taught([]).value == 1.25
    assert _taught([], prior=1.08).value == 1.08
    assert _taught([0.0] * 7).value == 1.25
    assert _taught([32.0]).value == pytest.approx(1.4)
    assert _taught([8.0] * 8).value == pytest.approx(1.1)


def test_the_largest_gap_of_the_last_steps_counts():
    """And is forgotten after sixteen others."""
    assert _taught([24.0, *[8.0] * 15]).value == pytest.approx(1.3)
    assert _taught([24.0, *[8.0] * 16]).value == pytest.approx(1.1)


def test_small_steps_tell_nothing():
    """Their gaps are as large, and a larger share."""
    assert _taught([40.0] * 20, requested=40.0).value == 1.25


def test_it_stays_within_bounds():
    """Neither nothing nor half as much again and more."""
    assert _taught([0.0] * 20).value == 1.02
    assert _taught([300.0]).value == 1.5


def test_its_state_is_json():
    """Another knows as much."""
    allowance = _taught([8.0] * 12)
    other = FragmentationAllowance()
    other.load_state_dict(json.loads(json.dumps(allowance.state_dict())))
    assert other.value == allowance.value


def test_reserved_bytes_are_not_fewer_than_requested_ones():
    """A prior below one is a mistake."""
    with pytest.raises(ValueError, match="0\\.9"):
        FragmentationAllowance(0.9)


def test_a_limit_falls_when_memory_runs_out():
    """Below what was held; it is the budget at first, and no failure raises it."""
    limit = LearnedLimit(1000.0)
    limit.step()
    assert (1000.0, False) == (limit.bytes, limit.is_lowered)
    limit.ran_out(600.0)
    low = limit.bytes
    assert low < 600.0
    assert limit.is_lowered
    limit.ran_out(900.0)
    assert low == limit.bytes


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_limit_rises_slowly(n_failures):
    """After hundreds of quiet steps, twice as many a failure; to the budget at most."""
    limit = LearnedLimit(1000.0)
    for _ in range(n_failures):
        limit.ran_out(600.0)
    low = limit.bytes
    for _ in range(256 * n_failures):
        limit.step()
    assert low == limit.bytes
    limit.step()
    assert low < limit.bytes < 1.01 * 600
    for _ in range(2000):
        limit.step()
    assert 1000.0 == limit.bytes
