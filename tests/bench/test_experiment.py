"""The order of an experiment: probe, compare in turns, limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimose.bench.experiment import Experiment, ExperimentSettings
from mimose.bench.process import StrategyFailedError

MIB = 2**20


def test_budget_is_half_of_the_longest_batchs_growth(
    launch: Any, settings: ExperimentSettings
) -> None:
    """It is found on the longest batch, and counted from what was held before."""
    experiment = Experiment(settings, Path("corpus.json"), launch)

    experiment.run()

    assert launch.runners[0].advanced == [1, 1]
    assert experiment.result.budget_bytes == (400 + 256) * MIB


def test_strategies_take_turns(launch: Any, settings: ExperimentSettings) -> None:
    """Each step is run by all strategies before the next begins."""
    seen: list[tuple[str, str, int]] = []
    experiment = Experiment(
        settings, Path("corpus.json"), launch, lambda *step: seen.append(step)
    )

    experiment.run()

    turns = [(name, step) for run, name, step in seen if run == "compare"]
    assert turns[:5] == [
        ("none", 0),
        ("full", 0),
        ("static", 0),
        ("mimose", 0),
        ("none", 1),
    ]
    assert len(turns) == 16


def test_limit_stops_plain_training_and_not_the_experiment(
    launch: Any, settings: ExperimentSettings
) -> None:
    """Plain training fails at the longest batch; mimose takes every step."""
    experiment = Experiment(settings, Path("corpus.json"), launch)

    experiment.run()

    result = experiment.result
    taken = [row.strategy for row in result.of("limit")]
    assert result.failures == {"limit/none": "can't allocate memory"}
    assert taken == ["none"] + ["mimose"] * 4
    assert result.is_complete


def test_a_strategy_that_fails_leaves_the_others(
    launch: Any, settings: ExperimentSettings
) -> None:
    """The comparison goes on without it."""

    def fail(runner: Any) -> None:
        if runner.task.strategy == "static" and len(runner.advanced) == 2:
            msg = "out of luck"
            raise StrategyFailedError(msg)

    launch.on_advance = fail
    experiment = Experiment(settings, Path("corpus.json"), launch)

    experiment.run()

    counts = [row.strategy for row in experiment.result.of("compare")]
    assert counts.count("static") == 2
    assert counts.count("mimose") == 4
    assert experiment.result.failures["compare/static"] == "out of luck"


def test_interruption_keeps_rows_and_ends_processes(
    launch: Any, settings: ExperimentSettings
) -> None:
    """Ctrl-C loses no row that was there, and leaves no process behind."""

    def interrupt(runner: Any) -> None:
        if runner.task.strategy == "mimose":
            raise KeyboardInterrupt

    launch.on_advance = interrupt
    experiment = Experiment(settings, Path("corpus.json"), launch)

    with pytest.raises(KeyboardInterrupt):
        experiment.run()

    assert not experiment.result.is_complete
    assert len(experiment.result.of("compare")) == 3
    assert all(runner.is_closed for runner in launch.runners)
