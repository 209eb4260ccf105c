"""A map as SVG: rows by columns, each cell in the colour of what it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from mimose.report.page.marks import label
from mimose.report.page.svg import WIDTH, legend, picture

_LEFT = 250
_TOP = 10
_BOTTOM = 64
_RIGHT = 20
_LETTER = 7.0
"""About as wide as a letter, in pixels."""
_LEAST_LABELLED = 12
"""Rows lower than this have a label now and then."""
_MOST_TITLED = 1500
"""More cells than these say nothing under the mouse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """What fills the cells; "" for a blank one."""

    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    """By row, then by column."""
    colours: Mapping[str, str]
    words: Mapping[str, str]
    """What each kind of cell means, for the legend."""
    x_title: str


def draw_map(map_: Map, title: str) -> str:
    """Draw a map, and its legend above.

    Args:
        map_: What is drawn.
        title: What the picture is.
    """
    n_rows, n_columns = len(map_.rows), len(map_.columns)
    each = min(26.0, max(3.0, 480 / n_rows))
    height = _TOP + each * n_rows + _BOTTOM
    width = min(90.0, (WIDTH - _LEFT - _RIGHT) / n_columns)
    parts = [*_cells(map_, width, each), *_row_labels(map_, each)]
    bottom = _TOP + each * n_rows
    longest = _LETTER * (2 + max(map(len, map_.columns)))
    every = -(-n_columns // max(1, int(width * n_columns / longest)))
    for i in range(0, n_columns, every):
        middle = _LEFT + width * (i + 0.5)
        parts.append(label(map_.columns[i], middle, bottom + 18, anchor="middle"))
    parts.append(label(map_.x_title, _LEFT, bottom + 44))
    keys = [
        (words, f'<path d="M2 2h12v12h-12z" fill="{map_.colours[kind]}"/>')
        for kind, words in map_.words.items()
    ]
    return "\n".join([legend(keys), picture(parts, height, title)])


def _cells(map_: Map, width: float, each: float) -> Iterator[str]:
    """Yield each kind's cells; neighbours in a row that are alike are one."""
    runs: dict[str, list[tuple[int, int, int]]] = {}
    for row, cells in enumerate(map_.cells):
        for kind, group in groupby(range(len(cells)), key=cells.__getitem__):
            columns = list(group)
            if kind:
                runs.setdefault(kind, []).append((row, columns[0], columns[-1]))
    is_titled = sum(map(len, runs.values())) <= _MOST_TITLED
    gap = 1.0 if width > 6 and each > 6 else 0.0
    for kind, words in map_.words.items():
        yield f'<g data-key="{escape(words)}" fill="{map_.colours[kind]}">'
        paths = []
        for row, first, last in runs.get(kind, ()):
            x, y = _LEFT + width * first, _TOP + each * row
            across = width * (last - first + 1) - gap
            path = f"M{x:.1f} {y:.1f}h{across:.1f}v{each - gap:.1f}h-{across:.1f}z"
            if not is_titled:
                paths.append(path)
                continue
            at = map_.columns[first]
            if last > first:
                at += f" … {map_.columns[last]}"
            told = escape(f"{map_.rows[row]}\n{at}\n{words}", quote=False)
            yield f'<path d="{path}"><title>{told}</title></path>'
        if paths:
            yield f'<path d="{"".join(paths)}"/>'
        yield "</g>"


def _row_labels(map_: Map, each: float) -> Iterator[str]:
    every = max(1, round(_LEAST_LABELLED / each + 0.49))
    for i in range(0, len(map_.rows), every):
        y = _TOP + each * (i + 0.5) + 4
        yield label(map_.rows[i], _LEFT - 8, y, anchor="end")
