"""What the finer exact actions are worth: how it is measured, and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import menu
from benchmarks.proofs.menu import MenuRow
from mimose.bench.grid.runner import GridRow, GridSettings
from mimose.bench.rows import read

DOCS = Path(__file__).resolve().parents[2] / "docs"
MIB = 2**20
PLANS = {
    "none": "",
    "oracle": "rr",
    "mimose-menu": "ll",
    "oracle-menu": "kl",
    "static": "rr",
    "static-menu": "ll",
}
SECONDS = {"": 1.0, "rr": 1.4, "ll": 1.2, "kl": 1.1}


def _row(strategy: str, step: int, **changes: Any) -> GridRow:
    """Plain training grows by 200 MiB in step 2, the others by 98 of 100 at most."""
    is_plain = strategy == "none"
    growth = 200 if is_plain and step == 2 else 98 if step == 2 else 50
    values: dict[str, Any] = {
        **dict.fromkeys(("start_bytes", "reserved_bytes", "retries"), 0),
        **dict.fromkeys(("host_bytes", "recomputed_flops")),
        **{"seconds": 0.0, "plan_seconds": 0.0, "cache_hit": False},
        "workload": "qa-bert",
        "scale": "tiny",
        "is_synthetic": True,
        "strategy": strategy,
        "budget_share": None if is_plain else 0.5,
        "headroom_bytes": None if is_plain else 100 * MIB,
        "step": step,
        "is_measured": step > 0,
        "sizes": json.dumps({"length": 10 + step}),
        "phase": "" if is_plain else "plan",
        "plan": PLANS[strategy],
        "base_bytes": MIB,
        "peak_bytes": (1 + growth) * MIB,
        "predicted_growth_bytes": None if is_plain else 98.0 * MIB,
        "loss": 1.0,
        "problem": "",
        "dtype": "float32",
        **GridSettings(
            workloads=(), strategies=(), device="sim", threads=1
        ).provenance(),
    }
    return GridRow(**{**values, **changes})


def _rows() -> list[GridRow]:
    return [_row(name, step) for name in PLANS for step in range(4)]


def _times() -> dict[str, menu.Runs]:
    """In a round in which the machine is busy all takes twice as long."""
    runs = [
        {"plan": plan, "round": number, "seconds": seconds * (2 if number == 1 else 1)}
        for plan, seconds in SECONDS.items()
        for number in range(3)
    ]
    return {json.dumps({"length": 10 + step}): runs for step in range(1, 4)}


def test_a_budget_is_compared_over_planned_steps() -> None:
    """Extra time of each way, steps over, and the use where a plan was needed."""
    rows = {row.strategy: row for row in menu.compare(_rows(), 0.5, _times())}
    extra = {name: round(row.extra, 6) for name, row in rows.items()}
    assert extra == {
        "static": 0.4,
        "static-menu": 0.2,
        "oracle": 0.4,
        "mimose-menu": 0.2,
        "oracle-menu": 0.1,
    }
    for row in rows.values():
        assert (row.steps, row.over, row.compared, row.needed) == (4, 0, 3, 1)
        assert row.use == pytest.approx(0.98)


def test_the_bars() -> None:
    """Half of the extra time keeps the bar at 0.5."""
    found = list(menu.compare(_rows(), 0.5, _times()))
    assert [(bar.value, bar.holds) for bar in menu.judge(found)] == [
        (pytest.approx(0.5), True),
        (pytest.approx(1.2 / 1.4), False),
        (pytest.approx(1.2 / 1.1), False),
        (0, True),
        (pytest.approx(0.98), True),
    ]


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_what_the_documentation_says_comes_from_the_rows() -> None:
    """Every line of the table."""
    rows = read(DOCS / "results" / "sim" / "menu.csv", MenuRow)
    text = (DOCS / "results" / "README.md").read_text(encoding="utf-8")
    for budget in (0.35, 0.5, 0.7):
        cells = [f"{menu.mean_extra(rows, n, budget):.1%}" for n in menu.STRATEGIES]
        assert f"| {budget:g} | {' | '.join(cells)} |" in text
