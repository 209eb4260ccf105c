"""Text for a terminal of any width: wrapped lines and tables.

A table that is too wide gets fewer columns. If that is not enough, each row becomes a
paragraph.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

_UNKNOWN = 100
"""The width if it is not known: in a file, a pipe or a log."""
_LEAST = 20
_WIDE = 60
"""From this width on, names have their own column."""
_INDENT = "  "


def terminal_width() -> int:
    """Return the width of the terminal in characters."""
    return max(_LEAST, shutil.get_terminal_size((_UNKNOWN, 24)).columns)


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Wrap a text between words.

    Args:
        text: The text.
        width: Characters in a line.
        first: Indent of the first line.
        rest: Indent of the other lines.
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
    """Return names with their texts, in two columns if the terminal is wide enough.

    Args:
        rows: Names and texts.
        width: Characters in a line.
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
    """Return a table: the first column aligned to the left, the others to the right.

    Args:
        rows: The rows; the first has the names of the columns.
        width: Characters in a line.
        fewer: Choices of columns if not all fit. The first choice that fits is used.
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
