"""The proof of windows judges forwards, and trains each pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.proofs import windows as proof
from benchmarks.proofs.common import Settings
from benchmarks.proofs.settings.case import World
from benchmarks.proofs.window_patterns import PATTERNS


def _row(**changes: Any) -> proof.WindowRow:
    fields = {
        "case": "simcse",
        "batch": 3,
        "length": 64,
        "step": 7,
        "phase": "plan",
        "recomputed": 2,
        "actions": 6,
        "budget_bytes": 100,
        "least_bytes": 60,
        "most_bytes": 160,
        "start_bytes": 40,
        "predicted_growth_bytes": 50.0,
        "observed_growth_bytes": 50,
        "peak_bytes": 90,
        "recomputed_flops": 10,
        "oracle_flops": 20.0,
        "window_flops": 20,
        "reason": "",
        "is_equal": True,
    }
    settings = Settings(device="sim")
    return proof.WindowRow(**{**fields, **changes}, **settings.provenance())


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, 0),
        ({"peak_bytes": 101}, 1),
        ({"is_equal": False}, 1),
        ({"phase": "fallback"}, 1),
        ({"window_flops": 40}, 1),
    ],
)
def test_bars(changes: dict[str, Any], missed: int) -> None:
    """Over the budget, other results, no plan, too much recomputed: each misses."""
    _, bars = proof._summarise([_row(), _row(**changes)])
    assert missed == sum(not bar.holds for bar in bars)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_train(name: str) -> None:
    """Each has a finite loss on a short batch."""
    torch.manual_seed(0)
    training = PATTERNS[name].build(World("cpu", 1))
    assert torch.isfinite(training.step(16))
