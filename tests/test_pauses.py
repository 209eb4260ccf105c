"""Work that pauses by itself, in threads that asked for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mimose.planners
import mimose.predictors
from benchmarks.problems import draw_problem, with_budget
from mimose.pauses import give_way, giving_way
from mimose.planners import Marginal
from mimose.planners.pauses import give_way as give_way_of_planners
from mimose.planners.program import build_program
from mimose.predictors import EnvelopeRegressor, SizeMap, Trust, best_fit

_MOST_CALLS = 300


def test_pauses_of_planners_and_predictors_alike() -> None:
    """One function is called by both, and by nobody once it is over."""
    called: list[str] = []

    with giving_way(lambda: called.append("pause")):
        give_way()
        give_way_of_planners()
    give_way()
    give_way_of_planners()

    assert ["pause", "pause"] == called


def test_both_copies_are_alike() -> None:
    """Planners and predictors know nothing of each other, and have the same file."""
    ours, theirs = (
        Path(package.__file__).with_name("pauses.py").read_text(encoding="utf-8")
        for package in (mimose.planners, mimose.predictors)
    )

    assert theirs == ours.replace("The predictors have", "The planners have")


def _fit(noise: float) -> None:
    """Fit, and fit again, an excess of many shapes that nothing explains."""
    random = np.random.default_rng(0)
    readings: dict[tuple[int, ...], tuple[float, ...]] = {
        (b, n): (1e5 * b * n + 1e4 * b * n**1.5, 1e5 * b * n + 1.1e4 * b * n**1.5)
        for b, n in random.integers(4, 400, (40, 2)).tolist()
    }
    trust = Trust(noise, 1e9, is_excess=True, n_shapes=len(readings))
    best = best_fit(
        lambda noise: EnvelopeRegressor(noise=noise), readings, trust, [(9, 9)]
    )
    best_fit(
        lambda noise: EnvelopeRegressor(noise=noise),
        readings,
        trust,
        [(9, 9)],
        best.fit,
    )


PROBLEMS = {
    n_events: with_budget(
        draw_problem(np.random.default_rng(0), "mixture", n_events, jitter=0.02), 0.3
    )
    for n_events in (12, 48)
}


def _map_sizes() -> None:
    roots = np.random.default_rng(0).integers(4, 400, (64, 4))
    SizeMap().fit(roots, roots[:, 0] * roots[:, 1] % 7)


WORK = {
    "a fit of noisy readings": lambda: _fit(1e4),
    "a fit of exact readings": lambda: _fit(0.0),
    "a rule of sizes": _map_sizes,
    "a plan for 48 events": lambda: Marginal().plan(PROBLEMS[48]),
    "a program for 48 events": lambda: build_program(PROBLEMS[48], np.inf),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_long_work_pauses_often(work: Callable[[], None]) -> None:
    """No stretch of it calls more than a few hundred functions: a fifth of a ms."""
    work()  # what is worked out once, or imported
    counts = [0]

    def count(_frame: object, event: str, _arg: object) -> None:
        counts[-1] += event in ("call", "c_call")

    with giving_way(lambda: counts.append(0)):
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)

    assert len(counts) > 10
    assert max(counts) <= _MOST_CALLS
