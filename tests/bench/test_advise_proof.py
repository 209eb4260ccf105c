"""The advisor's proof: what it has recorded holds its bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.proofs import advise
from benchmarks.proofs.common import read

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.mark.skipif(not RESULTS.exists(), reason="runs in a checkout")
@pytest.mark.parametrize(("device", "part"), [("sim", "bytes"), ("cpu", "seconds")])
def test_recorded_rows_hold_their_bars(device, part):
    """What the documentation quotes is what the proof makes of them."""
    rows = read(RESULTS / device / "advise.csv")
    bars = list(advise.judge(rows, part))
    assert all(bar.holds for bar in bars), bars
    if part == "seconds":
        assert any("19 of 25" in bar.what for bar in bars)
        right = [row["is_right"] for row in rows if row["part"] == "verdict"]
        assert (27, 0) == (right.count(True), right.count(False))
