"""A grid as pictures: time against budget, beside the published, and as things grow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.grid.looks import COLOURS, marked
from mimose.bench.grid.menu import ALL
from mimose.bench.grid.page import is_off_the_scale
from mimose.bench.grid.peers import PEERS
from mimose.bench.grid.published import PUBLISHED
from mimose.bench.grid.scaling import AXES, SCALED, SCALING, name_of
from mimose.bench.grid.shares import draw_shares
from mimose.bench.grid.summary import CellSummary, picked
from mimose.bench.pictures import save, tidy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLUMNS = 2
_CALLS = "calls of layers (%)"
_PEERS = {peer.name for peer in PEERS}
_COMPARED = {"mimose": "mimose", "static": "static", "eviction": "DTR"}
"""Our strategies beside the paper's of another name."""
_MILLI = 1e3


def draw_all(summaries: Sequence[CellSummary], folder: Path) -> dict[str, Path]:
    """Draw every picture that there are numbers for.

    Returns:
        The files, by what they are.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    names = {summary.workload for summary in summaries}
    plain = {s.workload for s in summaries if s.relative_to == "none"}
    pictures: tuple[tuple[str, set[str], Callable[..., None]], ...] = (
        ("picture", names - SCALING.keys(), draw),
        ("published", plain & PUBLISHED.keys(), draw_published),
        ("scaling", names & SCALING.keys(), draw_scaling),
        ("actions", {s.workload for s in picked(summaries)}, draw_actions),
    )
    drawn = {}
    for name, wanted, function in pictures:
        own = [summary for summary in summaries if summary.workload in wanted]
        if any(summary.steps for summary in own):
            path = folder / ("bench.png" if name == "picture" else f"{name}.png")
            function(own, path)
            drawn[name] = path
    return drawn


def draw(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw time against budget, for each workload."""
    workloads = list(dict.fromkeys(summary.workload for summary in summaries))
    title = (
        "Time of a step, plain training being 1 (where it failed: full), at budgets "
        "between everything\nrecomputed (0) and kept (1). Crosses broke the budget, or "
        "failed"
    )
    if all(summary.relative_to == "none" for summary in summaries):
        title = title.replace(" (where it failed: full)", "")
    with _figure(len(workloads), _COLUMNS, title, path) as grid:
        for axes, workload in zip(grid, workloads, strict=True):
            own = [s for s in summaries if s.workload == workload]
            _draw_workload(axes, workload, own)


def draw_published(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw our times and those of the Mimose paper at the same shares of memory."""
    workloads = [
        name for name in PUBLISHED if any(s.workload == name for s in summaries)
    ]
    title = (
        "Ours (lines) and the Mimose paper's (dashes; V100, full size, Fig. 10): time, "
        "plain training being 1,\nagainst the share of memory between everything "
        "recomputed and everything kept"
    )
    with _figure(len(workloads), _COLUMNS, title, path) as grid:
        for axes, workload in zip(grid, workloads, strict=True):
            for ours, theirs in _COMPARED.items():
                own = [
                    s
                    for s in summaries
                    if (s.workload, s.strategy) == (workload, ours)
                    and s.keeps_budget
                    and s.seconds_ratio
                ]
                if own:
                    axes.plot(
                        [s.budget_share for s in own],
                        [s.seconds_ratio or 0.0 for s in own],
                        color=COLOURS[ours],
                        marker="o",
                        linewidth=2.2,
                        label=f"{ours} (ours)",
                    )
                shares, times = zip(*PUBLISHED[workload].shares(theirs), strict=True)
                axes.plot(
                    shares,
                    times,
                    color=COLOURS[ours],
                    marker="s",
                    markersize=4,
                    linestyle="--",
                    linewidth=1.2,
                    label=f"{theirs} (paper)",
                )
            _finish(axes, workload)


def draw_scaling(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw what a step, and a plan, cost as one thing grows."""
    from matplotlib.ticker import LogLocator

    budgets = sorted({s.budget_share for s in summaries})
    budget = budgets[len(budgets) // 2]
    found = {
        (s.workload, s.strategy): s
        for s in summaries
        if s.budget_share == budget and s.keeps_budget
    }
    title = (
        "A language model of which one thing grows: time of a step, plain training "
        f"being 1, at the budget {budget:g} (above);\nmilliseconds to make a plan, and "
        "to find one made before (below)"
    )
    with _figure(2 * len(AXES), len(AXES), title, path, shares_x=False) as grid:
        for column, (axis, values) in enumerate(AXES.items()):
            above, below = grid[column], grid[column + len(AXES)]
            for strategy in SCALED:
                _draw_growing(
                    above,
                    strategy,
                    COLOURS[strategy],
                    _points(found, axis, values, strategy, lambda s: s.seconds_ratio),
                )
            for label, pick in _PLAN_TIMES.items():
                points = _points(found, axis, values, "mimose", pick)
                colour = COLOURS["mimose" if "make" in label else "oracle"]
                _draw_growing(below, label, colour, points)
            below.set_yscale("log")
            below.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            below.yaxis.set_major_formatter("{x:g}")
            for axes in (above, below):
                _finish(axes, axis)
                axes.set_xscale("log", base=2)
                axes.set_xticks(values, [str(value) for value in values])
                axes.minorticks_off()


def draw_actions(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw, for each workload, which actions are chosen where all may be."""
    cells = picked(summaries)
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    title = (
        "Which action layers run under, where all may be chosen, at budgets between "
        "everything\nrecomputed (0) and kept (1)"
    )
    with _figure(len(workloads), _COLUMNS, title, path, shares_x=False) as grid:
        for axes, workload in zip(grid, workloads, strict=True):
            own = [cell for cell in cells if cell.workload == workload]
            budgets = [f"{cell.budget_share:g}" for cell in own]
            shares = [dict(cell.action_shares) for cell in own]
            draw_shares(axes, budgets, shares, ALL)
            axes.set_ylabel(_CALLS)
            _finish(axes, workload)


_PLAN_TIMES: Mapping[str, Callable[[CellSummary], float | None]] = {
    "make a plan, ms": lambda s: s.miss_seconds and s.miss_seconds * _MILLI,
    "find a plan, ms": lambda s: s.hit_seconds and s.hit_seconds * _MILLI,
}


def _points(
    found: Mapping[tuple[str, str], CellSummary],
    axis: str,
    values: Sequence[int],
    strategy: str,
    pick: Callable[[CellSummary], float | None],
) -> list[tuple[int, float]]:
    points = []
    for value in values:
        cell = found.get((name_of(axis, value), strategy))
        number = None if cell is None else pick(cell)
        if number is not None:
            points.append((value, number))
    return points


def _draw_growing(
    axes: Axes, label: str, colour: str, points: Sequence[tuple[int, float]]
) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker="o", markersize=4, label=label)


@contextlib.contextmanager
def _figure(
    n_panels: int, n_columns: int, title: str, path: Path, *, shares_x: bool = True
) -> Iterator[list[Axes]]:
    """Yield so many panels; then write the picture, with one legend for all."""
    from matplotlib.figure import Figure

    n_rows = -(-n_panels // n_columns)
    figure = Figure(figsize=(11, 3.2 * n_rows + 0.9), dpi=130, layout="constrained")
    grid = list(figure.subplots(n_rows, n_columns, squeeze=False, sharex=shares_x).flat)
    yield grid[:n_panels]
    for axes in grid[n_panels:]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in grid:
        found, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    figure.legend(
        list(handles.values()),
        list(handles),
        handlelength=3,
        loc="outside lower center",
        ncols=7,
        frameon=False,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    tidy(axes)


def _draw_workload(axes: Axes, workload: str, cells: Sequence[CellSummary]) -> None:
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        own = [c for c in cells if c.strategy == strategy and c.seconds_ratio]
        if not own or is_off_the_scale(own):
            continue
        is_mine = strategy == "mimose"
        colour = COLOURS[strategy]
        shares = [cell.budget_share for cell in own]
        ratios = [cell.seconds_ratio or 0.0 for cell in own]
        axes.plot(
            shares,
            ratios,
            color=colour,
            linewidth=2.6 if is_mine else 1.1,
            linestyle="--" if strategy in _PEERS else "-",
            zorder=3 if is_mine else 2,
            label=marked(strategy),
        )
        for cell, ratio in zip(own, ratios, strict=True):
            axes.plot(
                cell.budget_share,
                ratio,
                color=colour,
                marker="o" if cell.keeps_budget else "x",
                markersize=6 if is_mine else 4,
                zorder=4 if is_mine else 2,
            )
    _finish(axes, workload)
