"""``mimose bench``: run the grid, keep its rows, and show what they say."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mimose.bench.grid.picture import draw_grid
from mimose.bench.grid.runner import GridRow, GridSettings, measure, sizes_of
from mimose.bench.grid.summary import publish, show, summarise
from mimose.bench.machine import describe_machine
from mimose.bench.rows import RowsFile, read, write

_INTERRUPTED = 130
_SAME = ("seed", "threads", "scale", "dtype")
"""Settings that have to be the same in a run that is resumed."""


def prepare(settings: GridSettings, out: Path, *, resume: bool) -> list[GridRow]:
    """Begin the file of rows, and put those there that will not be kept aside.

    Args:
        settings: What to compare.
        out: The folder for the files.
        resume: Whether workloads whose rows are there already are left out.

    Returns:
        The rows of those.

    Raises:
        ValueError: The rows that are there are of another run, or cannot be read.
        OSError: The folder cannot be written.
    """
    path = out / "rows.csv"
    there = _resumed(path, settings) if resume and path.exists() else []
    left = _left(settings, there)
    rows = [row for row in there if row.workload not in left]
    out.mkdir(parents=True, exist_ok=True)
    if path.exists() and len(path.read_text("utf-8").splitlines()) > 1 + len(rows):
        names = (f"rows.previous{i or ''}.csv" for i in itertools.count())
        path.replace(next(out / name for name in names if not (out / name).exists()))
    write(path, GridRow, rows)
    return rows


def bench(settings: GridSettings, out: Path, rows: Sequence[GridRow]) -> int:
    """Run the grid; write ``rows.csv``, ``bench.png`` and ``summary.json``.

    Args:
        settings: What to compare.
        out: The folder for the files.
        rows: What `prepare` returned.

    Returns:
        The exit status: 0; 1 where a workload could not be run; 130 after Ctrl-C.
    """
    rows = list(rows)
    path = out / "rows.csv"
    file = RowsFile(path, GridRow, goes_on=True)

    def keep(found: list[GridRow]) -> None:
        file.append(found)
        rows.extend(found)

    try:
        status = measure(settings, _left(settings, rows), keep, "bench")
    finally:
        file.close()
    if status == _INTERRUPTED:
        sys.stderr.write(
            "mimose bench: interrupted: rows are kept, and --resume runs anew what "
            "was not done\n"
        )
    if rows:
        _present(rows, path, out)
    return status


def show_again(path: Path, out: Path) -> int:
    """Show the rows of a run that is over.

    Args:
        path: The rows.
        out: The folder for the picture and the summary.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The rows cannot be read, or there are none.
        OSError: A file cannot be read, or the folder not be written.
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


def _left(settings: GridSettings, rows: Sequence[GridRow]) -> list[str]:
    """Return the workloads that are still to run."""
    return [
        name
        for name in settings.workloads
        if not settings.is_complete([row for row in rows if row.workload == name])
    ]


def _resumed(path: Path, settings: GridSettings) -> list[GridRow]:
    """Return the rows that are there, if they are of a run like this one."""
    rows = read(path, GridRow)
    wanted: dict[str, Any] = {
        **{name: getattr(settings, name) for name in _SAME},
        **describe_machine(settings.device),
    }
    for row in rows:
        for name, value in wanted.items():
            if getattr(row, name) != value:
                msg = (
                    f"{path} was written with {name}={getattr(row, name)!r}, and this "
                    f"run has {value!r}: choose another --out, or leave --resume out"
                )
                raise ValueError(msg)
        known = sizes_of(settings, row.workload)
        if row.step >= 0 and row.step < len(known) and row.shape != known[row.step]:
            msg = f"{path} has other lengths than this run: choose another --out"
            raise ValueError(msg)
    return rows
