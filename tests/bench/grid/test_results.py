"""What the documentation says of the grid is what its rows say."""

from pathlib import Path

import pytest

from mimose.bench.grid.runner import GridRow
from mimose.bench.grid.summary import compare, rank, summarise
from mimose.bench.rows import read

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "docs" / "results" / "cpu" / "bench.csv"
AGAIN = ROWS.with_name("bench_again.csv")

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="runs in a checkout")


def test_the_table_of_the_results_comes_from_the_rows():
    """Every number of it."""
    pytest.importorskip("rich")
    from mimose.bench.grid.table import overview, sentences

    text = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    cells = summarise(read(ROWS, GridRow))
    assert overview(cells) in text
    for sentence in sentences(cells):
        assert not sentence.startswith("mimose") or f"- {sentence}\n" in text


def test_the_numbers_of_the_readme_come_from_the_rows():
    """How it compares."""
    cells = summarise(read(ROWS, GridRow))
    static, full, paper, oracle = (
        compare(cells, name) for name in ("static", "hf-full", "mimose-paper", "oracle")
    )
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"takes {1 - static.seconds.value:.0%} less time than one static",
        f"{1 - full.seconds.value:.0%} less than transformers' own",
        f"recomputes {paper.flops_ratio:.0%} of what our rebuild",
        f"in {1 - paper.seconds.value:.0%} less time",
        f"in the {oracle.cells} cells where an oracle keeps the budget",
        f"takes {oracle.seconds.value - 1:.0%} more time than that",
    ):
        assert said in text


def test_a_second_run_ranks_alike():
    """No two strategies that keep the budget change places."""
    first, again = (summarise(read(path, GridRow)) for path in (ROWS, AGAIN))
    found = rank(first, again)
    assert found.pairs > 100
    assert found.swapped == []


def test_the_grid_is_a_grid():
    """Workloads by budgets, and sixty measured steps in every cell that ran."""
    cells = summarise(read(ROWS, GridRow))
    assert len({cell.workload for cell in cells}) >= 4
    assert len({cell.budget_share for cell in cells}) == 3
    assert {cell.steps for cell in cells if not cell.problem} == {60}
    mine = [cell for cell in cells if cell.strategy == "mimose"]
    assert all(cell.keeps_budget for cell in mine)


@pytest.mark.parametrize("other", ["full", "every-2", "static", "mimose-paper"])
@pytest.mark.parametrize("path", [ROWS, AGAIN], ids=["first", "again"])
def test_mimose_recomputes_no_more(path, other):
    """In any cell in which both keep the budget, but one; and there are some."""
    cells = {
        (cell.workload, cell.budget_share, cell.strategy): cell
        for cell in summarise(read(path, GridRow))
    }
    pairs = [
        (cell, cells[workload, share, other])
        for (workload, share, name), cell in cells.items()
        if name == "mimose"
    ]
    kept = [(mine, their) for mine, their in pairs if their.keeps_budget]
    assert len(kept) >= 8
    more = {
        mine.workload: mine.recomputed_flops / theirs.recomputed_flops
        for mine, theirs in kept
        if mine.recomputed_flops > theirs.recomputed_flops
    }
    if other != "mimose-paper":
        assert not more
    else:  # as the results say: it leaves no margin
        assert more == {"tr-t5": pytest.approx(1.009, abs=0.001)}


def test_nor_on_t5_since_it_keeps_less_free():
    """In each of its three cells, within the budget."""
    cells = summarise(read(ROWS.with_name("bench_t5.csv"), GridRow))
    mine, theirs = (
        [cell for cell in cells if cell.strategy == name]
        for name in ("mimose", "mimose-paper")
    )
    assert len(mine) == len(theirs) == 3
    assert all(cell.keeps_budget for cell in (*mine, *theirs))
    for one, other in zip(mine, theirs, strict=True):
        assert one.recomputed_flops < other.recomputed_flops


def test_what_is_said_of_scaling_is_what_its_rows_say():
    """The budget is kept at every point, and few steps need a plan."""
    cells = summarise(read(ROWS.with_name("scaling.csv"), GridRow))
    mine = {cell.workload: cell for cell in cells if cell.strategy == "mimose"}
    assert len(mine) == 11
    assert all(cell.keeps_budget for cell in mine.values())
    needed = {name: cell.needed for name, cell in mine.items()}
    assert (needed.pop("lm-shapes-1"), needed.pop("lm-shapes-4")) == (24, 7)
    assert max(needed.values()) == 3
