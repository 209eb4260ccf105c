"""The demonstration as one picture, made from its rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.grid.looks import COLOURS
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.summary import CellSummary, summarise
from mimose.bench.grid.workload import size_of
from mimose.bench.pictures import draw_budget, measured_on, save, tidy, title
from mimose.bench.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXPLAINED = {
    "none": "none\nkeep everything",
    "full": "full\nrecompute everything",
    "static": "static\none plan for the longest",
    "mimose": "mimose\na plan for every length",
}
_MIB = 2**20
_GIGA = 1e9
_MILLI = 1e3


def draw(csv_path: Path, picture_path: Path) -> None:
    """Draw peaks against lengths, and the price of each strategy beside them.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    from matplotlib.figure import Figure

    every = read(csv_path, GridRow)
    rows = [row for row in every if not (row.is_limited or row.problem)]
    summaries = [summary for summary in summarise(rows) if summary.steps]
    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
    _draw_peaks(figure.add_subplot(grid[:, 0]), rows)
    _draw_bars(
        figure.add_subplot(grid[0, 1]),
        {s.strategy: _MILLI * _step_seconds(s) for s in summaries},
        "time (ms a step)",
        "{:.0f}",
    )
    _draw_bars(
        figure.add_subplot(grid[1, 1]),
        {s.strategy: (s.recomputed_flops or 0) / s.steps / _GIGA for s in summaries},
        "recomputed (GFLOP a step)",
        "{:.2f}",
    )
    title(figure, _headline(summaries), _footnote(every))
    save(figure, picture_path)


def _draw_peaks(axes: Axes, rows: Sequence[GridRow]) -> None:
    budget = next((row.headroom_bytes for row in rows if row.headroom_bytes), None)
    for strategy in _strategies(rows):
        own = [row for row in rows if row.strategy == strategy]
        axes.scatter(
            [size_of(row.shape) for row in own],
            [row.growth_bytes / _MIB for row in own],
            s=26 if strategy == "mimose" else 16,
            color=COLOURS[strategy],
            alpha=0.85,
            linewidths=0,
            zorder=3 if strategy == "mimose" else 2,
        )
    _draw_predictions(axes, rows)
    if budget is not None:
        draw_budget(axes, [size_of(row.shape) for row in rows], budget / _MIB)
    _label_directly(axes, rows)
    axes.set_xlabel("longest text in the batch (tokens)")
    axes.set_ylabel("peak memory of a step, over what is held anyway (MiB)")
    tidy(axes)


def _draw_predictions(axes: Axes, rows: Sequence[GridRow]) -> None:
    known = [
        (size_of(row.shape), _predicted_bytes(row) / _MIB)
        for row in rows
        if row.strategy == "mimose" and row.predicted_growth_bytes
    ]
    if not known:
        return
    lengths, peaks = zip(*known, strict=True)
    axes.scatter(
        lengths,
        peaks,
        s=44,
        facecolors="none",
        edgecolors="black",
        linewidths=0.7,
        zorder=4,
        label="ring: mimose's prediction before the step\n(no ring: still measuring)",
    )
    axes.legend(loc="upper left", frameon=False, fontsize=9, handletextpad=0.2)


def _predicted_bytes(row: GridRow) -> float:
    """Return the predicted peak over what was held before training began."""
    return row.start_bytes - row.base_bytes + (row.predicted_growth_bytes or 0.0)


def _label_directly(axes: Axes, rows: Sequence[GridRow]) -> None:
    """Write each strategy's name beside its longest batch, none over another."""
    longest = max(size_of(row.shape) for row in rows)
    shortest = min(size_of(row.shape) for row in rows)
    ends: dict[str, float] = {}
    for row in rows:
        growth = row.growth_bytes / _MIB
        ends[row.strategy] = max(growth, ends.get(row.strategy, 0.0))
    low, high = axes.get_ylim()
    places = spread(ends, 0.09 * (high - low))
    for strategy, height in places.items():
        axes.text(
            longest + 0.025 * (longest - shortest),
            height,
            _EXPLAINED[strategy],
            color=COLOURS[strategy],
            fontsize=9,
            va="center",
            weight="bold" if strategy == "mimose" else "normal",
        )
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 < tick <= longest])
    axes.set_xlim(right=longest + 0.44 * (longest - shortest))


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move labels apart, upwards from the lowest, until none is nearer than a gap."""
    placed: dict[str, float] = {}
    floor = float("-inf")
    for name in sorted(heights, key=lambda name: heights[name]):
        placed[name] = max(heights[name], floor)
        floor = placed[name] + gap
    return placed


def _draw_bars(axes: Axes, values: Mapping[str, float], title: str, form: str) -> None:
    names = list(values)
    bars = axes.barh(
        names, list(values.values()), color=[COLOURS[name] for name in names]
    )
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.margins(x=0.25)
    axes.set_xticks([])
    tidy(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _step_seconds(summary: CellSummary) -> float:
    return sum(seconds for _, seconds in summary.turns) / summary.steps


def _headline(summaries: Sequence[CellSummary]) -> str:
    by_name = {summary.strategy: summary for summary in summaries}
    if "mimose" not in by_name:
        return "Peak memory of a training step, by the length of its batch"
    mimose = by_name["mimose"]
    within = mimose.steps - mimose.steps_over
    kept = "all" if within == mimose.steps else f"{within} of"
    headline = f"mimose kept {kept} {mimose.steps} steps within the budget"
    full = by_name.get("full")
    if full is None or not full.recomputed_flops or full.steps != mimose.steps:
        return headline
    ratio = (mimose.recomputed_flops or 0) / full.recomputed_flops
    return f"{headline}, and recomputed {ratio:.0%} of what full checkpointing does"


def _footnote(rows: Sequence[GridRow]) -> str:
    """Say where it was measured, and what the hard limit did."""
    first = rows[0]
    where = f"{first.threads} threads, {measured_on(first)}"
    limited: Counter[str] = Counter()
    for row in rows:
        if row.is_limited:
            limited[row.strategy] += not row.problem
    if not limited:
        return where
    steps = 1 + max(row.step for row in rows if not row.is_limited)
    taken = ", ".join(f"{name} took {n} of {steps}" for name, n in limited.items())
    return f"With the budget as a hard limit on the process: {taken} steps.\n{where}"


def _strategies(rows: Sequence[GridRow]) -> list[str]:
    return list(dict.fromkeys(row.strategy for row in rows))
