"""``mimose bench``: run the grid, keep its rows, and show what they say."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version as _version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from mimose.bench.csv_file import RowsFile, read
from mimose.bench.grid.page import write_page
from mimose.bench.grid.picture import draw_all
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.runner import (
    Cell,
    GridSettings,
    WorkloadRun,
    is_complete,
    n_steps,
)
from mimose.bench.grid.summary import summarise
from mimose.bench.grid.table import show
from mimose.bench.process import StrategyFailedError

_INTERRUPTED = 130
_FAILED = 1
_SETTINGS = "settings.json"


def bench(settings: GridSettings, out: Path, *, resume: bool) -> int:
    """Run the grid and write ``rows.csv``, ``bench.html``, pictures and a summary.

    Args:
        settings: What to compare.
        out: The folder for the files.
        resume: Whether workloads whose rows are there already are left out.

    Returns:
        The exit status: 0; 1 where a workload could not be run; 130 after Ctrl-C.

    Raises:
        ValueError: The rows that are there are of another run, or cannot be read.
    """
    rows = _resumed(out, settings) if resume else []
    _begin(out, settings)
    file = RowsFile(out / "rows.csv", GridRow)
    left = [
        name
        for name in settings.workloads
        if not is_complete(settings, [row for row in rows if row.workload == name])
    ]
    rows = [row for row in rows if row.workload not in left]
    file.append(rows)
    status = 0
    try:
        with _progress(settings, left) as tell:
            for name in left:
                fresh, problem = _run(settings, name, tell)
                file.append(fresh)
                rows += fresh
                if problem:
                    sys.stderr.write(f"mimose bench: {name}: {problem}\n")
                    status = _FAILED
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        file.close()
    if rows:
        present(rows, out)
    return status


def present(rows: Sequence[GridRow], out: Path) -> None:
    """Show a grid's rows: tables, the page, the picture, and JSON as the last line.

    Args:
        rows: Of a grid.
        out: The folder for the files.
    """
    console = Console(soft_wrap=True, highlight=False)
    summaries = summarise(rows)
    show(summaries, console)
    files = {
        "rows": out / "rows.csv",
        "page": out / "bench.html",
        "summary": out / "summary.json",
    }
    write_page(rows, files["page"])
    files |= draw_all(summaries, out)
    document = json.dumps(
        {
            "cells": [asdict(summary) for summary in summaries],
            "files": {name: str(path) for name, path in files.items()},
        }
    )
    files["summary"].write_text(f"{document}\n", encoding="utf-8")
    for name, path in files.items():
        console.print(f"{name}: {path}", markup=False)
    sys.stdout.write(f"{document}\n")


def _run(
    settings: GridSettings, name: str, tell: Callable[[str, Cell], None]
) -> tuple[list[GridRow], str]:
    """Run one workload; return its rows, or why there are none."""
    run = WorkloadRun(settings, name, lambda cell: tell(name, cell))
    try:
        return run.run(), ""
    except StrategyFailedError as error:
        return [], str(error)


def _resumed(out: Path, settings: GridSettings) -> list[GridRow]:
    """Return the rows that are there, if they are of a run like this one."""
    path = out / "rows.csv"
    if not path.exists():
        return []
    said = out / _SETTINGS
    before = json.loads(said.read_text(encoding="utf-8")) if said.exists() else {}
    for name, value in _described(settings).items():
        if before.get(name) != value:
            msg = (
                f"{path} was written with {name}={before.get(name)!r}, and this run "
                f"has {value!r}: choose another --out, or leave --resume out"
            )
            raise ValueError(msg)
    return read(path, GridRow)


def _begin(out: Path, settings: GridSettings) -> None:
    """Say what is compared; the rows that are there are put aside."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.csv"
    if path.exists():
        path.replace(out / "rows.previous.csv")
    text = json.dumps(_described(settings), indent=1)
    (out / _SETTINGS).write_text(f"{text}\n", encoding="utf-8")


def _described(settings: GridSettings) -> dict[str, Any]:
    """Return what has to be the same in a run that is resumed."""
    values = {
        **asdict(settings),
        "mimose": _version("mimose"),
        "torch": _version("torch"),
    }
    del values["workloads"], values["date"]
    described: dict[str, Any] = json.loads(json.dumps(values))
    return described


@contextlib.contextmanager
def _progress(
    settings: GridSettings, workloads: Sequence[str]
) -> Iterator[Callable[[str, Cell], None]]:
    """Show which step is running, and about how long the rest takes."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = progress.add_task("starting", total=len(workloads) * n_steps(settings))

    def tell(workload: str, cell: Cell) -> None:
        share = "" if cell.share is None else f" at {cell.share:g}"
        description = f"{workload}: {cell.strategy}{share}"
        progress.update(task, advance=1, description=description)

    with progress:
        yield tell
