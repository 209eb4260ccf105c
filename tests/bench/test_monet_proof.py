"""The comparison with MONeT: what is read from its table, planned, and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.proofs import monet
from benchmarks.proofs.common import read

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_table_of_the_documentation_comes_from_the_rows() -> None:
    """Every number of it."""
    rows = read(DOCS / "results" / "cpu" / "monet.csv")
    text = (DOCS / "results" / "papers.md").read_text(encoding="utf-8")
    for row in rows:
        cells = [
            f"{row['model']}, {row['batch']} × {row['length']}",
            *monet.line_of(row).values(),
        ]
        assert f"| {' | '.join(map(str, cells))} |" in text
    assert len(rows) == 18
