"""Batches in micro-batches on several ranks: gradients of the whole, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # all of a launch is its first test's
_CASES: dict[str, dict[str, Any]] = {}
for _kind in ("ddp", "fsdp"):
    _CASES[_kind] = {"kind": _kind}
    _CASES[f"{_kind}, counted"] = {"kind": _kind, "share": 0.3}
    _CASES[f"{_kind}, tokens"] = {"kind": _kind, "loss": "tokens"}


@pytest.fixture(scope="session")
def trained(launch: Callable[..., Any]) -> Any:
    """Both kinds, on two ranks whose batches differ in rows and lengths."""
    return launch("micro_batches:compare", _CASES, limit_seconds=240.0)


@pytest.fixture(scope="session")
def refused(launch: Callable[..., Any]) -> Any:
    """Batches of which nothing counts on one rank."""
    cases = {kind: {"kind": kind} for kind in ("fsdp", "ddp")}
    return launch("micro_batches:refuse", cases, limit_seconds=240.0)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_where_nothing_counts_on_one_rank_all_raise(refused: Any, kind: str) -> None:
    """Before the first part; the others would wait for its gradients."""
    first, second = refused[kind]
    assert first.startswith("ValueError: nothing counts in the 14 rows")
    assert second.startswith("OtherRankError: rank 0")


@pytest.mark.parametrize("case", _CASES)
def test_gradients_are_those_of_all_ranks_batches(trained: Any, case: str) -> None:
    """In the loop of one process: nobody says when gradients are reduced."""
    for rank in trained[case]:
        assert rank["error"] <= 1e-10
        known = rank["weights"][1 if "tokens" in case else 0 :]
        assert all(sum(own) == pytest.approx(1.0) for own in known)


def test_ranks_of_ddp_run_as_many_as_each_needs(trained: Any) -> None:
    """They meet in the last one alone."""
    first, second = trained["ddp"]
    assert first["counts"] != second["counts"]
    assert all(0.0 not in own for own in first["weights"] + second["weights"])


def test_ranks_that_wait_run_equally_many(trained: Any) -> None:
    """FSDP gathers weights in each forward: some rank runs rows again for nothing."""
    first, second = trained["fsdp"]
    assert first["counts"] == second["counts"]
    assert any(0.0 in own for own in first["weights"] + second["weights"])
