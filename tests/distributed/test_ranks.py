"""The harness that runs cases on several ranks ends, whatever these do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_a_rank_that_fails_is_told_of(launch: Callable[..., Any]) -> None:
    """Whoever waits for it is killed, and the error is in the words of the failure."""
    results = launch("rank_toys:fail", {"first": {"which": 1}})
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        results["first"]
