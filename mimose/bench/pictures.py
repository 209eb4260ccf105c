"""What pictures of results share: how a budget is drawn, and a figure framed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette: told apart with any colour vision, and in grey.
BLUE, ORANGE, LIMIT = "#0072B2", "#E69F00", "#D55E00"
GREY = "#999999"


def tidy(axes: Axes) -> None:
    """Take away the upper and the right side of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def draw_budget(axes: Axes, places: Sequence[float], budget_mib: float) -> None:
    """Draw a budget as a line over some places, and write how much it is."""
    ends = min(places), max(places)
    axes.plot(ends, [budget_mib] * 2, color=LIMIT, linewidth=1.5, linestyle="--")
    words = f"budget {budget_mib:.0f} MiB"
    axes.text(ends[0], budget_mib, words, color=LIMIT, va="bottom", weight="bold")


def measured_on(row: Row) -> str:
    """Say where and with what a row was measured."""
    return f"{row.device}, torch {row.torch}, seed {row.seed}, {row.date[:10]}"


def title(figure: Figure, headline: str, footnote: str) -> None:
    """Write a headline above a figure, and a footnote below."""
    figure.suptitle(headline, x=0.01, ha="left", fontsize=13, weight="bold")
    figure.supxlabel(footnote, x=0.01, ha="left", fontsize=8, color="#555555")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; its folder is made, and its suffix chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
