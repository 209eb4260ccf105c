"""The harness that runs cases on several ranks ends, whatever these do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


def test_a_rank_that_fails_is_told_of(launch: Callable[..., Any]) -> None:
    """Whoever waits for it is killed, and the error is in the words of the failure."""
    results = launch("rank_toys:fail", {"first": {"which": 1}})
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        results["first"]


def test_ranks_that_hang_are_killed(launch: Callable[..., Any]) -> None:
    """The limit is hard, and says where that rank was and what others returned."""
    began = time.monotonic()
    cases = {"long": {"which": 1, "seconds": 600}}
    results = launch("rank_toys:hang", cases, limit_seconds=20.0)
    assert time.monotonic() - began < 60
    with pytest.raises(AssertionError, match=r"rank_toys\.py") as caught:
        results["long"]
    assert "rank 0 returned 'not I'" in str(caught.value)
    assert "rank 1 did not end this case" in str(caught.value)
