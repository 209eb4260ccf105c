"""Sums up the rows of a grid, in numbers and in sentences."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from mimose.bench.grid.runner import INTERRUPTED, TURN, GridRow
from mimose.bench.grid.workloads import WORKLOADS

_RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)
_LEAST_TURNS = 5
"""The least turns for an interval."""
_OTHERS = ("static", "mimose-paper", "full", "hf-full", "every-2", "oracle")
"""The strategies with which sentences compare mimose."""
_GIGA = 1e9
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSummary:
    """One strategy at one budget on one workload, over its measured steps.

    A strategy without a budget is judged at each budget.
    """

    workload: str
    strategy: str
    budget_share: float
    headroom_bytes: int
    """The budget minus what is held when training begins."""
    problem: str
    """Why it did not run to its end; empty if it did."""
    failed_at: str
    """The step of the failure, and the batch's sizes; empty if it did not begin."""
    steps: int
    seconds_ratio: float | None
    """Time ÷ plain training's of the same steps."""
    seconds_low: float | None
    """Lower end of the ratio's 95% interval, by resampling turns; None with fewer than
    five turns."""
    seconds_high: float | None
    total_ratio: float | None
    """The same with the warm-up's steps."""
    recomputed_flops: int | None
    """Recomputed FLOPs; None if they cannot be counted."""
    largest_growth_bytes: int
    steps_over: int
    """Steps that grew beyond the headroom, with the warm-up's."""
    loss_is_equal: bool | None
    """Whether each loss equals plain training's bit by bit; None without steps."""
    turns: tuple[tuple[int, float], ...]
    """Measured steps and their seconds, turn by turn."""

    @property
    def keeps_budget(self) -> bool:
        """Whether it ran to its end and no step was over the budget."""
        return not self.problem and self.steps_over == 0


def summarise(rows: Iterable[GridRow]) -> list[CellSummary]:
    """Sum up by workload, then budget, then strategy, in the order of the rows.

    Steps under a hard limit are left out.
    """
    by_workload: dict[str, list[GridRow]] = {}
    for row in rows:
        if not row.is_limited:
            by_workload.setdefault(row.workload, []).append(row)
    return [cell for own in by_workload.values() for cell in _workload(own)]


def _workload(rows: Sequence[GridRow]) -> Iterator[CellSummary]:
    cells: dict[tuple[str, float | None], list[GridRow]] = {}
    budgets: dict[float, int] = {}
    for row in rows:
        cells.setdefault((row.strategy, row.budget_share), []).append(row)
        if row.budget_share is not None and row.headroom_bytes is not None:
            budgets[row.budget_share] = row.headroom_bytes
    plain = {r.step: r for r in cells.get(("none", None), []) if not r.problem}
    for share, headroom in sorted(budgets.items()):
        for (name, own_share), own in cells.items():
            if own_share in (None, share):
                yield _cell(name, share, headroom, own, plain)


def _cell(
    name: str,
    share: float,
    headroom: int,
    rows: Sequence[GridRow],
    plain: Mapping[int, GridRow],
) -> CellSummary:
    ran = [row for row in rows if not row.problem]
    failed = next((row for row in rows if row.problem), None)
    pairs = [(row, plain[row.step]) for row in ran if row.step in plain]
    measured = [(row, other) for row, other in pairs if row.is_measured]
    mine = _turns(row for row, _ in measured)
    ratio = _paired((mine, _turns(other for _, other in measured)))
    plain_seconds = sum(other.seconds for _, other in pairs)
    failed_at = ""
    if failed is not None and failed.step >= 0:
        sizes = ", ".join(f"{size} {n}" for size, n in failed.shape.items())
        failed_at = f"step {failed.step}, {sizes}"
    return CellSummary(
        workload=rows[0].workload,
        strategy=name,
        budget_share=share,
        headroom_bytes=headroom,
        problem=failed.problem if failed else "",
        failed_at=failed_at,
        steps=len(measured),
        seconds_ratio=ratio.value,
        seconds_low=ratio.low,
        seconds_high=ratio.high,
        total_ratio=sum(row.seconds for row, _ in pairs) / plain_seconds
        if plain_seconds
        else None,
        recomputed_flops=_sum(row.recomputed_flops for row, _ in measured),
        largest_growth_bytes=max((row.growth_bytes for row in ran), default=0),
        steps_over=sum(row.growth_bytes > headroom for row in ran),
        loss_is_equal=all(row.loss == other.loss for row, other in pairs)
        if pairs
        else None,
        turns=mine,
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if there are no numbers, or one is not known."""
    found = list(counts)
    known = [count for count in found if count is not None]
    return sum(known) if known and len(known) == len(found) else None


class Ratio(NamedTuple):
    """A ratio of times, and the ends of its 95% interval."""

    value: float | None
    low: float | None
    high: float | None


def _turns(rows: Iterable[GridRow]) -> tuple[tuple[int, float], ...]:
    """Return steps and seconds of each turn."""
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        n_steps, seconds = found.get(row.step // TURN, (0, 0.0))
        found[row.step // TURN] = n_steps + 1, seconds + row.seconds
    return tuple(found.values())


def _paired(
    *cells: tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]],
) -> Ratio:
    """Return the geometric mean over cells of one strategy's time ÷ another's.

    The interval is by bootstrap. It resamples turns of both strategies together, not
    steps, because what disturbs a step also disturbs its neighbours.

    Args:
        cells: For each cell, the turns of the one and of the other. Turns that only one
            of them finished are left out.
    """
    logs, n_turns = [], []
    for mine, theirs in cells:
        both = [
            (a, b)
            for (n, a), (m, b) in zip(mine, theirs, strict=False)
            if n == m and a > 0.0 and b > 0.0
        ]
        if not both:
            continue
        seconds = np.array(both)
        sums = seconds[_resampled(len(both))].sum(axis=1)
        logs.append(np.log(sums[:, 0] / sums[:, 1]))
        n_turns.append(len(both))
    if not logs:
        return Ratio(None, None, None)
    means = np.exp(np.mean(logs, axis=0))
    if min(n_turns) < _LEAST_TURNS:
        return Ratio(float(means[0]), None, None)
    low, high = np.percentile(means[1:], _PERCENTILES)
    return Ratio(float(means[0]), float(low), float(high))


@functools.cache
def _resampled(n_turns: int) -> NDArray[np.int_]:
    """Return (1 + resamples, n_turns) turns: all in order, then drawn at random."""
    drawn = np.random.default_rng(0).integers(n_turns, size=(_RESAMPLES, n_turns))
    return np.vstack((np.arange(n_turns), drawn))


@dataclass(frozen=True, slots=True)
class Comparison:
    """mimose against another strategy, over the cells in which both keep the budget."""

    other: str
    cells: int
    seconds: Ratio
    """Geometric mean of mimose's time ÷ the other's."""
    flops_ratio: float | None
    """mimose's recomputed FLOPs ÷ the other's, summed over the cells; None if they are
    not known, or the other recomputes nothing."""


def compare(summaries: Sequence[CellSummary], other: str) -> Comparison | None:
    """Compare with another strategy; None if there is no cell to compare."""
    found = {(s.workload, s.budget_share, s.strategy): s for s in summaries}
    pairs = [
        (mine, found[workload, share, other])
        for (workload, share, name), mine in found.items()
        if name == "mimose" and (workload, share, other) in found
    ]
    kept = [both for both in pairs if all(c.keeps_budget and c.turns for c in both)]
    seconds = _paired(*((a.turns, b.turns) for a, b in kept))
    if seconds.value is None:
        return None
    mine, theirs = (_sum(cell[i].recomputed_flops for cell in kept) for i in (0, 1))
    flops_ratio = mine / theirs if mine is not None and theirs else None
    return Comparison(other, len(kept), seconds, flops_ratio)


def show(summaries: Sequence[CellSummary], console: Console) -> None:
    """Print a table for each workload, one of all cells, and sentences."""
    for workload in dict.fromkeys(summary.workload for summary in summaries):
        own = [summary for summary in summaries if summary.workload == workload]
        console.print(_table(workload, own))
    console.print(_overview(summaries))
    for sentence in sentences(summaries):
        console.print(sentence, markup=False)


def new_table(first: str, *others: str, title: str | None = None) -> Table:
    """Return a table whose first column has names and whose others have numbers."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _table(workload: str, summaries: Sequence[CellSummary]) -> Table:
    """Return a table of times: strategies down, budgets across."""
    budgets = {s.budget_share: s.headroom_bytes for s in summaries}
    known = WORKLOADS.get(workload)
    table = new_table(
        "strategy",
        *(
            f"budget {each:g}\n{grown / _MIB:.0f} MiB"
            for each, grown in budgets.items()
        ),
        title=workload if known is None else f"{workload}: {known.what}",
    )
    ran = sorted(summaries, key=lambda summary: not summary.steps)  # those first
    for strategy in dict.fromkeys(summary.strategy for summary in ran):
        own = {s.budget_share: s for s in summaries if s.strategy == strategy}
        times = [_time(own.get(share)) for share in budgets]
        table.add_row(strategy, *times, style="bold" if strategy == "mimose" else "")
    return table


def _time(summary: CellSummary | None) -> str:
    if summary is None or summary.seconds_ratio is None:
        return "failed" if summary and summary.failed_at else "not run"
    if summary.problem not in ("", INTERRUPTED):
        return "failed"
    time = f"{summary.seconds_ratio:.2f}×"
    if summary.seconds_high is not None and summary.seconds_low is not None:
        time += f" ±{(summary.seconds_high - summary.seconds_low) / 2:.2f}"
    if summary.steps_over:
        time = f"[{time}] {summary.steps_over} over"
    return f"({time})" if summary.problem else time


def _gflop(flops: int | None) -> str:
    return "?" if flops is None else f"{flops / _GIGA:,.1f}"


def _overview(summaries: Sequence[CellSummary]) -> Table:
    """Return a table of all cells of each strategy."""
    columns = ("budget kept", "time", "with warm-up", "redone, GFLOP")
    table = new_table("strategy", *columns, title="All cells")
    for strategy in dict.fromkeys(s.strategy for s in summaries if s.steps):
        cells = [s for s in summaries if s.strategy == strategy]
        own = [c for c in cells if not c.problem and c.seconds_ratio is not None]
        if own:
            table.add_row(
                strategy,
                f"{sum(cell.keeps_budget for cell in cells)} of {len(cells)}",
                f"{statistics.fmean(c.seconds_ratio or 0.0 for c in own):.2f}×",
                f"{statistics.fmean(c.total_ratio or 0.0 for c in own):.2f}×",
                _gflop(_sum(cell.recomputed_flops for cell in own)),
            )
    return table


def sentences(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Yield sentences that explain the tables."""
    ended = [s for s in summaries if s.problem != INTERRUPTED]
    mine = [s for s in ended if s.strategy == "mimose"]
    if mine:
        kept = sum(s.keeps_budget for s in mine)
        yield f"mimose kept the budget in {kept} of {len(mine)} cells."
    for other in _OTHERS:
        found = compare(summaries, other)
        if found is not None:
            yield _comparison(found)
    where: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        if summary.problem:
            place = summary.workload
            if summary.failed_at:
                place += f" at {summary.budget_share:g} ({summary.failed_at})"
            where.setdefault((summary.strategy, summary.problem), []).append(place)
    for (strategy, why), places in where.items():
        yield f"{strategy}, {', '.join(dict.fromkeys(places))}: {why}"
    if any(s.steps_over for s in summaries):
        yield "[…] is over the budget, and counts for nothing."
    if any(s.seconds_low is not None for s in summaries):
        yield "± is half the 95% interval."
    if any(s.problem == INTERRUPTED for s in summaries):
        yield "(…) was interrupted, and counts for nothing."


def _comparison(found: Comparison) -> str:
    interval, redone = "", ""
    if found.seconds.low is not None:
        interval = f" ({found.seconds.low:.3f} to {found.seconds.high:.3f})"
    if found.flops_ratio is not None:
        redone = f", and recomputes {found.flops_ratio:.2f}× as much"
    cells = "1 cell" if found.cells == 1 else f"{found.cells} cells"
    return (
        f"mimose takes {found.seconds.value:.3f}{interval} of the time of "
        f"{found.other}{redone}: {cells} in which both keep the budget."
    )


def publish(
    document: Mapping[str, Any], files: Mapping[str, Path], console: Console
) -> None:
    """Write the results as JSON, and print the names of the files.

    Args:
        document: The results; the files' names are added.
        files: The files by their meaning; the results are written to ``"summary"``.
        console: The console to print to.
    """
    names = {name: str(path) for name, path in files.items()}
    text = json.dumps({**document, "files": names}) + "\n"
    files["summary"].write_text(text, encoding="utf-8")
    for name, path in names.items():
        console.print(f"{name}: {path}", markup=False)
