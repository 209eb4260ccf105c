"""What does a new plan cost, and how does that grow with the number of events?

Rows of 12 to 1,000 blocks that grow by about the same in sum are trained on shapes
never seen before, each under a plan for a budget between the least peak and keeping
everything. Timed are the whole decision on a miss (reading the arguments, all
predictions, the plan, its growth) and, within it, the planner alone.

    python -m benchmarks.proofs plancost
    python -m benchmarks.proofs plancost --events 12 24 --misses 10 --picture p.png
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.proofs import blocks
from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    progress,
    recorded,
    rows_of,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.numbers import MIB
from mimose.bench.pictures import BLUE, LIMIT, ORANGE, save, tidy
from mimose.bench.rows import Row
from mimose.planners import Marginal, Plan, PlanningProblem, lay_out, safest_plan
from mimose.session import attach
from mimose.usage import at_least_one

QUESTION = "What does a new plan cost, and how does that grow with the events?"

_EVENTS = (12, 24, 48, 100, 200, 500, 1000)
OPTIONS = (
    ("--events", {"type": at_least_one, "nargs": "+", "default": _EVENTS}),
    count("--misses", 30, "a number of events"),
    ("--picture", {"type": Path, "default": Path("docs/images/plan_cost.png")}),
)
_BARS = {24: 1e-3, 500: 50e-3}
_WIDTH, _FACTOR = 32, 4
_GROWTH_BYTES = 200 * MIB
_ROW_BYTES = 4 * _WIDTH * (2 + 2 * _FACTOR)
"""About what a block keeps of a row: what it takes and gives, and both in between."""
_SHARES = (0.3, 0.5, 0.7)
"""The budgets, by turns: between the least peak and keeping everything."""
_LEARNING_STEPS = 44
"""Steps that are not timed: they are measured, and every plan comes with new fits."""
_MILLI = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCostRow(Row):
    """One new plan."""

    events: int
    step: int
    rows: int
    """Of the batch."""
    kept: int
    miss_seconds: float
    """From the root's entry until the plan is known."""
    planner_seconds: float
    """The planner alone."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Time every number of events, and draw."""
    answer = Answer(notes=[f"picture: {options.picture}"])
    for n_events in sorted(set(options.events)):
        task = {"events": n_events, "misses": options.misses}
        own = rows_of(PlanCostRow, "plancost", settings, **task)
        answer.rows += own
        answer.table.append(_summarise(n_events, own))
        progress(f"plancost: {n_events} events")
    answer.bars += [bar for line in answer.table for bar in _judge(line)]
    draw(answer.table, options.picture)
    return answer


def _summarise(n_events: int, rows: Sequence[PlanCostRow]) -> dict[str, Any]:
    misses = [_MILLI * row.miss_seconds for row in rows]
    return {
        "events": n_events,
        "misses": len(misses),
        "planner ms": _MILLI * statistics.median(r.planner_seconds for r in rows),
        "miss ms": statistics.median(misses),
        "slowest miss ms": max(misses),
    }


def _judge(line: Mapping[str, Any]) -> list[Bar]:
    events = line["events"]
    return [
        Bar(f"{events} events: {what}", line[what], _MILLI * _BARS[events])
        for what in ("planner ms", "miss ms")
        if events in _BARS
    ]


def draw(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw milliseconds against events, both axes logarithmic.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    events = [line["events"] for line in table]
    for what, words, colour, marker in (
        ("miss ms", "a whole miss", BLUE, "o"),
        ("planner ms", "the planner alone", ORANGE, "s"),
    ):
        values = [line[what] for line in table]
        axes.plot(events, values, marker=marker, color=colour)
        axes.annotate(
            words,
            (events[0], values[0]),
            xytext=(0, 12),
            textcoords="offset points",
            color=colour,
        )
    limits = [_MILLI * limit for limit in _BARS.values()]
    axes.scatter([*_BARS], limits, marker="_", s=300, color=LIMIT, label="bar")
    axes.set(xscale="log", yscale="log", xlabel="events", ylabel="time (ms)")
    axes.set_title("A new plan: time by number of events", loc="left", weight="bold")
    tidy(axes)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


# ------------------------------------------------------------------ in the child


class Timed:
    """The planner on budgets of its own, and what it takes."""

    name = "timed"

    def __init__(self) -> None:
        self._shares = itertools.cycle(_SHARES)
        self._planner = Marginal()
        self.seconds = 0.0
        """The last plan's."""
        self.seconds_besides = 0.0
        """What settling its budget took."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make the plan for the next share; the problem's budget is not read."""
        began = time.perf_counter()
        everything = np.zeros(len(problem.events), dtype=np.intp)
        least = safest_plan(problem).peak_bytes
        most = lay_out(problem, everything).peak_bytes
        budget = least + next(self._shares) * (most - least)
        told = replace(problem, budget_bytes=budget)
        ready = time.perf_counter()
        plan = self._planner.plan(told)
        self.seconds = time.perf_counter() - ready
        self.seconds_besides = ready - began
        return plan


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train on new shapes until enough plans were made for them."""
    torch.manual_seed(task["seed"])
    n_events = task["events"]
    loop = Loop(blocks.Blocks(n_events, _WIDTH, _FACTOR))
    middle = max(16, _GROWTH_BYTES // (n_events * _ROW_BYTES))
    loop.warm_up(_batch(middle))
    planner = Timed()
    n_made = 0
    with attach(loop.model, AMPLE_BYTES, meter=loop.meter, planner=planner) as session:
        n_shapes = _LEARNING_STEPS + 2 * task["misses"]
        for step, rows in enumerate(_shapes(middle, task["seed"], n_shapes)):
            loop.step(_batch(rows))
            record = session.records[-1]
            if record.phase != "plan" or record.cache_hit or step < _LEARNING_STEPS:
                continue
            yield {
                "events": n_events,
                **recorded(record, "step", "kept"),
                "rows": rows,
                "miss_seconds": record.plan_seconds - planner.seconds_besides,
                "planner_seconds": planner.seconds,
            }
            n_made += 1
            if n_made >= task["misses"]:
                return
    msg = (
        f"{n_events} events: of {step + 1} steps only {n_made} made a new plan, not "
        f"{task['misses']}: ask for fewer --misses"
    )
    raise RuntimeError(msg)


def _batch(rows: int) -> Any:
    return {"states": torch.rand(rows, _WIDTH)}


def _shapes(middle: int, seed: int, least: int) -> Iterator[int]:
    """Yield different numbers of rows, from 0.7 to 1.3 times the middle.

    Args:
        middle: Rows of a batch in between.
        seed: Of the order.
        least: So many there are; with few rows to choose from, the largest are larger.
    """
    lowest = 0.7 * middle
    highest = max(1.3 * middle, lowest + least)
    rows = np.unique(np.linspace(lowest, highest, max(200, least + 1)).astype(int))
    yield from np.random.default_rng(seed).permutation(rows).tolist()
