"""What rows come to."""

import dataclasses

import pytest

from mimose.bench.grid.summary import compare, summarise, swapped


def _by_name(grid):
    return {cell.strategy: cell for cell in summarise(grid)}


def test_time_is_told_over_measured_steps(grid):
    """And again with the warm-up's."""
    cells = _by_name(grid)
    assert cells["mimose"].seconds_ratio == pytest.approx(1.2)
    assert cells["full"].total_ratio == pytest.approx(1.6)
    assert cells["mimose"].seconds_low == pytest.approx(1.2)
    assert cells["mimose"].steps == 4


def test_strategies_without_a_budget_are_judged_at_it(grid):
    """Plain training is over it, on the steps that need a plan."""
    cells = _by_name(grid)
    assert cells["none"].steps_over == 3
    assert not cells["none"].keeps_budget
    assert cells["full"].keeps_budget
    assert cells["mimose"].needed == 3
    assert cells["mimose"].use_p50 == pytest.approx(34 / 35)


def test_recomputation_and_errors(grid):
    """FLOPs of the warm-up are told apart; errors are of planned steps."""
    mine = _by_name(grid)["mimose"]
    assert (mine.recomputed_flops, mine.warm_up_flops) == (12 * 10**8, 6 * 10**8)
    assert mine.error_p50 == pytest.approx(0.01)
    assert mine.learning_steps == 1
    assert mine.hit_seconds == pytest.approx(0.0001)
    assert mine.miss_seconds == pytest.approx(0.002)


def test_flops_that_are_not_known_are_not_summed(grid, make_row):
    """One unknown step, and the sum is unknown."""
    rows = [*grid, make_row("selective", 2, recomputed_flops=None)]
    assert _by_name(rows)["selective"].recomputed_flops is None


def test_failures_are_told(grid):
    """A strategy that failed, or could not run, keeps no budget."""
    cells = _by_name(grid)
    assert cells["static"].problem == "memory ran out"
    assert cells["autosac"].problem == "needs CUDA"
    assert not cells["autosac"].keeps_budget
    assert cells["autosac"].seconds_ratio is None
    assert cells["autosac"].loss_is_equal is None


def test_losses_are_compared_to_the_last_bit(grid, make_row):
    """With plain training's."""
    assert _by_name(grid)["mimose"].loss_is_equal
    rows = [*grid, make_row("selective", 2, loss=0.33333)]
    assert not _by_name(rows)["selective"].loss_is_equal


def test_only_those_that_keep_the_budget_are_compared(grid, make_row):
    """A strategy that breaks it is not counted as faster; nor is mimose."""
    cells = summarise(grid)
    full = compare(cells, "full")
    assert full.seconds_ratio == pytest.approx(0.75)
    assert full.flops_ratio == pytest.approx(0.3)
    assert full.cells == 1
    assert compare(cells, "none") is compare(cells, "static") is None
    mine = next(row for row in grid if row.strategy == "mimose")
    over = dataclasses.replace(mine, peak_bytes=mine.base_bytes + 36 * 2**20)
    assert compare(summarise([*grid, over]), "full") is None


def test_failed_steps_of_plain_training_are_no_measure(grid):
    """A step that it did not end is compared with nothing."""
    rows = [
        dataclasses.replace(row, problem="memory ran out", seconds=0.0)
        if (row.strategy, row.step) == ("none", 5)
        else row
        for row in grid
    ]
    cells = _by_name(rows)
    assert cells["mimose"].steps == 3
    assert cells["mimose"].seconds_ratio == pytest.approx(1.2)


def test_two_runs_that_rank_alike(grid):
    """A faster strategy stays the faster one, or their intervals overlap."""
    first = summarise(grid)
    assert swapped(first, first) == []
    slower = [
        dataclasses.replace(row, seconds=0.3) if row.strategy == "mimose" else row
        for row in grid
    ]
    assert swapped(first, summarise(slower)) == [("tc-bert", 0.5, "mimose", "full")]
    over = [
        dataclasses.replace(row, peak_bytes=10**10) if row.strategy == "mimose" else row
        for row in slower
    ]
    assert swapped(first, summarise(over)) == []
