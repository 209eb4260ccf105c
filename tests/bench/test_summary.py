"""What rows come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mimose.bench.rows import StepRow
from mimose.bench.summary import StrategySummary, summarise


@pytest.fixture
def by_name(rows: list[StepRow]) -> dict[str, StrategySummary]:
    """The summaries of the four strategies."""
    return {summary.strategy: summary for summary in summarise(rows)}


def test_one_summary_a_strategy_in_order(rows: list[StepRow]) -> None:
    """Strategies come as they first appear."""
    names = [summary.strategy for summary in summarise(rows)]

    assert names == ["none", "full", "static", "mimose"]


def test_steps_over_the_budget_are_counted(by_name: dict[str, StrategySummary]) -> None:
    """Growth of 512 and 200 MiB, or 205 MiB, is over a budget of 180."""
    assert by_name["none"].steps_over == 2
    assert by_name["static"].steps_over == 1
    assert by_name["full"].steps_over == 0


def test_budget_use_counts_the_steps_that_need_it(
    by_name: dict[str, StrategySummary],
) -> None:
    """Only steps that plain training cannot take within the budget are averaged."""
    expected = (512 + 200) / 2 * 0.2 / 180

    assert by_name["full"].budget_use == pytest.approx(expected, rel=1e-3)


def test_ratios_are_to_plain_training_and_to_full(
    by_name: dict[str, StrategySummary],
) -> None:
    """Time is relative to keeping, recomputation to recomputing everything."""
    assert by_name["full"].seconds_ratio == pytest.approx(4 / 3)
    assert by_name["mimose"].recomputed_ratio == pytest.approx(0.2)


def test_prediction_errors_are_of_growth(by_name: dict[str, StrategySummary]) -> None:
    """A prediction of growth one part in 101 too low shows as one per cent."""
    assert by_name["mimose"].error_p50 == pytest.approx(0.01, rel=1e-3)
    assert by_name["none"].error_p50 is None


def test_a_single_different_loss_is_noticed(rows: list[StepRow]) -> None:
    """Equal means to the last bit."""
    rows[5] = replace(rows[5], loss=rows[5].loss * (1 + 1e-15))

    equal = {summary.strategy: summary.loss_is_equal for summary in summarise(rows)}

    assert equal == {"none": True, "full": False, "static": True, "mimose": True}


def test_cut_short_runs_are_compared_on_common_steps(rows: list[StepRow]) -> None:
    """A strategy that lacks its last step is not made to look faster."""
    shorter = [row for row in rows if (row.strategy, row.step) != ("full", 3)]

    full = summarise(shorter)[1]

    assert full.steps == 3
    assert full.seconds_ratio == pytest.approx(4 / 3)


def test_nothing_measured_is_nothing_summed_up() -> None:
    """No rows, no summaries."""
    assert summarise([]) == []
