"""The proof of fragmentation as a picture, drawn from its rows alone.

``python -m mimose.bench.proofs.fragmentation_picture ROWS.csv PICTURE.png``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.pictures import (
    BLUE,
    ORANGE,
    draw_budget,
    measured_on,
    save,
    tidy,
    title,
)
from mimose.bench.proofs.fragmentation import FragmentationRow
from mimose.bench.proofs.numbers import MIB
from mimose.bench.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(csv_path: Path, picture_path: Path) -> None:
    """Draw reserved and requested bytes, and below them the ratio, against the steps.

    Raises:
        ModuleNotFoundError: matplotlib is missing (``pip install 'mimose[bench]'``).
        ValueError: There are no rows.
    """
    from matplotlib.figure import Figure

    lines = read(csv_path, FragmentationRow)
    if not lines:
        msg = f"{csv_path} has no rows to draw: run the proof first"
        raise ValueError(msg)
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(2.2, 1))
    upper = figure.add_subplot(grid[0])
    _draw_bytes(upper, lines)
    _draw_ratio(figure.add_subplot(grid[1], sharex=upper), lines)
    title(figure, _headline(lines), measured_on(lines[0]))
    save(figure, picture_path)


def _draw_bytes(axes: Axes, lines: Sequence[FragmentationRow]) -> None:
    steps = [line.step for line in lines]
    for name, words, colour in (
        ("reserved_peak_bytes", "reserved: what the budget is about", BLUE),
        ("requested_peak_bytes", "requested: what plans are made for", ORANGE),
    ):
        peaks = [getattr(line, name) / MIB for line in lines]
        axes.scatter(steps, peaks, s=5, color=colour, linewidths=0, label=words)
    limit = lines[0].budget_bytes / MIB
    draw_budget(axes, steps, limit)
    axes.set_ylabel("highest in the step (MiB)")
    axes.set_ylim(bottom=0, top=1.25 * limit)
    axes.legend(loc="upper right", fontsize=9, markerscale=3, ncols=2, frameon=False)
    tidy(axes)


def _draw_ratio(axes: Axes, lines: Sequence[FragmentationRow]) -> None:
    ratios = [line.fragmentation for line in lines]
    axes.plot([line.step for line in lines], ratios, color=BLUE, linewidth=1.5)
    axes.set(xlabel="step", ylabel="learned ratio:\nreserved ÷ requested")
    axes.set_ylim(bottom=1.0)
    tidy(axes)


def _headline(lines: Sequence[FragmentationRow]) -> str:
    over = sum(line.is_over for line in lines)
    kept = "all" if not over else f"{len(lines) - over} of"
    segments = " (expandable segments)" if lines[0].is_expandable else ""
    return f"Lengths that jump: {kept} {len(lines)} steps within the budget{segments}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what two paths name; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m mimose.bench.proofs.fragmentation_picture",
        description="Draw the rows of the proof fragmentation.",
    )
    parser.add_argument("rows", type=Path, help="the proof's CSV file")
    parser.add_argument("picture", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    draw(options.rows, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
