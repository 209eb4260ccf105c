"""What rows come to."""

import dataclasses

import numpy as np
import pytest

from mimose.bench.grid.runner import INTERRUPTED
from mimose.bench.grid.summary import compare, rank, summarise


def _by_name(grid):
    return {cell.strategy: cell for cell in summarise(grid)}


def test_time_is_told_over_measured_steps(grid):
    """And again with the warm-up's."""
    cells = _by_name(grid)
    assert cells["mimose"].seconds_ratio == pytest.approx(1.2)
    assert cells["full"].total_ratio == pytest.approx(1.6)
    assert cells["mimose"].seconds_low is None
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
    assert cells["static"].failed_at == "step 1, length 20"
    assert cells["autosac"].failed_at == ""
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
    assert full.seconds.value == pytest.approx(0.75)
    assert full.seconds.low is None  # two turns are too few for an interval
    assert full.flops_ratio == pytest.approx(0.3)
    assert full.cells == 1
    assert compare(cells, "none") is compare(cells, "static") is None
    mine = next(row for row in grid if row.strategy == "mimose")
    over = dataclasses.replace(mine, peak_bytes=mine.base_bytes + 36 * 2**20)
    assert compare(summarise([*grid, over]), "full") is None


def _failing(grid, strategy, step):
    """Return the rows of a strategy that fails in a step, and the others'."""
    return [
        dataclasses.replace(row, problem="memory ran out", seconds=0.0)
        if (row.strategy, row.step) == (strategy, step)
        else row
        for row in grid
        if row.strategy != strategy or row.step <= step
    ]


def test_where_plain_training_fails_full_checkpointing_is_the_measure(grid):
    """On every step, not only on those that plain training could take."""
    cells = _by_name(_failing(grid, "none", 3))
    assert cells["mimose"].needed == 0  # of the steps that plain training took
    assert cells["mimose"].relative_to == "full"
    assert cells["mimose"].steps == 4
    assert cells["mimose"].seconds_ratio == pytest.approx(0.75)
    assert cells["none"].failed_at == "step 3, length 40"
    rest = [row for row in grid if row.strategy != "full"]
    assert _by_name(_failing(rest, "none", 3))["mimose"].steps == 1


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


def test_turns_that_one_did_not_end_are_left_out(grid, make_row):
    """And without any there is nothing to compare."""
    short = [row for row in grid if row.strategy != "full" or row.step < 3]
    cells = summarise([row for row in short if row.step < 4])
    assert compare(cells, "full") is None


def _long(make_row, rng, **seconds):
    """Return 60 steps of strategies by seconds a step, with noise on each batch."""
    noise = rng.normal(1.0, 0.2, 60)
    return [
        make_row(name, step + 4, seconds=each * noise[step], peak_bytes=110 * 2**20)
        for name, each in seconds.items()
        for step in range(60)
    ]


def test_intervals_are_of_the_ratio(grid, make_row):
    """What disturbs both alike makes it no wider; noise of one alone does."""
    rng = np.random.default_rng(1)
    rows = [
        row
        for row in _long(make_row, rng, none=0.1, full=0.16)
        + [
            dataclasses.replace(row, budget_share=0.5, headroom_bytes=35 * 2**20)
            for row in _long(make_row, rng, mimose=0.12)
        ]
    ]
    cells = summarise(rows)
    full, mine = (
        next(cell for cell in cells if cell.strategy == name)
        for name in ("full", "mimose")
    )
    assert full.seconds_low == pytest.approx(1.6) == full.seconds_high
    assert mine.seconds_low < mine.seconds_ratio < mine.seconds_high
    found = compare(cells, "full")
    assert found.seconds.low < found.seconds.value < found.seconds.high
    assert found.seconds.value == pytest.approx(mine.seconds_ratio / 1.6)


def test_two_runs_that_rank_alike(grid, make_row):
    """A faster strategy stays the faster one, or the interval has both orders in it."""

    def run(seconds, **changes):
        rng = np.random.default_rng(2)
        rows = _long(make_row, rng, none=0.1, full=0.16, mimose=seconds)
        at = {"budget_share": 0.5, "headroom_bytes": 35 * 2**20}
        return summarise(
            dataclasses.replace(row, **at, **changes)
            if row.strategy == "mimose"
            else row
            for row in rows
        )

    first = run(0.12)
    assert rank(first, first) == (3, [])
    assert rank(first, run(0.3)) == (3, [("tc-bert", 0.5, "mimose", "full")])
    assert rank(first, run(0.3, peak_bytes=10**10)) == (1, [])
