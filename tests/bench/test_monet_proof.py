"""The comparison with MONeT: its table in the documentation."""

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
    rows = read(DOCS / "results" / "sim" / "monet.csv")
    text = (DOCS / "results" / "papers.md").read_text(encoding="utf-8")
    for row in rows:
        line = {"model": f"{row['model']}, {row['sizes']}", **monet.line_of(row)}
        cells = [str(line.get(title, "")) for title in monet.TITLES]
        assert f"| {' | '.join(cells)} |" in text
    assert len(rows) >= 8
