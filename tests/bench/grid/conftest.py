"""Rows of a grid that never ran."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mimose.bench.grid.rows import GridRow

MIB = 2**20


def _row(strategy: str, step: int, **changes: Any) -> GridRow:
    length = 10 * (step + 1)
    values: dict[str, Any] = {
        "workload": "tc-bert",
        "scale": "tiny",
        "is_synthetic": True,
        "strategy": strategy,
        "budget_share": None,
        "headroom_bytes": None,
        "step": step,
        "is_measured": step >= 2,
        "sizes": json.dumps({"length": length}),
        "phase": "",
        "plan": "",
        "base_bytes": 100 * MIB,
        "start_bytes": 100 * MIB,
        "peak_bytes": (100 + length) * MIB,
        "reserved_bytes": (100 + length) * MIB,
        "host_bytes": 0,
        "predicted_growth_bytes": None,
        "seconds": 0.1,
        "plan_seconds": 0.0,
        "cache_hit": False,
        "recomputed_flops": 0,
        "retries": 0,
        "loss": 1.0 / (step + 2),
        "problem": "",
        "load_average": 0.5,
        "seed": 0,
        "threads": 2,
        "dtype": "float32",
        "date": "2026-01-01T00:00:00",
        "device": "cpu: none",
        "python": "3.11",
        "torch": "2",
        "transformers": "5",
        "mimose": "0",
    }
    return GridRow(**{**values, **changes})


@pytest.fixture
def make_row() -> Any:
    """Make a row: growth is 10 MiB a step, and 10 more with each."""
    return _row


@pytest.fixture
def grid(make_row: Any) -> list[GridRow]:
    """Six steps of plain training and full checkpointing, and others at 35 MiB."""
    at = {"budget_share": 0.5, "headroom_bytes": 35 * MIB}
    rows = [make_row("none", step) for step in range(6)]
    rows += [
        make_row("full", s, seconds=0.16, peak_bytes=115 * MIB, recomputed_flops=10**9)
        for s in range(6)
    ]
    for step in range(6):
        growth = min(10 * (step + 1), 34)
        phase = "collect" if step == 0 else "plan"
        rows.append(
            make_row(
                "mimose",
                step,
                **at,
                phase=phase,
                plan="rrk" if step > 2 else "kkk",
                peak_bytes=(100 + growth) * MIB,
                predicted_growth_bytes=None if step == 0 else 1.01 * growth * MIB,
                seconds=0.12,
                plan_seconds=0.002 if step < 3 else 0.0001,
                cache_hit=step >= 3,
                recomputed_flops=3 * 10**8,
            )
        )
    rows.append(make_row("static", 0, **at, seconds=0.2, peak_bytes=140 * MIB))
    rows.append(make_row("static", 1, **at, problem="memory ran out"))
    rows.append(make_row("autosac", -1, **at, sizes="{}", problem="needs CUDA"))
    return rows
