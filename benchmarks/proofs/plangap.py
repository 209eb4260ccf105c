"""How far are plans from the optimum, and how long do they take, with many actions?

Problems are drawn at random, with the proportions of measured layers (see
`benchmarks.problems`). Each has a budget between its least peak and keeping everything,
and is planned by ``auto``, three times, and by ``optimal``. A gap is a plan's cost
above the optimum, divided by the cost of recomputing everything. Times are CPU times,
so other work on the machine has little effect.

    python -m benchmarks.proofs plangap
    python -m benchmarks.proofs plangap --problems 48
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.problems import KINDS, draw_problem, with_budget
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean, percent, quantile, worst
from mimose.planners import Optimal, Plan, PlanningProblem, Search, make_planner

QUESTION = "How far from the optimum are plans, and what do they take, by actions?"
OPTIONS = (common.count("--problems", 120, "that are drawn"),)

_SHARES = (0.0, 0.001, 0.02, 0.1, 0.25, 0.35, 0.5, 0.7, 0.9)
_JITTERS = (0.0, 0.02, 0.1)
_SIZES = ((12, 2), (24, 5), (80, 5))
"""Calls and actions of the problems that are timed alone, for they are large."""
_TIMED = 24
"""Problems of each size."""
_ROUNDS = 3
_MEAN_BAR, _WORST_BAR, _MILLI_BAR = 0.005, 0.03, 5.0


def ask(settings: Settings, options: Options) -> Answer:
    """Plan every problem, and judge gaps and times."""
    answer, task = Answer(), {"problems": options.problems}
    for part in ("drawn", *(f"{n} calls, {k} actions" for n, k in _SIZES)):
        rows = common.measured("plangap", settings, part=part, **task)
        is_bar = part == "80 calls, 5 actions"
        answer.add(part, rows, *judge(rows, is_timed=is_bar), head="problems")
    return answer


def judge(rows: Sequence[Row], *, is_timed: bool = False) -> common.Verdict:
    """Judge gaps, of those that were compared, and the median time if asked to."""
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    millis = [1e3 * row["seconds"] for row in rows]
    line = {
        "gap mean": percent(mean(gaps), 3),
        "gap max": percent(worst(gaps)),
        "proved": sum(row["is_proved"] for row in rows),
        "ms p50": quantile(millis, 0.5),
        "ms p99": quantile(millis, 0.99),
    }
    bars = []
    if gaps:
        bars.append(Bar("mean gap", mean(gaps), _MEAN_BAR, is_share=True))
        bars.append(Bar("largest gap", worst(gaps), _WORST_BAR, is_share=True))
    if is_timed:
        bars.append(Bar("ms of CPU for a plan, median", line["ms p50"], _MILLI_BAR))
    return line, bars


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Plan drawn problems, or large ones without the optimum."""
    part = task["part"]
    of: tuple[int, ...] = (task["problems"],)
    if part != "drawn":
        of = _TIMED, *map(int, part.split()[::2])
    for case, problem in _drawn(task["seed"], *of):
        planned = _planned(problem, is_compared=part == "drawn")
        yield {"part": part, **case, **planned}


def _planned(problem: PlanningProblem, *, is_compared: bool) -> dict[str, Any]:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        plan = Search().plan(problem)
        seconds.append(time.process_time() - began)
    best = Optimal().plan(problem) if is_compared else None
    return {
        "layer_calls": len(problem.calls),
        "actions": len(problem.actions),
        "cost": plan.extra_cost,
        "optimum_cost": best and best.extra_cost,
        "gap": best and _gap(problem, plan, best),
        "is_proved": best is not None and best.optimal,
        "seconds": statistics.median(seconds),
    }


def _gap(problem: PlanningProblem, plan: Plan, best: Plan) -> float:
    """Return what a plan costs beyond the optimum, of what recomputing all costs."""
    most = make_planner("full").plan(problem).extra_cost
    more = plan.extra_cost - best.extra_cost
    return more / most if most else 0.0


def _drawn(
    seed: int, n_problems: int, n_calls: int = 0, n_actions: int = 5
) -> Iterator[tuple[dict[str, Any], PlanningProblem]]:
    """Draw problems of every kind in turn; of 6 to 32 calls if no number is given."""
    rng = np.random.default_rng(seed)
    for index in range(n_problems):
        turn, kind = divmod(index, len(KINDS))
        problem = draw_problem(
            rng,
            KINDS[kind],
            n_calls or int(rng.integers(6, 33)),
            n_actions=n_actions,
            jitter=_JITTERS[turn % len(_JITTERS)],
            masked=bool(turn // len(_JITTERS) % 2),
        )
        share = float(rng.choice(_SHARES))
        told = {"kind": KINDS[kind], "share": share}
        yield told, with_budget(problem, share)
