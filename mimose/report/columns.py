"""Text for a terminal of any width: lines that wrap, tables that get narrower.

A table that does not fit is written with fewer columns, and where that does not fit
either, one row below the other.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

_UNKNOWN = 100
"""Columns where the width is not known: a file, a pipe, a log."""
_LEAST = 20
_WIDE = 60
"""From so many columns on, names stand in a separate column."""
_INDENT = "  "


def terminal_width() -> int:
    """Return how many columns the terminal has."""
    return max(_LEAST, shutil.get_terminal_size((_UNKNOWN, 24)).columns)


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Break a text between words; a longer word stays whole.

    Args:
        text: The text.
        width: Columns.
        first: Before the first line.
        rest: Before the others.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def named(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Write texts behind their names, one column each where there is room.

    Args:
        rows: Names and texts.
        width: Columns.
    """
    aside = max((len(name) for name, _ in rows), default=0) + 1
    lines: list[str] = []
    for name, text in rows:
        if width >= _WIDE:
            first = f"{_INDENT}{name.ljust(aside)} "
            lines += wrapped(text, width, first=first, rest=" " * len(first))
        else:
            both = f"{name}: {text}"
            lines += wrapped(both, width, first=_INDENT, rest=2 * _INDENT)
    return lines


def table(
    rows: Sequence[Sequence[str]], width: int, *, fewer: Sequence[Sequence[int]]
) -> list[str]:
    """Align columns: the first to the left, the rest to the right.

    Args:
        rows: The first names the columns.
        width: Columns of the terminal.
        fewer: Which columns to keep where all do not fit; the first of these that do.
    """
    for kept in (range(len(rows[0])), *fewer):
        lines = _aligned([[row[i] for i in kept] for row in rows])
        if max(map(len, lines)) <= width:
            return lines
    names, *others = rows
    return [line for row in others for line in _stacked(names, row, width)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _INDENT
        + "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _stacked(names: Sequence[str], row: Sequence[str], width: int) -> Iterator[str]:
    yield from wrapped(row[0], width, first=_INDENT, rest=_INDENT)
    cells = ", ".join(
        f"{name} {cell}" for name, cell in zip(names[1:], row[1:], strict=True)
    )
    yield from wrapped(cells, width, first=2 * _INDENT, rest=2 * _INDENT)
