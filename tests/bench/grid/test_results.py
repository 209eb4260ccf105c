"""What the documentation says of the grid is what its rows say."""

from pathlib import Path

import pytest

from mimose.bench.csv_file import read
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.summary import summarise

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "docs" / "results" / "cpu" / "bench.csv"

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="runs in a checkout")


def test_the_table_of_the_results_comes_from_the_rows():
    """Every number of it."""
    pytest.importorskip("rich")
    from mimose.bench.grid.table import overview

    text = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    assert overview(summarise(read(ROWS, GridRow))) in text


def test_the_grid_is_a_grid():
    """Workloads by budgets, and sixty measured steps in every cell that ran."""
    cells = summarise(read(ROWS, GridRow))
    assert len({cell.workload for cell in cells}) >= 4
    assert len({cell.budget_share for cell in cells}) == 3
    assert {cell.steps for cell in cells if not cell.problem} == {60}
    mine = [cell for cell in cells if cell.strategy == "mimose"]
    assert all(cell.keeps_budget for cell in mine)
