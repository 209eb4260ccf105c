"""The advisor's proof: what it has recorded holds its bars."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.proofs import advise

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def recorded(device):
    """Return the rows of a device."""
    with (RESULTS / device / "advise.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            told = {name: text or None for name, text in line.items()}
            told.pop("clock_ceiling", None)
            for name in ("r2", "ceiling", "predicted", "measured", "batch"):
                told[name] = float(told[name]) if told[name] else None
            told["is_right"] = {"True": True, "False": False}.get(told["is_right"])
            told["refused"] = told["refused"] or ""
            yield advise.AdviseRow(**told)


@pytest.mark.skipif(not RESULTS.exists(), reason="runs in a checkout")
@pytest.mark.parametrize(("device", "part"), [("sim", "bytes"), ("cpu", "seconds")])
def test_recorded_rows_hold_their_bars(device, part):
    """What the documentation quotes is what the proof makes of them."""
    rows = list(recorded(device))
    bars = list(advise.judge(rows, part))
    assert all(bar.holds for bar in bars), bars
    if part == "seconds":
        assert any("19 of 25" in bar.what for bar in bars)
        right = [row.is_right for row in rows if row.part == "verdict"]
        assert (27, 0) == (right.count(True), right.count(False))
