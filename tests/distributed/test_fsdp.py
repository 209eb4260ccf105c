"""FSDP2: plans differ by rank, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_CASES: dict[str, dict[str, Any]] = {
    "one group a layer": {"groups": "layers"},
    "no resharding": {"groups": "layers", "reshards": False},
    "mixed precision": {"groups": "layers", "mixed": True},
    "accumulation": {"groups": "layers", "n_parts": 2},
    "accumulation, no resharding": {
        "groups": "layers",
        "n_parts": 2,
        "reshards": False,
    },
    "two layers a group": {"groups": "pairs"},
    "two layers a group, no resharding": {"groups": "pairs", "reshards": False},
    "root only": {"groups": "root"},
    "attached before": {"groups": "layers", "attached_before": True},
    "attached before, mixed precision": {
        "groups": "layers",
        "attached_before": True,
        "mixed": True,
    },
    "two groups a layer, no resharding": {"groups": "parts", "reshards": False},
}


@pytest.fixture(scope="session")
def trained(launch: Callable[..., Any]) -> Any:
    """All cases, trained bare and planned on two ranks."""
    return launch("fsdp_training:compare", _CASES)


@pytest.mark.parametrize("case", _CASES)
def test_gradients_are_those_of_bare_fsdp(trained: Any, case: str) -> None:
    """Gradients and random state are equal though ranks recompute other layers."""
    first, second = trained[case]
    assert first["differences"] == second["differences"] == []
    assert first["actions"] == "rkrk"
    assert second["actions"] == "krkr"


@pytest.mark.parametrize("case", _CASES)
def test_the_optimizer_is_seen(trained: Any, case: str) -> None:
    """Its state counts by what each rank holds of it: together once, not twice."""
    states = [rank["optimizer bytes"] for rank in trained[case]]
    n_parameters = 128 * 32 + 4 * LAYER + 64 + 33 * 128
    assert sum(states) == 0
