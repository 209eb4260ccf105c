"""What a grid says, in a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table

from mimose.bench.grid.summary import CellSummary, compare
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
        cells = [cell for share in budgets for cell in _cells(own[share])]
        table.add_row(strategy, *cells, style="bold" if strategy == "mimose" else "")
    return table


def _cells(summary: CellSummary) -> tuple[str, str]:
    if summary.total_ratio is None:
        return "not run", ""
    if summary.problem or summary.seconds_ratio is None:
        return "failed", ""
    half = ((summary.seconds_high or 0.0) - (summary.seconds_low or 0.0)) / 2
    time = f"{summary.seconds_ratio:.2f}× ±{half:.2f}"
    if summary.steps_over:
        time = f"[{time}] {summary.steps_over} over"
    flops = summary.recomputed_flops
    return time, "?" if flops is None else f"{flops / _GIGA:.1f}"


def sentences(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """Say what the tables mean."""
    mine = [s for s in summaries if s.strategy == "mimose"]
    if mine:
        kept = sum(s.keeps_budget for s in mine)
        yield f"mimose kept the budget in {kept} of {len(mine)} cells."
    for other in _OTHERS:
        found = compare(summaries, other)
        if found is None:
            continue
        redone = ""
        if found.flops_ratio is not None:
            redone = f", and recomputes {found.flops_ratio:.2f}× as much"
        yield (
            f"mimose takes {found.seconds_ratio:.3f} of the time of {other}{redone} "
            f"({found.cells} cells in which both keep the budget)."
        )
    where: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        if summary.problem:
            places = where.setdefault((summary.strategy, summary.problem), [])
            if summary.workload not in places:
                places.append(summary.workload)
    for (strategy, why), places in where.items():
        yield f"{strategy}, {', '.join(places)}: {why}"
    yield "[…] is over the budget, and counts for nothing; ± is half the 95% interval."


def overview(summaries: Sequence[CellSummary]) -> str:
    """Return all cells of each strategy in one line of a Markdown table."""
    lines = [
        "| strategy | budget kept | time | with warm-up | redone, GFLOP |",
        "|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(s.strategy for s in summaries if s.steps):
        cells = [s for s in summaries if s.strategy == strategy]
        kept = sum(cell.keeps_budget for cell in cells)
        own = [cell for cell in cells if not cell.problem]
        if not own:
            continue
        flops = [cell.recomputed_flops for cell in own]
        known = [count for count in flops if count is not None]
        redone = f"{sum(known) / _GIGA:,.0f}" if len(known) == len(own) else "?"
        time = statistics.fmean(cell.seconds_ratio or 0.0 for cell in own)
        total = statistics.fmean(cell.total_ratio or 0.0 for cell in own)
        lines.append(
            f"| {strategy} | {kept} of {len(cells)} | {time:.2f}× | {total:.2f}× "
            f"| {redone} |"
        )
    return "\n".join(lines) + "\n"


def show(summaries: Sequence[CellSummary], console: Console) -> None:
    """Print tables and sentences."""
    console.print(tables(summaries))
    for sentence in sentences(summaries):
        console.print(sentence, markup=False)
