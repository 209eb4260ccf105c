"""What are the finer exact actions worth, against the best that whole layers allow?

The language tasks of the Mimose paper are trained at three budgets five ways: by the
optimum of whole layers for every shape, told everything beforehand; by this library
with all exact actions; by their optimum, told everything; and by one plan for the
longest batch, of whole layers and of all actions. The bytes are read where they are
exact, on the simulated accelerator (`menu_bytes`). Then every plan that was run there
is run again on the CPU beside plain training of the same batch (`menu_times`): that
takes a quiet machine, and may be done later.

    python -m benchmarks.proofs menu --threads 1
    python -m benchmarks.proofs menu --threads 1 --only bytes
    python -m benchmarks.proofs menu --threads 1 --only times --resume
    python -m benchmarks.proofs.menu_picture menu.csv menu_times.csv PICTURE.png

Compared are the steps behind the warm-up in which all had a plan. Those in which this
library still learned are counted, and a column of its own has the time with them.

With ``--resume`` what is there is kept: of the bytes whole budgets of a task, of the
times single rounds of a step. Time is the process's own. What a session does between
steps is not in it; what a plan took to make is in the rows of the bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.proofs.common import Answer, Bar, Settings, count, device, flag
from benchmarks.proofs.menu_bytes import MENU, STRATEGIES, bytes_of
from benchmarks.proofs.menu_times import MenuTimeRow, PlanTimes, times_of
from benchmarks.proofs.numbers import mean, percent
from mimose.bench.grid.runner import GridRow
from mimose.bench.grid.workloads import DEFAULT, SCALES
from mimose.usage import positive

QUESTION = "What are the finer exact actions worth, against the best of whole layers?"
BUDGETS = (0.35, 0.5, 0.7)
OPTIONS = (
    device("sim"),
    count("--steps", 30, "that are compared"),
    count("--warm-up", 12, "steps before them, for learning"),
    count("--rounds", 3, "of timing"),
    (
        "--time-device",
        {"choices": ("cpu", "sim"), "default": "cpu", "help": "where times are taken"},
    ),
    ("--tasks", {"nargs": "+", "choices": DEFAULT, "default": list(DEFAULT)}),
    ("--budgets", {"nargs": "+", "type": positive, "default": list(BUDGETS)}),
    ("--scale", {"choices": SCALES, "default": "small"}),
    ("--only", {"choices": ("bytes", "times"), "help": "one part of it"}),
    flag("--resume", "keep the rows that are there"),
)

_EXTRA_BARS: Mapping[float, float] = {0.35: 0.6, 0.5: 0.5, 0.7: 0.4}
"""By budget: extra time over that of the optimum of whole layers."""
_STATIC_BAR, _OPTIMUM_BAR, _USE_BAR = 0.8, 1.03, 0.95


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Read the bytes, take the times, and compare."""
    rows = bytes_of(settings, options, runs=options.only != "times")
    times = times_of(settings, options, rows, runs=options.only != "bytes")
    cells = [
        _cell(task, budget, rows, times)
        for task in options.tasks
        for budget in options.budgets
    ]
    return Answer(
        rows=[*rows],
        table=[_line(cell) for cell in cells],
        bars=_bars(cells, times),
        notes=[_means(cells, budget) for budget in options.budgets],
    )


@dataclass(frozen=True, slots=True)
class _Cell:
    """A task at one budget."""

    task: str
    budget: float
    over: Mapping[str, int | None]
    """Steps over the budget by strategy; None where it did not run to its end."""
    use: float | None
    """Mean growth ÷ headroom of planned steps that needed a plan."""
    n_needed: int
    n_compared: int
    n_learning: int
    """Steps behind the warm-up in which this library ran no plan with a prediction."""
    extra: Mapping[str, float | None]
    """Extra time over plain training by strategy, as a share."""
    with_learning: float | None
    """The same of this library, over all steps behind the warm-up."""

    def ratio(self, other: str) -> float | None:
        """Return this library's time ÷ another strategy's."""
        mine, theirs = self.extra[MENU], self.extra[other]
        return None if mine is None or theirs is None else (1 + mine) / (1 + theirs)


def _cell(task: str, budget: float, rows: Sequence[GridRow], times: PlanTimes) -> _Cell:
    own = [row for row in rows if row.workload == task]
    plain = {row.step: row for row in own if row.strategy == "none"}
    by = {
        name: [r for r in own if (r.strategy, r.budget_share) == (name, budget)]
        for name in STRATEGIES
    }
    ran = {name: each for name, each in by.items() if _has_run(each)}
    mine = {row.step: row for row in ran.get(MENU, ()) if row.is_measured}
    compared = _compared(ran)
    needed = [
        mine[step]
        for step in compared
        if plain[step].growth_bytes > (mine[step].headroom_bytes or 0)
    ]
    return _Cell(
        task=task,
        budget=budget,
        over={name: _over(ran.get(name)) for name in STRATEGIES},
        use=mean(row.growth_bytes / (row.headroom_bytes or 1) for row in needed),
        n_needed=len(needed),
        n_compared=len(compared),
        n_learning=sum(not _is_planned(row) for row in mine.values()),
        extra={
            name: _extra(
                [row for row in ran.get(name, ()) if row.step in compared], times
            )
            for name in STRATEGIES
        },
        with_learning=_extra([*mine.values()], times),
    )


def extra_times(
    rows: Sequence[GridRow], timed: Sequence[MenuTimeRow]
) -> dict[float, dict[str, float]]:
    """Return the mean extra time over plain training, by budget and strategy.

    Args:
        rows: Those of the bytes.
        timed: Those of the times. A strategy that was not timed in every task is
            left out.
    """
    times = PlanTimes()
    for row in timed:
        times.add(row)
    tasks = sorted({row.workload for row in rows})
    found: dict[float, dict[str, float]] = {}
    for budget in sorted({row.budget_share for row in rows if row.budget_share}):
        cells = [_cell(task, budget, rows, times) for task in tasks]
        means = {name: _mean_extra(cells, name) for name in STRATEGIES}
        found[budget] = {n: extra for n, extra in means.items() if extra is not None}
    return found


def _has_run(rows: Sequence[GridRow]) -> bool:
    return bool(rows) and not any(row.problem for row in rows)


def _compared(ran: Mapping[str, Sequence[GridRow]]) -> list[int]:
    """Return the steps behind the warm-up in which all that have run had a plan."""
    if MENU not in ran:
        return []
    steps = [
        {row.step for row in rows if row.is_measured and row.phase == "plan"}
        for rows in ran.values()
    ]
    predicted = {row.step for row in ran[MENU] if _is_planned(row)}
    return sorted(predicted.intersection(*steps))


def _is_planned(row: GridRow) -> bool:
    """Whether a step ran a plan; one that shows an action has no prediction."""
    return row.phase == "plan" and row.predicted_growth_bytes is not None


def _over(rows: Sequence[GridRow] | None) -> int | None:
    """Count steps over the budget, those of the warm-up too."""
    if rows is None:
        return None
    return sum(row.growth_bytes > (row.headroom_bytes or 0) for row in rows)


def _extra(rows: Sequence[GridRow], times: PlanTimes) -> float | None:
    """Return what the steps' plans take beyond plain training, as a share of it."""
    timed = [times.of(row) for row in rows]
    known = [each for each in timed if each is not None]
    if not known or len(known) < len(timed):
        return None
    return sum(extra for extra, _ in known) / sum(plain for _, plain in known)


# ------------------------------------------------------------------ telling


def _line(cell: _Cell) -> dict[str, object]:
    ran = {n: "-" if over is None else str(over) for n, over in cell.over.items()}
    return {
        "task": cell.task,
        "budget": cell.budget,
        **{f"{name} +%": _percent(cell.extra[name]) for name in STRATEGIES},
        "over, in this order": " ".join(ran.values()),
        "compared": cell.n_compared,
        "needed": cell.n_needed,
        "learning": cell.n_learning,
        "with these +%": _percent(cell.with_learning),
        "use": percent(cell.use, 1),
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _means(cells: Sequence[_Cell], budget: float) -> str:
    own = [cell for cell in cells if cell.budget == budget]
    told = ", ".join(
        f"{name} {_percent(_mean_extra(own, name)) or '?'}%" for name in STRATEGIES
    )
    return f"mean extra time at {budget:g}: {told}"


def _mean_extra(cells: Sequence[_Cell], name: str) -> float | None:
    """Return the mean over tasks; None where one of them is not known."""
    return _mean([cell.extra[name] for cell in cells])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _bars(cells: Sequence[_Cell], times: PlanTimes) -> list[Bar]:
    over = [cell.over[MENU] for cell in cells]
    used = [cell.use for cell in cells if cell.n_needed]
    exact = times.n_inexact if times.n_rounds else None
    return [
        *_extra_bars(cells),
        Bar(
            "time ÷ the static plan's of whole layers, mean",
            _mean([cell.ratio("static") for cell in cells]),
            _STATIC_BAR,
        ),
        Bar(
            "time ÷ the optimum's with the same actions, mean",
            _mean([cell.ratio("oracle-menu") for cell in cells]),
            _OPTIMUM_BAR,
        ),
        Bar(
            "steps over",
            None if None in over else sum(each or 0 for each in over),
            at_most=0,
        ),
        Bar(
            "growth ÷ headroom where a plan was needed, mean",
            mean(value for value in used if value is not None),
            at_least=_USE_BAR,
            is_share=True,
        ),
        Bar("timed steps with another loss or gradient", exact, at_most=0),
    ]


def _extra_bars(cells: Sequence[_Cell]) -> Iterator[Bar]:
    for budget in sorted({cell.budget for cell in cells}):
        own = [cell for cell in cells if cell.budget == budget]
        mine, oracle = (_mean_extra(own, name) for name in (MENU, "oracle"))
        value = mine / oracle if mine is not None and oracle else None
        what = f"extra time ÷ the optimum's of whole layers, at {budget:g}"
        yield Bar(what, value, at_most=_EXTRA_BARS.get(budget, 1.0))
