"""Draws the pictures of `mimose bench` and `mimose demo` from their rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.grid.runner import GridRow
from mimose.bench.grid.strategies import STRATEGIES
from mimose.bench.grid.summary import CellSummary, summarise
from mimose.bench.grid.workloads import size_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's palette for our own, paler colours for the others.
_COLOURS = {
    "none": "#555555",
    "full": "#E69F00",
    "every-2": "#CC79A7",
    "static": "#56B4E9",
    "static-menu": "#393B79",
    "oracle": "#009E73",
    "oracle-menu": "#637939",
    "mimose-paper": "#D55E00",
    "mimose-menu": "#6B6ECF",
    "mimose": "#0072B2",
    "mimose-sklearn": "#17BECF",
    "hf-full": "#8C564B",
    "hf-every-2": "#C49C94",
}
_OTHER_COLOUR = "#999999"
_OFF_THE_SCALE = 1.8
"""Strategies that take longer than this, relative to plain training, are not drawn."""
_COLUMNS = 2
_MIB = 2**20
_GIGA = 1e9

_PUBLISHED = {
    "mc-roberta": "3.36 9.95"
    "; 4 1.19 5 1.065 6 1.06 7 1.045 8 1.04"
    "; 3.5 1.37 4.4 1.345 6 1.295 7 1.22 8 1.175",
    "tr-t5": "5.8 19.7"
    "; 6.65 1.36 9.15 1.385 12.75 1.125 13.8 1.065"
    "; 6.65 1.535 9.15 1.26 12.7 1.29 13.8 1.135",
    "qa-bert": "3.1 9.5"
    "; 4 1.26 5 1.165 6 1.10 7 1.07 8 1.02"
    "; 4 1.39 5 1.31 5.9 1.26 6.9 1.22 7.9 1.165",
    "tc-bert": "3.6 13.4"
    "; 4 1.055 5 1.045 6 1.01 7 1.02 8 1.02"
    "; 4 1.31 5 1.30 5.9 1.28 6.9 1.22 7.9 1.19",
}
"""Results of the Mimose paper (IPDPS 2023, a V100 in fp32), by workload.

First GB with every layer recomputed and with none. Then pairs of GB and time ÷ plain
training, of Mimose, and of Sublinear, the paper's planner with one plan for the longest
input. Read from its Fig. 10 (±0.02).
"""


def draw_grid(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw time against budget for each workload, with the paper's results.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(summary.workload for summary in summaries))
    n_columns = min(_COLUMNS, len(workloads))
    n_rows = -(-len(workloads) // n_columns)
    size = 1.5 + 4.75 * n_columns, 3.4 * n_rows + 1.2
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    grid = list(figure.subplots(n_rows, n_columns, squeeze=False, sharex=True).flat)
    handles: dict[str, Artist] = {}
    for axes, workload in zip(grid, workloads, strict=False):
        _draw_workload(axes, [s for s in summaries if s.workload == workload])
        if workload in _PUBLISHED:
            _draw_published(axes, workload)
        axes.set_title(workload, loc="left", fontsize=10, weight="bold")
        axes.set(xlabel="budget", ylabel="time ÷ plain training's")
        axes.spines[["top", "right"]].set_visible(False)
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    for axes in grid[len(workloads) :]:
        axes.set_visible(False)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=3 * n_columns,
        frameon=False,
    )
    text = (
        "Time of a step, by budget: 0 is what the longest batch needs with all\n"
        "recomputed, 1 with all kept. A cross broke the budget, or failed"
    )
    figure.suptitle(text, x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def _draw_workload(axes: Axes, cells: Sequence[CellSummary]) -> None:
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        timed = {
            cell.budget_share: (cell, cell.seconds_ratio)
            for cell in cells
            if cell.strategy == strategy and cell.seconds_ratio is not None
        }
        ratios = [ratio for _, ratio in timed.values()]
        if not ratios or statistics.fmean(ratios) > _OFF_THE_SCALE:
            continue
        is_mine = strategy == "mimose"
        colour = _COLOURS.get(strategy, _OTHER_COLOUR)
        axes.plot(
            list(timed),
            ratios,
            color=colour,
            linewidth=2.6 if is_mine else 1.1,
            zorder=3 if is_mine else 2,
        )
        axes.plot([], [], "-o", color=colour, markersize=4, label=strategy)
        for share, (cell, ratio) in timed.items():
            marker = "o" if cell.keeps_budget else "x"
            size = 6 if is_mine else 4
            axes.plot(share, ratio, marker, color=colour, markersize=size, zorder=4)


def _draw_published(axes: Axes, workload: str) -> None:
    ends, *series = (
        [float(number) for number in text.split()]
        for text in _PUBLISHED[workload].split(";")
    )
    for strategy, points in zip(("mimose", "static"), series, strict=True):
        axes.plot(
            [(gb - ends[0]) / (ends[1] - ends[0]) for gb in points[::2]],
            points[1::2],
            ":s",
            color=_COLOURS[strategy],
            linewidth=1.2,
            markersize=3,
            label=f"{strategy}, as the paper reports",
        )


def draw_demo(rows: Sequence[GridRow], path: Path) -> None:
    """Draw peaks against lengths, and the costs of each strategy.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    from matplotlib.figure import Figure

    ran = [row for row in rows if not (row.is_limited or row.problem)]
    summaries = [summary for summary in summarise(ran) if summary.steps]
    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
    _draw_peaks(figure.add_subplot(grid[:, 0]), ran)
    seconds = {s.strategy: sum(t for _, t in s.turns) / s.steps for s in summaries}
    flops = {s.strategy: (s.recomputed_flops or 0) / s.steps for s in summaries}
    _draw_bars(figure.add_subplot(grid[0, 1]), seconds, 1e3, "time (ms a step)")
    label = "recomputed (GFLOP a step)"
    _draw_bars(figure.add_subplot(grid[1, 1]), flops, 1 / _GIGA, label)
    row = rows[0]
    note = f"{row.threads} threads, {row.device}, torch {row.torch}, seed {row.seed}"
    figure.suptitle(headline(summaries), x=0.01, ha="left", fontsize=13, weight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def headline(summaries: Sequence[CellSummary]) -> str:
    """Return mimose's result, as a sentence without its full stop."""
    by_name = {summary.strategy: summary for summary in summaries}
    if "mimose" not in by_name:
        return "Peak memory of a training step, by the length of its batch"
    mimose = by_name["mimose"]
    within = mimose.steps - mimose.steps_over
    kept = "all" if within == mimose.steps else f"{within} of"
    text = f"mimose kept {kept} {mimose.steps} steps within the budget"
    full = by_name.get("full")
    if full is None or not full.recomputed_flops or full.steps != mimose.steps:
        return text
    ratio = (mimose.recomputed_flops or 0) / full.recomputed_flops
    return f"{text}, and recomputed {ratio:.0%} of what full checkpointing does"


def _draw_peaks(axes: Axes, rows: Sequence[GridRow]) -> None:
    for strategy in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == strategy]
        axes.scatter(
            [size_of(row.shape) for row in own],
            [row.growth_bytes / _MIB for row in own],
            s=26 if strategy == "mimose" else 16,
            color=_COLOURS[strategy],
            alpha=0.85,
            linewidths=0,
            zorder=3 if strategy == "mimose" else 2,
            label=f"{strategy}: {STRATEGIES[strategy].what}",
        )
    # Over what was held before training began, as the peaks are
    predicted = [
        (size_of(row.shape), row.start_bytes - row.base_bytes + growth)
        for row in rows
        if row.strategy == "mimose" and (growth := row.predicted_growth_bytes)
    ]
    if predicted:
        axes.scatter(
            [length for length, _ in predicted],
            [peak / _MIB for _, peak in predicted],
            s=44,
            facecolors="none",
            edgecolors="black",
            linewidths=0.7,
            zorder=4,
            label="mimose's prediction before the step",
        )
    headroom = next((row.headroom_bytes for row in rows if row.headroom_bytes), None)
    if headroom is not None:
        name = f"budget {headroom / _MIB:.0f} MiB"
        axes.axhline(headroom / _MIB, color="#D55E00", linestyle="--", label=name)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_xlabel("longest text in the batch (tokens)")
    axes.set_ylabel("peak memory of a step, over what is held anyway (MiB)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(
    axes: Axes, values: Mapping[str, float], factor: float, label: str
) -> None:
    heights = [value * factor for value in values.values()]
    bars = axes.barh(list(values), heights, color=[_COLOURS[name] for name in values])
    texts = [f"{h:,.0f}" if h >= 100.0 else f"{h:.3g}" for h in heights]
    axes.bar_label(bars, texts, padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
