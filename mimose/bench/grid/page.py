"""A grid as one HTML page, from its rows alone: figures and a table of every cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from mimose.bench.grid.looks import COLOURS, marked
from mimose.bench.grid.menu import ALL_MENU
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.shares import colour_of, words_of
from mimose.bench.grid.summary import CellSummary, summarise
from mimose.bench.grid.table import sentences
from mimose.bench.grid.workload import size_of
from mimose.report.page.cells import Map, draw_map
from mimose.report.page.document import document
from mimose.report.page.looks import Figure, nothing
from mimose.report.page.scales import extent, whole
from mimose.report.page.svg import Panel, Point, Rule, Series, draw
from mimose.report.page.tables import Cell as TableCell
from mimose.report.page.tables import Table

_MIB = 2**20
_GIGA = 1e9
_OFF_THE_SCALE = 1.8
"""Times plain training; who takes longer on the average is not drawn."""
_UNKNOWN: TableCell = ("–", -1.0)
_EQUAL = {True: "yes", False: "no", None: "–"}


def write_page(rows: Sequence[GridRow], path: Path) -> None:
    """Write the page."""
    summaries = summarise(rows)
    workloads = list(dict.fromkeys(cell.workload for cell in summaries))
    figures = []
    for number, workload in enumerate(workloads):
        cells = [s for s in summaries if s.workload == workload]
        own = [row for row in rows if row.workload == workload]
        figures += [
            _prices(f"time{number}", workload, cells),
            _peaks(f"peaks{number}", workload, own, cells),
            _plans(f"plans{number}", workload, own, "mimose"),
        ]
        if any(row.strategy == "mimose-all" for row in own):
            figures.append(_plans(f"all{number}", workload, own, "mimose-all"))
    text = document(
        "mimose bench",
        _introduction(rows, summaries),
        figures,
        [_cells_table(summaries)],
        "the benchmark's rows",
    )
    path.write_text(text, encoding="utf-8")


def _introduction(
    rows: Sequence[GridRow], summaries: Sequence[CellSummary]
) -> Iterator[str]:
    first = rows[0]
    yield (
        "<p>Strategies take turns on the same batches, each in a process of its own, "
        "at the same budgets. A budget lies between what the longest batch grows by "
        "when every layer is recomputed (0) and when none is (1). Peaks are physical, "
        "over forward, backward and optimizer step; recomputation is counted.</p>"
    )
    said = list(sentences(summaries))
    yield f'<p class="verdict">{escape(said[0])}</p><ul>'
    yield from (f"<li>{escape(sentence)}</li>" for sentence in said[1:])
    yield "</ul>"
    where = (
        f"{first.device}, {first.threads} threads, {first.dtype}, {first.scale} "
        f"models, torch {first.torch}, transformers {first.transformers}, mimose "
        f"{first.mimose}, seed {first.seed}, {first.date}"
    )
    yield f'<p class="caption">{escape(where)}</p>'


def is_off_the_scale(cells: Sequence[CellSummary]) -> bool:
    """Whether a strategy is so slow that the others would look like one line."""
    return statistics.fmean(c.seconds_ratio or 0.0 for c in cells) > _OFF_THE_SCALE


def _prices(name: str, workload: str, cells: Sequence[CellSummary]) -> Figure:
    """Draw time against budget, as the paper's Fig. 10."""
    series, left_out = [], []
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        own = [
            c for c in cells if c.strategy == strategy and c.seconds_ratio is not None
        ]
        if own and is_off_the_scale(own):
            left_out.append(strategy)
        elif own:
            series.append(_price_line(strategy, own))
    title = f"{workload}: time against budget"
    if not series:
        return nothing(name, title, "No strategy was timed here.")
    base = cells[0].relative_to
    base = "plain training" if base == "none" else f"that of {base}"
    caption = (
        f"Time of the measured steps, {base} being 1; bars are "
        f"95% intervals. A cross: over the budget in some step, or failed."
    )
    if left_out:
        caption += f" Too slow for this picture: {', '.join(left_out)}; see the table."
    points = [point for line in series for point in line.points]
    heights = [y for p in points for y in (p.y, p.low, p.high) if y is not None]
    panel = Panel(
        whole([point.x for point in points], from_zero=False),
        whole(heights, from_zero=False),
        "budget (0: everything recomputed, 1: everything kept)",
        f"time ÷ {base}",
        series,
    )
    return Figure(name, title, caption, draw([panel], title))


def _price_line(strategy: str, cells: Sequence[CellSummary]) -> Series:
    is_ours = strategy == "mimose"
    return Series(
        name=marked(strategy),
        colour=COLOURS[strategy],
        points=[
            Point(
                c.budget_share if c.budget_share is not None else 1.0,
                c.seconds_ratio or 0.0,
                c.seconds_low,
                c.seconds_high,
                f"{strategy}: {c.seconds_ratio:.3f}",
                "circle" if c.keeps_budget else "cross",
            )
            for c in cells
        ],
        size=4.5,
        line=4.0 if is_ours else 1.5,
        opacity=1.0,
    )


def _peaks(
    name: str, workload: str, rows: Sequence[GridRow], cells: Sequence[CellSummary]
) -> Figure:
    """Draw growth against the batch's size, as the paper's Fig. 11."""
    budgets = sorted({cell.budget_share: cell.headroom_bytes for cell in cells}.items())
    share, headroom = budgets[len(budgets) // 2]
    series = []
    for strategy, colour in COLOURS.items():
        points = [
            Point(size_of(row.shape), row.growth_bytes / _MIB, text=strategy)
            for row in rows
            if row.strategy == strategy
            and row.budget_share in (None, share)
            and row.is_measured
            and not row.problem
        ]
        if points:
            series.append(Series(name=strategy, colour=colour, points=points))
    title = f"{workload}: peaks"
    if not series:
        return nothing(name, title, "No step was measured here.")
    drawn = [point for one in series for point in one.points]
    line = headroom / _MIB
    y = extent([point.y for point in drawn], line)
    panel = Panel(
        whole([point.x for point in drawn]),
        y,
        "size of the batch (tokens, or pixels)",
        "growth of a step (MiB)",
        series,
        [Rule(line, "the budget's headroom")] if y.has_line else [],
    )
    where = "the dashed line" if y.has_line else "beyond the picture"
    caption = f"At the budget {share:g} a step may grow by {line:.0f} MiB, {where}."
    return Figure(name, title, caption, draw([panel], title))


def _plans(name: str, workload: str, rows: Sequence[GridRow], strategy: str) -> Figure:
    """Draw a strategy's plans: layers down, batches by size across."""
    shares = sorted({r.budget_share for r in rows if r.budget_share is not None})
    title = f"{workload}: plans of {strategy}"
    if not shares:
        return nothing(name, title, "No strategy at a budget ran.")
    share = shares[len(shares) // 2]
    own = sorted(
        (
            row
            for row in rows
            if row.strategy == strategy
            and row.budget_share == share
            and row.phase == "plan"
            and row.plan
        ),
        key=lambda row: size_of(row.shape),
    )
    if not own:
        return nothing(name, title, f"{strategy} has planned no step here.")
    depth = max(len(row.plan) for row in own)
    menu = ALL_MENU
    actions = {spec.code: spec.name for spec in menu.specs} | {"": ""}
    used = {actions[code] for row in own for code in row.plan}
    kinds = [name for name in menu.names if name in used]
    map_ = Map(
        rows=[f"layer call {i}" for i in range(depth)],
        columns=[_sizes(row) for row in own],
        cells=[[actions[row.plan[i : i + 1]] for row in own] for i in range(depth)],
        colours={kind: colour_of(kind) for kind in kinds},
        words={kind: words_of(kind) for kind in kinds},
        x_title="batches, the smallest first",
    )
    return Figure(name, title, f"At the budget {share:g}.", draw_map(map_, title))


def _sizes(row: GridRow) -> str:
    return ", ".join(f"{name} {size}" for name, size in row.shape.items())


def _cells_table(summaries: Sequence[CellSummary]) -> Table:
    ordered = sorted(summaries, key=lambda s: not s.steps)
    rows = [_table_row(cell) for cell in ordered]
    help_ = "Click a column's head to sort by it."
    columns = tuple(rows[0]) if rows else ()
    return Table(
        "cells", "Every cell", help_, columns, [tuple(row.values()) for row in rows]
    )


def _table_row(cell: CellSummary) -> dict[str, TableCell]:
    first, last = cell.seconds_low, cell.seconds_high
    interval = "–" if first is None else f"{first:.3f} – {last:.3f}"
    return {
        "workload": (cell.workload, cell.workload),
        "budget": _number(cell.budget_share, "{:g}"),
        "strategy": (marked(cell.strategy), cell.strategy),
        "time": _number(cell.seconds_ratio, "{:.3f}×"),
        "95% interval": (interval, first or -1.0),
        "time with warm-up": _number(cell.total_ratio, "{:.3f}×"),
        "redone GFLOP": _number(cell.recomputed_flops, "{:.2f}", _GIGA),
        "redone in the warm-up": _number(cell.warm_up_flops, "{:.2f}", _GIGA),
        "largest growth, MiB": _number(
            cell.largest_growth_bytes or None, "{:.1f}", _MIB
        ),
        "host, MiB": _number(cell.host_bytes, "{:.0f}", _MIB),
        "over": _number(cell.steps_over, "{:.0f}"),
        "growth ÷ headroom where needed": _number(cell.use_p50, "{:.1%}"),
        "error p50": _number(cell.error_p50, "{:.2%}"),
        "error p99": _number(cell.error_p99, "{:.2%}"),
        "learning steps": _number(cell.learning_steps, "{:.0f}"),
        "plan found in µs": _number(cell.hit_seconds, "{:.0f}", 1e-6),
        "plan made in ms": _number(cell.miss_seconds, "{:.2f}", 1e-3),
        "losses equal": (_EQUAL[cell.loss_is_equal],) * 2,
        "what happened": (f"{cell.problem} {cell.failed_at}".strip(), cell.problem),
    }


def _number(value: float | None, form: str, unit: float = 1) -> TableCell:
    return _UNKNOWN if value is None else (form.format(value / unit), value / unit)
