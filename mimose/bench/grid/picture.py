"""A grid as one picture: time against budget, for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.grid.page import COLOURS, HIDDEN, OTHER_COLOUR
from mimose.bench.grid.summary import CellSummary

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLUMNS = 2
_DASHES = {"hf-full": "--", "hf-every-2": ":", "selective": "-."}


def draw(summaries: Sequence[CellSummary], path: Path) -> None:
    """Draw the picture.

    Args:
        summaries: Of a grid.
        path: Where to write; its suffix chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(summary.workload for summary in summaries))
    n_rows = -(-len(workloads) // _COLUMNS)
    figure = Figure(figsize=(11, 3.2 * n_rows + 0.9), dpi=130, layout="constrained")
    grid = figure.subplots(n_rows, _COLUMNS, squeeze=False, sharex=True)
    for axes, workload in zip(grid.flat, workloads, strict=False):
        _draw_workload(axes, workload, [s for s in summaries if s.workload == workload])
    for axes in list(grid.flat)[len(workloads) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in grid.flat:
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
    figure.suptitle(
        "Time of a step, plain training being 1, at budgets between everything "
        "recomputed (0) and kept (1)\nCrosses broke the budget",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_workload(axes: Axes, workload: str, cells: Sequence[CellSummary]) -> None:
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        own = [c for c in cells if c.strategy == strategy and c.steps]
        if not own or strategy in HIDDEN:
            continue
        is_mine = strategy == "mimose"
        colour = COLOURS.get(strategy, OTHER_COLOUR)
        shares = [cell.budget_share for cell in own]
        ratios = [cell.seconds_ratio or 0.0 for cell in own]
        axes.plot(
            shares,
            ratios,
            color=colour,
            linewidth=2.6 if is_mine else 1.1,
            linestyle=_DASHES.get(strategy, "-"),
            zorder=3 if is_mine else 2,
            label=strategy,
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
    axes.set_title(workload, loc="left", fontsize=10, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
