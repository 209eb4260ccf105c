"""A global batch on two ranks: the example trains, and ranks plan the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # all of a launch is its first test's


@pytest.mark.slow
def test_the_example_trains_under_ddp(launch: Callable[..., Any]) -> None:
    """Both ranks have one plan, and one model at the end."""
    pytest.importorskip("transformers")
    cases: dict[str, Any] = {"example": {}}
    first, second = launch("global_batch:train", cases, limit_seconds=240.0)["example"]

    assert first == second
    assert first["over"] == 0
    assert len(first["counts"]) == 2


def test_ranks_take_the_fewest_rows_and_the_mean_seconds(
    launch: Callable[..., Any],
) -> None:
    """All say so if their lengths differ."""
    cases: dict[str, Any] = {"differ": {}}
    found = launch("global_batch:differ", cases, limit_seconds=120.0)["differ"]

    for said, knots in found:
        assert "the ranks gave balance() different lengths" in said
        assert [[1.5, 3.5], [2.0]] == knots
