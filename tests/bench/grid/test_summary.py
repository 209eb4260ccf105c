"""What rows come to: numbers, words and a picture."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")


from mimose.bench.grid.picture import draw_grid
from mimose.bench.grid.summary import compare, summarise

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


def test_the_picture_has_the_published_figures_beside_ours(grid, tmp_path):
    """Where the paper has them; whatever the workload is."""
    pytest.importorskip("matplotlib")
    for name in ("tc-bert", "mine:make"):
        rows = [dataclasses.replace(row, workload=name) for row in grid]
        draw_grid(summarise(rows), tmp_path / "bench.svg")
        text = (tmp_path / "bench.svg").read_text()
        assert ("as the paper reports" in text) == (name == "tc-bert")
        assert name in text
