"""Bars as SVG: groups of them side by side, each bar with its name and number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mimose.report.page.marks import label
from mimose.report.page.svg import WIDTH, picture

_NAMES = 110
_TEXTS = 150
_EACH = 34
_TOP = 34


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar."""

    name: str
    value: float
    text: str
    """Stands behind it."""
    colour: str


def draw_bars(groups: Sequence[tuple[str, Sequence[Bar]]], title: str) -> str:
    """Draw groups of bars from left to right.

    Args:
        groups: The title of each, and its bars from the top.
        title: What the picture is.
    """
    width = WIDTH / len(groups)
    parts: list[str] = []
    for number, (name, bars) in enumerate(groups):
        parts.append(label(name, number * width + _NAMES, 16, colour="#555555"))
        parts += _bars(bars, number * width, width)
    height = _TOP + _EACH * max(len(bars) for _, bars in groups)
    return picture(parts, height, title)


def _bars(bars: Sequence[Bar], left: float, width: float) -> Iterator[str]:
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    for row, bar in enumerate(bars):
        y = _TOP + _EACH * row
        across = (width - _NAMES - _TEXTS) * bar.value / longest
        start = left + _NAMES
        yield label(bar.name, start - 8, y + 15, anchor="end")
        yield (
            f'<path d="M{start:.1f} {y}h{max(1.0, across):.1f}v20H{start:.1f}z" '
            f'fill="{bar.colour}"/>'
        )
        yield label(bar.text, start + across + 8, y + 15)
