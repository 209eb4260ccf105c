"""What rows come to: numbers, words and a picture."""

import dataclasses
import io

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from mimose.bench.grid.picture import draw_grid
from mimose.bench.grid.runner import INTERRUPTED
from mimose.bench.grid.summary import compare, show, summarise

AT = {"budget_share": 0.5, "headroom_bytes": 35 * 2**20}


def _by_name(grid):
    return {cell.strategy: cell for cell in summarise(grid)}


def test_cells_are_summed_up(grid):
    """Time over measured steps, and again with the warm-up's; the budget over all."""
    cells = _by_name(grid)
    assert cells["mimose"].seconds_ratio == pytest.approx(1.2)
    assert cells["mimose"].seconds_low is None
    assert cells["mimose"].steps == 4
    assert cells["mimose"].recomputed_flops == 12 * 10**8
    assert cells["full"].total_ratio == pytest.approx(1.6)
    assert (cells["none"].steps_over, cells["none"].keeps_budget) == (3, False)
    assert cells["full"].keeps_budget


def test_what_is_not_known_or_unequal(grid, make_row):
    """One unknown step, and the sum is unknown; losses are equal to the last bit."""
    assert _by_name(grid)["mimose"].loss_is_equal
    other = make_row("other", 2, recomputed_flops=None, loss=0.33333)
    cell = _by_name([*grid, other])["other"]
    assert cell.recomputed_flops is None
    assert not cell.loss_is_equal


def test_failures_are_told(grid):
    """A strategy that failed, or could not run, keeps no budget."""
    cells = _by_name(grid)
    assert cells["static"].problem == "memory ran out"
    assert cells["static"].failed_at == "step 1, length 20"
    assert (cells["autosac"].problem, cells["autosac"].failed_at) == ("needs CUDA", "")
    assert not cells["autosac"].keeps_budget
    assert cells["autosac"].seconds_ratio is cells["autosac"].loss_is_equal is None


def test_only_those_that_keep_the_budget_are_compared(grid):
    """A strategy that breaks it is not counted as faster; nor is mimose."""
    cells = summarise(grid)
    full = compare(cells, "full")
    assert full.seconds.value == pytest.approx(0.75)
    assert full.seconds.low is None  # two turns are too few for an interval
    assert full.flops_ratio == pytest.approx(0.3)
    assert full.cells == 1
    assert compare(cells, "none") is compare(cells, "static") is None
    mine = next(row for row in grid if row.strategy == "mimose")
    over = dataclasses.replace(mine, peak_bytes=mine.base_bytes + 36 * 2**20)
    assert compare(summarise([*grid, over]), "full") is None


def test_what_was_interrupted_is_no_measure(grid):
    """It keeps no budget, whatever it did until then."""
    rows = [
        dataclasses.replace(row, problem=INTERRUPTED) if row.step == 5 else row
        for row in grid
    ]
    cells = summarise(rows)
    assert not any(cell.keeps_budget for cell in cells)
    assert compare(cells, "full") is None
    assert _by_name(rows)["mimose"].seconds_ratio == pytest.approx(1.2)


def test_turns_that_one_did_not_end_are_left_out(grid):
    """And without any there is nothing to compare."""
    short = [row for row in grid if row.strategy != "full" or row.step < 3]
    assert compare(summarise([row for row in short if row.step < 4]), "full") is None


def test_intervals_are_of_the_ratio(make_row):
    """What disturbs both alike makes it no wider; noise of one alone does."""
    rng = np.random.default_rng(1)

    def long(noise, **seconds):
        """Return 60 steps of strategies by seconds a step."""
        return [
            make_row(name, step + 4, seconds=each * noise[step], peak_bytes=110 * 2**20)
            for name, each in seconds.items()
            for step in range(60)
        ]

    rows = long(rng.normal(1.0, 0.2, 60), none=0.1, full=0.16)
    for row in long(rng.normal(1.0, 0.2, 60), mimose=0.12):
        rows.append(dataclasses.replace(row, **AT))
    cells = summarise(rows)
    full, mine = (_by_name(rows)[name] for name in ("full", "mimose"))
    assert full.seconds_low == pytest.approx(1.6) == full.seconds_high
    assert mine.seconds_low < mine.seconds_ratio < mine.seconds_high
    found = compare(cells, "full")
    assert found.seconds.low < found.seconds.value < found.seconds.high
    assert found.seconds.value == pytest.approx(mine.seconds_ratio / 1.6)


def test_the_words_mark_who_breaks_the_budget(grid):
    """In brackets, and what could not run says so."""
    out = io.StringIO()
    show(summarise(grid), Console(file=out, width=150))
    text = out.getvalue()
    for said in (
        *("[1.00×] 3 over", "1.20×", "not run", "failed", "autosac, tc-bert: needs"),
        *("mimose kept the budget in 1 of 1 cells", "1 of 1", "0.30× as much"),
    ):
        assert said in text


def test_the_picture_has_the_published_figures_beside_ours(grid, tmp_path):
    """Where the paper has them; whatever the workload is."""
    pytest.importorskip("matplotlib")
    for name in ("tc-bert", "mine:make"):
        rows = [dataclasses.replace(row, workload=name) for row in grid]
        draw_grid(summarise(rows), tmp_path / "bench.svg")
        text = (tmp_path / "bench.svg").read_text()
        assert ("as the paper reports" in text) == (name == "tc-bert")
        assert name in text
