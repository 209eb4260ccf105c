"""Does a plan cost more where there are more actions to choose from? It should not.

Problems of twelve actions are drawn at random (see `benchmarks.menus`): in half of
them what an action frees depends on the layer before, and in most the host has room for
a part of what could be copied there. Each is planned by ``marginal``
and by ``optimal`` with four menus, each of which has all actions of the one before it:
whole layers, rebuilt tensors, copies to the host, lossy actions. At the same budgets
none may cost more than the one before. Told as well are how far ``marginal`` is from
the optimum, and its CPU time.

    python -m benchmarks.proofs menuchain
    python -m benchmarks.proofs menuchain --problems 60
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.menus import MENUS, draw_whole_menu, with_budgets, with_menu
from benchmarks.problems import KINDS
from benchmarks.proofs.common import Answer, Bar, Settings, count, progress
from benchmarks.proofs.numbers import mean, percent, quantile, worst
from mimose.bench.rows import Row
from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    Plan,
    Planner,
    PlanningProblem,
)

QUESTION = "Does a plan cost more where there are more actions to choose from?"
OPTIONS = (count("--problems", 500, "that are drawn"),)

_SHARES = (0.0, 0.02, 0.1, 0.25, 0.4, 0.6, 0.8)
_HOST_SHARES = (None, 0.1, 0.3, 0.6)
_JITTERS = (0.0, 0.02, 0.1)
_FEWEST, _MOST = 6, 32
_SAME = 1e-9
"""Sums of the same costs, in another order, differ by less."""
_GAP_BAR, _HOST_GAP_BAR = 1e-4, 0.01
_MILLI = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class MenuChainRow(Row):
    """One problem under one menu."""

    problem: int
    kind: str
    events: int
    pairs: bool
    """Whether what an action frees depends on the layer before."""
    jitter: float
    """By how much like layers differ."""
    masked: bool
    """Whether units do without some actions."""
    nets_differ: bool
    """Whether what a backward leaves depends on the action."""
    of_menu: str
    """Whose least peak the budget is counted from."""
    share: float
    """Of the way from there to keeping everything, for the budget."""
    host_share: float | None
    """Of all that could be on the host, for its budget; None for no limit."""
    menu: str
    cost: float | None
    """None where no plan keeps the budget."""
    optimum_cost: float | None
    says_optimal: bool
    is_proved: bool
    """Whether the optimum is."""
    seconds: float
    """Of the planner's CPU time."""
    optimum_seconds: float

    @property
    def gap(self) -> float | None:
        """By what part the plan costs more than the optimum; None without a plan."""
        if self.cost is None or self.optimum_cost is None:
            return None
        more = self.cost - self.optimum_cost
        return more / self.optimum_cost if self.optimum_cost else float(more > 0)

    @property
    def binds_host(self) -> bool:
        """Whether there is a limit to what the host may hold, and a use for it."""
        return self.host_share is not None and self.menu in MENUS[2:]


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Plan every problem with every menu, and compare."""
    answer = Answer()
    rows: list[MenuChainRow] = []
    for told, problem in _drawn(settings.seed, options.problems):
        rows += [_row(settings, told, problem, menu) for menu in MENUS]
        if (told["problem"] + 1) % 50 == 0:
            progress(f"menuchain: {told['problem'] + 1} problems")
    answer.rows += rows
    for menu in MENUS:
        own = [row for row in rows if row.menu == menu]
        answer.table += [
            _line(menu, "pairs", [row for row in own if row.pairs]),
            _line(menu, "no pairs", [row for row in own if not row.pairs]),
        ]
    hosts = [row for row in rows if row.binds_host]
    answer.table.append(_line("host limited", "any", hosts))
    costs = [(row.cost, row.optimum_cost) for row in rows]
    plans, optima = zip(*costs, strict=True)
    free = [row for row in rows if not row.binds_host]
    answer.bars = [
        Bar("plans that cost more with more actions", _dearer(plans), 0),
        Bar("optima that cost more with more actions", _dearer(optima), 0),
        Bar("mean gap, no limit on the host", _mean_gap(free), _GAP_BAR, is_share=True),
        Bar("mean gap, host limited", _mean_gap(hosts), _HOST_GAP_BAR, is_share=True),
    ]
    return answer


def _dearer(costs: Sequence[float | None]) -> int:
    """Count the menus that cost more than the one before, of the same problem."""
    known = [math.inf if cost is None else cost for cost in costs]
    chains = [known[i : i + len(MENUS)] for i in range(0, len(known), len(MENUS))]
    return sum(
        more > less + _SAME * abs(less)
        for chain in chains
        for less, more in pairwise(chain)
        if less < math.inf
    )


def _mean_gap(rows: Iterable[MenuChainRow]) -> float | None:
    return mean(row.gap for row in rows if row.gap is not None)


def _line(menu: str, what: str, rows: Sequence[MenuChainRow]) -> dict[str, object]:
    planned = [row for row in rows if row.cost is not None]
    gaps = [row.gap for row in planned if row.gap is not None]
    times = [row.seconds for row in planned]
    return {
        "menu": menu,
        "layers": what,
        "planned": len(planned),
        "gap mean": percent(mean(gaps), 3),
        "gap p99": percent(quantile(gaps, 0.99)),
        "gap max": percent(worst(gaps)),
        "says optimal": sum(row.says_optimal for row in planned),
        "proved": sum(row.is_proved for row in planned),
        "ms p50": _MILLI * (quantile(times, 0.5) or 0.0),
        "ms p90": _MILLI * (quantile(times, 0.9) or 0.0),
        "ms p99": _MILLI * (quantile(times, 0.99) or 0.0),
    }


def _row(
    settings: Settings, told: Mapping[str, Any], problem: PlanningProblem, menu: str
) -> MenuChainRow:
    problem = with_menu(problem, menu)
    plan, seconds = _planned(Marginal(), problem)
    optimum, optimum_seconds = _planned(Optimal(), problem)
    return MenuChainRow(
        **told,
        menu=menu,
        cost=plan.extra_cost if plan else None,
        optimum_cost=optimum.extra_cost if optimum else None,
        says_optimal=bool(plan and plan.optimal),
        is_proved=bool(optimum and optimum.optimal),
        seconds=seconds,
        optimum_seconds=optimum_seconds,
        **settings.provenance(),
    )


def _planned(planner: Planner, problem: PlanningProblem) -> tuple[Plan | None, float]:
    began = time.thread_time()
    try:
        plan = planner.plan(problem)
    except InfeasibleBudgetError:
        plan = None
    return plan, time.thread_time() - began


def _drawn(
    seed: int, n_problems: int
) -> Iterator[tuple[Mapping[str, Any], PlanningProblem]]:
    """Draw problems of every kind in turn, with their budgets."""
    rng = np.random.default_rng(seed)
    for index in range(n_problems):
        drawn: dict[str, Any] = {
            "kind": KINDS[index % len(KINDS)],
            "events": int(rng.integers(_FEWEST, _MOST + 1)),
            "pairs": index // len(KINDS) % 2 == 0,
            "jitter": float(rng.choice(_JITTERS)),
            "masked": bool(rng.random() < 0.5),
            "nets_differ": bool(rng.random() < 0.5),
        }
        problem = draw_whole_menu(
            rng,
            drawn["kind"],
            drawn["events"],
            pairs=drawn["pairs"],
            jitter=drawn["jitter"],
            nets_by_action=drawn["nets_differ"],
            masked=drawn["masked"],
        )
        budgets: dict[str, Any] = {
            "of_menu": str(rng.choice(MENUS)),
            "share": float(rng.choice(_SHARES)),
            "host_share": _HOST_SHARES[int(rng.integers(len(_HOST_SHARES)))],
        }
        problem = with_budgets(
            problem, budgets["of_menu"], budgets["share"], budgets["host_share"]
        )
        yield {"problem": index, **drawn, **budgets}, problem
