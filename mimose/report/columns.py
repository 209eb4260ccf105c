"""Text for a terminal of any width: wrapped lines and tables.

A table that is too wide gets fewer columns. If that is not enough, each row becomes a
paragraph.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_UNKNOWN = 100
"""The width if it is not known: in a file, a pipe or a log."""


def terminal_width() -> int:
    """Return the width of the terminal in characters."""
    return max(60, shutil.get_terminal_size((_UNKNOWN, 24)).columns)


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
    """Return names with their texts, in two columns.

    Args:
        rows: Names and texts.
        width: Characters in a line.
    """
    aside = max((len(name) for name, _ in rows), default=0) + 1
    lines: list[str] = []
    for name, text in rows:
        first = f"  {name.ljust(aside)} "
        lines += wrapped(text, width, first=first, rest=" " * len(first))
    return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table: the first column aligned to the left, the others to the right.

    Args:
        rows: The rows; the first has the names of the columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = map(str.rjust, others, widths[1:])
        lines.append("  ".join(["", first.ljust(widths[0]), *cells]))
    return lines
