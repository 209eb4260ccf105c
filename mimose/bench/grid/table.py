"""What a grid says, in a terminal."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from mimose.bench.grid.looks import is_lossy, marked
from mimose.bench.grid.rows import INTERRUPTED
from mimose.bench.grid.summary import (
    CellSummary,
    Comparison,
    Rankings,
    compare,
    picked,
)
from mimose.bench.grid.workloads import ALL

_GIGA = 1e9
_MIB = 2**20
_OTHERS = ("static", "mimose-paper", "full", "every-2", "oracle")


def tables(summaries: Sequence[CellSummary]) -> Group:
    """Return a table for each workload: strategies down, budgets across."""
    workloads = list(dict.fromkeys(summary.workload for summary in summaries))
    return Group(
        *[
            _table(name, [s for s in summaries if s.workload == name])
            for name in workloads
        ]
    )


def _table(workload: str, summaries: Sequence[CellSummary]) -> Table:
    budgets = {s.budget_share: s.headroom_bytes for s in summaries}
    known = ALL.get(workload)
    title = workload if known is None else f"{workload}: {known.what}"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("strategy", no_wrap=True)
    for share, headroom in budgets.items():
        table.add_column(
            f"budget {share:g}\n{headroom / _MIB:.0f} MiB of growth",
            justify="right",
            no_wrap=True,
        )
        table.add_column("redone\nGFLOP", justify="right", no_wrap=True)
    ran = sorted(summaries, key=lambda summary: not summary.steps)  # those first
    for strategy in dict.fromkeys(summary.strategy for summary in ran):
        own = {s.budget_share: s for s in summaries if s.strategy == strategy}
        cells = [cell for share in budgets for cell in _cells(own.get(share))]
        style = "bold" if strategy == "mimose" else ""
        table.add_row(marked(strategy), *cells, style=style)
    return table


def _cells(summary: CellSummary | None) -> tuple[str, str]:
    if summary is None or summary.seconds_ratio is None:
        return "failed" if summary and summary.failed_at else "not run", ""
    if summary.problem not in ("", INTERRUPTED):
        return "failed", ""
    time = f"{summary.seconds_ratio:.2f}×"
    if summary.seconds_high is not None and summary.seconds_low is not None:
        time += f" ±{(summary.seconds_high - summary.seconds_low) / 2:.2f}"
    if summary.steps_over:
        time = f"[{time}] {summary.steps_over} over"
    if summary.problem:
        time = f"({time})"
    flops = summary.recomputed_flops
    return time, "?" if flops is None else f"{flops / _GIGA:.1f}"


def sentences(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Say what the tables mean."""
    ended = [s for s in summaries if s.problem != INTERRUPTED]
    mine = [s for s in ended if s.strategy == "mimose"]
    if mine:
        kept = sum(s.keeps_budget for s in mine)
        yield f"mimose kept the budget in {kept} of {len(mine)} cells."
    for other in _OTHERS:
        found = compare(summaries, other)
        if found is not None:
            yield _comparison(found)
    yield from _picked(summaries)
    if any(is_lossy(summary.strategy) for summary in summaries):
        yield "Where it says lossy, gradients are others than plain training's."
    yield from _unlike_plain(summaries)
    yield from _problems(summaries)
    yield "[…] is over the budget, and counts for nothing; ± is half the 95% interval."
    if any(s.problem == INTERRUPTED for s in summaries):
        yield "(…) was interrupted, and counts for nothing."


def _comparison(found: Comparison) -> str:
    interval, redone = "", ""
    if found.seconds.low is not None:
        interval = f" ({found.seconds.low:.3f} to {found.seconds.high:.3f})"
    if found.flops_ratio is not None:
        redone = f", and recomputes {found.flops_ratio:.2f}× as much"
    return (
        f"mimose takes {found.seconds.value:.3f}{interval} of the time of "
        f"{found.other}{redone}: {found.cells} cells in which both keep the budget."
    )


def _picked(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Say which actions were chosen where all could be."""
    for cell in picked(summaries):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in cell.action_shares)
        yield f"{cell.strategy}, {cell.workload} at {cell.budget_share:g}: {shares}"


def _unlike_plain(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Say where plain training is not what the others are compared with."""
    for workload in dict.fromkeys(s.workload for s in summaries):
        own = [s for s in summaries if s.workload == workload]
        if own[0].relative_to != "none":
            yield f"{workload}: plain training failed; times are relative to full."


def _problems(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Say who failed, in which cells and where."""
    where: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        if summary.problem:
            place = summary.workload
            if summary.failed_at:
                place += f" at {summary.budget_share:g} ({summary.failed_at})"
            places = where.setdefault((summary.strategy, summary.problem), [])
            if place not in places:
                places.append(place)
    for (strategy, why), places in where.items():
        yield f"{strategy}, {', '.join(places)}: {why}"


def overview(summaries: Sequence[CellSummary]) -> str:
    """Return all cells of each strategy in one line of a Markdown table."""
    lines = [
        "| strategy | budget kept | time | with warm-up | redone, GFLOP |",
        "|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(s.strategy for s in summaries if s.steps):
        cells = [s for s in summaries if s.strategy == strategy]
        kept = sum(cell.keeps_budget for cell in cells)
        own = [c for c in cells if not c.problem and c.seconds_ratio is not None]
        if not own:
            continue
        flops = [cell.recomputed_flops for cell in own]
        known = [count for count in flops if count is not None]
        redone = f"{sum(known) / _GIGA:,.0f}" if len(known) == len(own) else "?"
        time = statistics.fmean(cell.seconds_ratio or 0.0 for cell in own)
        total = statistics.fmean(cell.total_ratio or 0.0 for cell in own)
        ran = "" if len(own) == len(cells) else f" ({len(own)} cells)"
        lines.append(
            f"| {marked(strategy)} | {kept} of {len(cells)} | {time:.2f}×{ran} "
            f"| {total:.2f}× | {redone} |"
        )
    return "\n".join(lines) + "\n"


def rankings(found: Rankings) -> str:
    """Say what two runs rank differently."""
    if not found.pairs:
        return "no two strategies could be ranked: too few turns, or no cells in common"
    if not found.swapped:
        return f"both runs rank the strategies alike: {found.pairs} pairs"
    return "\n".join(
        f"{workload} at {share:g}: {faster} is faster than {other}, and in the other "
        f"run slower"
        for workload, share, faster, other in found.swapped
    )


def publish(
    document: Mapping[str, Any], files: Mapping[str, Path], console: Console
) -> None:
    """Name the files, then print what was found as a line of JSON, and write it down.

    Args:
        document: What was found; the files' names are added.
        files: By what they are; the document becomes the ``"summary"``.
        console: Where to print.
    """
    names = {name: str(path) for name, path in files.items()}
    text = json.dumps({**document, "files": names}) + "\n"
    files["summary"].write_text(text, encoding="utf-8")
    for name, path in names.items():
        console.print(f"{name}: {path}", markup=False)
    sys.stdout.write(text)


def show(summaries: Sequence[CellSummary], console: Console) -> None:
    """Print tables and sentences."""
    console.print(tables(summaries))
    for sentence in sentences(summaries):
        console.print(sentence, markup=False)
