"""What are the finer exact actions worth, against the best that whole layers allow?

The language tasks of the Mimose paper are trained at three budgets five ways: by the
optimum of whole layers for every shape, told everything beforehand; by this library
with all exact actions; by their optimum, told everything; and by one plan for the
longest batch, of whole layers and of all actions. Bytes and plans are the simulated
accelerator's. Then every plan that was run there is run again on the CPU beside plain
training of the same batch (see `playback`), which wants a quiet machine, and hours.
Compared are the steps behind the warm-up in which all five had a plan.

    python -m benchmarks.proofs menu --threads 1 --warm-up 24
    python -m benchmarks.proofs menu --threads 1 --scale tiny --tasks qa-bert --steps 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeAlias

import torch

from benchmarks.proofs.common import AMPLE_BYTES, Answer, Bar, Settings, count, device
from benchmarks.proofs.playback import Playback, Trained, by_turns, overhead
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.grid.runner import GridRow, GridSettings, WorkloadRun
from mimose.bench.grid.workloads import DEFAULT, SCALES, workload_named
from mimose.bench.machine import HEAP_IS_KEPT
from mimose.bench.rows import Row
from mimose.planners.actions import FINE_MENU
from mimose.session import attach
from mimose.usage import positive

QUESTION = "What are the finer exact actions worth, against the best of whole layers?"
OPTIONS = (
    device("sim"),
    count("--steps", 30, "that are compared"),
    count("--warm-up", 12, "steps before them, for learning"),
    count("--rounds", 3, "of timing"),
    ("--tasks", {"nargs": "+", "choices": DEFAULT, "default": list(DEFAULT)}),
    ("--budgets", {"nargs": "+", "type": positive, "default": [0.35, 0.5, 0.7]}),
    ("--scale", {"choices": SCALES, "default": "small"}),
)

MENU = "mimose-menu"
"""This library, with all exact actions."""
STRATEGIES = ("static", "static-menu", "oracle", MENU, "oracle-menu")
_EXTRA_BARS: Mapping[float, float] = {0.35: 0.6, 0.5: 0.5, 0.7: 0.4}
"""By budget: extra time over that of the optimum of whole layers."""
_STATIC_BAR, _OPTIMUM_BAR, _USE_BAR = 0.8, 1.03, 0.95

Runs: TypeAlias = list[dict[str, Any]]
"""Of one batch, as `by_turns` yields them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MenuRow(Row):
    """One strategy on one task at one budget."""

    workload: str
    scale: str
    budget: float
    """Share of the way from everything recomputed to everything kept."""
    strategy: str
    steps: int
    over: int
    """Steps over the budget, those of the warm-up too."""
    compared: int
    needed: int
    """Steps of these in which plain training is over the budget."""
    use: float | None
    """Mean growth ÷ headroom of those; None of none."""
    extra: float
    """Time over plain training in the compared steps, as a share."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Read the bytes, take the times, and compare, task by task."""
    answer, rows = Answer(), list[MenuRow]()
    for task in options.tasks:
        grid = GridSettings(
            workloads=(task,),
            strategies=("none", *STRATEGIES),
            budgets=tuple(options.budgets),
            steps=options.steps,
            warm_up=options.warm_up,
            scale=options.scale,
            seed=settings.seed,
            threads=settings.threads,
            device=settings.device,
            date=settings.date,
        )
        run = WorkloadRun(grid, task)
        run.run()
        times = _timed(grid, run.rows, options.rounds)
        for budget in grid.budgets:
            own = list(compare(run.rows, budget, times))
            extra = {row.strategy: f"{row.extra:.1%}" for row in own}
            line = {"budget": budget, **extra, "over": sum(row.over for row in own)}
            answer.add(task, own, line, (), head="task")
            rows += own
    for budget in options.budgets:
        means = (f"{name} {mean_extra(rows, name, budget):.1%}" for name in STRATEGIES)
        answer.notes.append(f"mean extra time at {budget:g}: {', '.join(means)}")
    answer.bars.extend(judge(rows))
    return answer


def _timed(
    grid: GridSettings, rows: Sequence[GridRow], n_rounds: int
) -> dict[str, Runs]:
    """Return the runs of each batch behind the warm-up, by its sizes.

    Raises:
        RunFailedError: A strategy did not run to its end.
    """
    plans: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.problem:
            msg = f"{row.strategy} at {row.budget_share} on {row.workload}: "
            raise RunFailedError(msg + row.problem)
        if row.is_measured and row.strategy != "none":
            plans.setdefault(row.sizes, {})[row.plan] = None
    task = {
        **{"workload": grid.workloads[0], "scale": grid.scale, "seed": grid.seed},
        "plans": {sizes: list(own) for sizes, own in plans.items()},
        "rounds": n_rounds,
    }
    times: dict[str, Runs] = {}
    for said in run_child(__name__, task, grid.threads, environment=HEAP_IS_KEPT):
        times.setdefault(said.pop("sizes"), []).append(said)
    return times


def compare(
    rows: Sequence[GridRow], budget: float, times: Mapping[str, Runs]
) -> Iterator[MenuRow]:
    """Compare a task's strategies at one budget.

    Args:
        rows: The task's, of every budget, with those of plain training.
        budget: The share.
        times: Runs by a batch's sizes, with all plans of the rows.

    Raises:
        RunFailedError: In no step all had a plan.
    """
    plain = {row.step: row.growth_bytes for row in rows if row.strategy == "none"}
    by: dict[str, list[GridRow]] = {name: [] for name in STRATEGIES}
    for row in rows:
        if row.budget_share == budget:
            by[row.strategy].append(row)
    planned = [{row.step for row in own if _is_planned(row)} for own in by.values()]
    compared = set.intersection(*planned)
    if not compared:
        msg = f"at {budget} no step was planned by all: take more --steps or --warm-up"
        raise RunFailedError(msg)
    for name, own in by.items():
        room = own[0].headroom_bytes or 0
        mine = [row for row in own if row.step in compared]
        use = [row.growth_bytes / room for row in mine if plain[row.step] > room]
        found = [overhead(times[row.sizes], row.plan) for row in mine]
        extra = sum(share * seconds for share, seconds in found)
        yield MenuRow(
            workload=own[0].workload,
            scale=own[0].scale,
            budget=budget,
            strategy=name,
            steps=len(own),
            over=sum(row.growth_bytes > room for row in own),
            compared=len(compared),
            needed=len(use),
            use=fmean(use) if use else None,
            extra=extra / sum(seconds for _, seconds in found),
            **{column.name: getattr(own[0], column.name) for column in fields(Row)},
        )


def _is_planned(row: GridRow) -> bool:
    """Whether a step behind the warm-up ran a plan; one that shows an action has none.

    This library's plans come with a prediction, and such a step does not.
    """
    is_known = row.strategy != MENU or row.predicted_growth_bytes is not None
    return row.is_measured and row.phase == "plan" and is_known


# ------------------------------------------------------------------ telling


def mean_extra(rows: Sequence[MenuRow], name: str, budget: float) -> float:
    """Return a strategy's extra time, mean of the tasks."""
    return fmean(r.extra for r in rows if (r.strategy, r.budget) == (name, budget))


def judge(rows: Sequence[MenuRow]) -> Iterator[Bar]:
    """Judge all tasks and budgets."""
    for budget in dict.fromkeys(row.budget for row in rows):
        mine, oracle = (mean_extra(rows, name, budget) for name in (MENU, "oracle"))
        what = f"extra time ÷ the optimum's of whole layers, at {budget:g}"
        value = mine / oracle if oracle > 0 else None
        yield Bar(what, value, _EXTRA_BARS.get(budget, 1.0))
    time = {(row.strategy, row.workload, row.budget): 1 + row.extra for row in rows}
    for what, other, bar in (
        ("the static plan's of whole layers", "static", _STATIC_BAR),
        ("the optimum's with the same actions", "oracle-menu", _OPTIMUM_BAR),
    ):
        ratios = [time[MENU, t, b] / time[n, t, b] for n, t, b in time if n == other]
        yield Bar(f"time ÷ {what}, mean", fmean(ratios), bar)
    own = [row for row in rows if row.strategy == MENU]
    yield Bar("steps over", sum(row.over for row in own), at_most=0)
    use = [row.use for row in own if row.use is not None]
    what = "growth ÷ headroom where a plan was needed, mean"
    value = fmean(use) if use else None
    yield Bar(what, value, at_least=_USE_BAR, is_share=True)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run each batch under all of its plans."""
    workload = workload_named(task["workload"])

    def make() -> Trained:
        torch.manual_seed(task["seed"])
        return Trained(workload.build(task["scale"]), has_optimizer=True)

    bare, planned, playback = make(), make(), Playback()
    names = FINE_MENU.names
    with attach(
        planned.model, AMPLE_BYTES, actions=names, planner=playback, meter="prediction"
    ) as session:
        for sizes, plans in task["plans"].items():
            generator = torch.Generator().manual_seed(task["seed"])
            batch = workload.batch(json.loads(sizes), task["scale"], generator)
            told = session, playback, batch, plans, task["rounds"]
            for run in by_turns(bare, planned, *told):
                yield {"sizes": sizes, **run}
