"""The proof of finer actions as a picture, drawn from its rows alone.

``python -m benchmarks.proofs.menu_picture BYTES.csv TIMES.csv PICTURE.png``
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.proofs.menu import extra_times
from benchmarks.proofs.menu_times import MenuTimeRow
from mimose.bench.grid.runner import GridRow
from mimose.bench.pictures import BLUE, GREY, ORANGE, measured_on, save, tidy, title
from mimose.bench.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = (
    ("static", "one plan for the longest batch, whole layers", GREY, ""),
    ("static-menu", "one plan for the longest batch, all actions", GREY, "//"),
    ("oracle", "the best of whole layers, told everything", ORANGE, ""),
    ("mimose-menu", "mimose, all actions", BLUE, ""),
    ("oracle-menu", "the best of all actions, told everything", BLUE, "//"),
)
"""Strategies, in words, and how they are drawn."""
_WIDTH = 0.16


def draw(bytes_path: Path, times_path: Path, picture_path: Path) -> None:
    """Draw the mean extra time of each strategy at each budget.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
        ValueError: There are no rows.
    """
    from matplotlib.figure import Figure

    timed = read(times_path, MenuTimeRow)
    found = extra_times(read(bytes_path, GridRow), timed)
    if not any(found.values()):
        msg = f"{bytes_path} and {times_path} have nothing to draw: run the proof first"
        raise ValueError(msg)
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    _draw_bars(figure.add_subplot(), found)
    headline = "Extra time over plain training at the same budget"
    title(figure, headline, measured_on(timed[0]))
    save(figure, picture_path)


def _draw_bars(axes: Axes, found: dict[float, dict[str, float]]) -> None:
    budgets = sorted(found)
    for number, (name, words, colour, hatch) in enumerate(_BARS):
        places = [i + (number - 2) * _WIDTH for i in range(len(budgets))]
        shares = [100 * found[budget].get(name, math.nan) for budget in budgets]
        bars = axes.bar(places, shares, _WIDTH, label=words, color=colour)
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white")
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.set_xticks(range(len(budgets)), [f"{budget:g}" for budget in budgets])
    axes.set_xlabel("budget: share of the way from everything recomputed to kept")
    axes.set_ylabel("extra time (%), mean of tasks")
    axes.legend(fontsize=9, frameon=False)
    tidy(axes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what three paths name; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proofs.menu_picture",
        description="Draw the rows of the proof menu.",
    )
    parser.add_argument("rows", type=Path, help="the proof's CSV file")
    parser.add_argument("times", type=Path, help="that of its times")
    parser.add_argument("picture", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    draw(options.rows, options.times, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
