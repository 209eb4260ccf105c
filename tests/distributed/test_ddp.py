"""DDP: plans differ by rank, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)  # all of a launch is its first test's
_SETTINGS: dict[str, dict[str, Any]] = {
    "static graph, unused": {
        "options": {"static_graph": True},
        "model_options": {"unused": True},
    },
    "accumulation, bucket views": {
        "options": {"gradient_as_bucket_view": True},
        "n_parts": 2,
    },
}
_CASES = {name: {"attach_to": "inner", **each} for name, each in _SETTINGS.items()} | {
    "wrapper": {"attach_to": "wrapper", "n_parts": 3},
    "attached before": {"attach_to": "before"},
}


@pytest.fixture(scope="session")
def trained(launch: Callable[..., Any]) -> Any:
    """All cases, trained bare and planned on two ranks."""
    return launch("ddp_training:compare", _CASES, limit_seconds=240.0)


@pytest.mark.parametrize("case", _CASES)
def test_gradients_are_those_of_bare_ddp(trained: Any, case: str) -> None:
    """Gradients, buffers and random state are equal though ranks recompute others."""
    first, second = trained[case]
    assert first["differences"] == second["differences"] == []
    assert first["actions"] == "rkrk"
    assert second["actions"] == "krkr"
