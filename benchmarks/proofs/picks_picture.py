"""The map of what plans pick as a picture, drawn from its rows alone.

``python -m benchmarks.proofs.picks_picture ROWS.csv PICTURE.png``
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.proofs.picks import PLANNED, PickRow
from benchmarks.proofs.picks_menus import MENUS
from benchmarks.shares import draw_shares
from mimose.bench.grid.strategies import ALL
from mimose.bench.pictures import measured_on, save, tidy, title
from mimose.bench.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORDS = {
    "fine": "exact, on the device",
    "exact": "exact, the host's too",
    "all": "all, lossy ones too",
}
_GAP = ""
"""The place between two shapes' bars."""


def draw(rows_path: Path, picture_path: Path) -> None:
    """Draw the shares of actions: workloads down, menus across, shapes by budgets.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
        ValueError: There is nothing planned among the rows.
    """
    from matplotlib.figure import Figure

    rows = [row for row in read(rows_path, PickRow) if row.part == PLANNED]
    if not rows:
        msg = f"{rows_path} has no plans: run the proof picks first"
        raise ValueError(msg)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    figure = Figure(
        figsize=(12, 2.6 * len(workloads) + 1.6), dpi=150, layout="constrained"
    )
    grid = figure.subplots(len(workloads), len(MENUS), squeeze=False, sharey=True)
    for line, workload in zip(grid, workloads, strict=True):
        for axes, menu in zip(line, MENUS, strict=True):
            own = [row for row in rows if (row.workload, row.menu) == (workload, menu)]
            _draw_cell(axes, own)
            axes.set_title(f"{workload}: {_WORDS[menu]}", loc="left", fontsize=10)
        line[0].set_ylabel("calls of layers (%)")
    handles = {
        name: handle
        for axes in grid.flat
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in ALL if name in handles]
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside right upper",
        frameon=False,
    )
    headline = "Which action layers run under, by batch and budget"
    where = f"{rows[0].scale} models, {measured_on(rows[0])}"
    title(figure, headline, f"{_below(rows)}; {where}")
    save(figure, picture_path)


def _below(rows: Sequence[PickRow]) -> str:
    shares = sorted({row.budget_share for row in rows})
    return (
        f"Of each batch bars from left to right are budgets, {shares[0]:g} to "
        f"{shares[-1]:g} of the way from all recomputed to all kept"
    )


def _draw_cell(axes: Axes, rows: Sequence[PickRow]) -> None:
    """Draw a menu's plans: the shapes side by side, in each the budgets."""
    shapes = list(dict.fromkeys(row.sizes for row in rows))
    places: list[str] = []
    shares: list[dict[str, float]] = []
    middles = []
    for sizes in shapes:
        own = sorted(
            (row for row in rows if row.sizes == sizes),
            key=lambda row: row.budget_share,
        )
        middles.append(len(places) + math.floor(len(own) / 2))
        places += [*(f"{row.budget_share:g}" for row in own), _GAP]
        shares += [*(row.shares for row in own), {}]
    draw_shares(axes, places, shares, ALL)
    names, sizes_told = zip(*map(_grows, shapes), strict=True)
    axes.set_xticks(middles, sizes_told, fontsize=8)
    axes.set_xlabel(names[0], fontsize=8)
    axes.tick_params(axis="x", length=0)
    tidy(axes)


def _grows(sizes: str) -> tuple[str, str]:
    """Return the name and the number of what grows from batch to batch."""
    name, size = list(json.loads(sizes).items())[-1]
    return name, str(size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what two paths name; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proofs.picks_picture",
        description="Draw the rows of the proof picks.",
    )
    parser.add_argument("rows", type=Path, help="the proof's CSV file")
    parser.add_argument("picture", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    draw(options.rows, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
