"""``mimose bench``: run the grid, write its rows, and show the results."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from mimose.bench.grid.picture import draw_grid
from mimose.bench.grid.runner import GridRow, GridSettings, measure
from mimose.bench.grid.summary import publish, show, summarise
from mimose.bench.rows import RowsFile, read

_INTERRUPTED = 130


def put_aside(out: Path) -> None:
    """Rename the file of rows of an earlier run, if there is one.

    Args:
        out: The folder for the files; it is made.

    Raises:
        OSError: The folder cannot be written.
    """
    path = out / "rows.csv"
    out.mkdir(parents=True, exist_ok=True)
    if path.exists():
        names = (f"rows.previous{i or ''}.csv" for i in itertools.count())
        path.replace(next(out / name for name in names if not (out / name).exists()))


def bench(settings: GridSettings, out: Path) -> int:
    """Run the grid; write ``rows.csv``, ``bench.png`` and ``summary.json``.

    Args:
        settings: What to compare.
        out: The folder for the files.

    Returns:
        The exit status: 0; 1 if a workload could not run; 130 after Ctrl-C.
    """
    rows: list[GridRow] = []
    path = out / "rows.csv"
    file = RowsFile(path, GridRow)

    def keep(found: list[GridRow]) -> None:
        file.append(found)
        rows.extend(found)

    try:
        status = measure(settings, keep, "bench")
    finally:
        file.close()
    if status == _INTERRUPTED:
        sys.stderr.write("mimose bench: interrupted; its rows are kept\n")
    if rows:
        _present(rows, path, out)
    return status


def show_again(path: Path, out: Path) -> int:
    """Show the rows of an earlier run.

    Args:
        path: The rows.
        out: The folder for the picture and the summary.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The rows cannot be read, or there are none.
        OSError: A file cannot be read or written.
    """
    rows = read(path, GridRow)
    if not rows:
        msg = f"{path} has no rows"
        raise ValueError(msg)
    out.mkdir(parents=True, exist_ok=True)
    _present(rows, path, out)
    return 0


def _present(rows: Sequence[GridRow], path: Path, out: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)
    summaries = summarise(rows)
    show(summaries, console)
    files = {"rows": path, "summary": out / "summary.json"}
    if any(summary.steps for summary in summaries):
        files["picture"] = out / "bench.png"
        draw_grid(summaries, files["picture"])
    cells = [{**asdict(each), "keeps_budget": each.keeps_budget} for each in summaries]
    publish({"cells": cells}, files, console)
