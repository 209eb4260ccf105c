"""What the finer exact actions are worth: how it is measured, and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import menu
from benchmarks.proofs.menu import MenuRow
from mimose.bench.rows import read

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_what_the_documentation_says_comes_from_the_rows() -> None:
    """Every line of the table."""
    rows = read(DOCS / "results" / "sim" / "menu.csv", MenuRow)
    text = (DOCS / "results" / "README.md").read_text(encoding="utf-8")
    for budget in (0.35, 0.5, 0.7):
        cells = [f"{menu.mean_extra(rows, n, budget):.1%}" for n in menu.STRATEGIES]
        assert f"| {budget:g} | {' | '.join(cells)} |" in text
