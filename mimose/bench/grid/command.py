"""``mimose bench``: run the grid, keep its rows, and show what they say."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mimose.bench.child import RunFailedError
from mimose.bench.grid.page import write_page
from mimose.bench.grid.picture import draw_all
from mimose.bench.grid.progress import progress
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.runner import WorkloadRun
from mimose.bench.grid.settings import GridSettings
from mimose.bench.grid.summary import rank, summarise
from mimose.bench.grid.table import publish, rankings, show
from mimose.bench.machine import describe_machine
from mimose.bench.rows import RowsFile, read, write
from mimose.exceptions import first_line

_INTERRUPTED = 130
_FAILED = 1
_SETTINGS = "settings.json"


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
    there = _resumed(path, settings) if resume else []
    left = _left(settings, there)
    rows = [row for row in there if row.workload not in left]
    out.mkdir(parents=True, exist_ok=True)
    if path.exists() and _n_lines(path) > 1 + len(rows):
        path.replace(_free_name(path))
    text = json.dumps(_described(settings), indent=1)
    (out / _SETTINGS).write_text(f"{text}\n", encoding="utf-8")
    write(path, GridRow, rows)
    return rows


def bench(settings: GridSettings, out: Path, rows: Sequence[GridRow]) -> int:
    """Run the grid and write ``rows.csv``, ``bench.html``, pictures and a summary.

    Returns:
        The exit status: 0; 1 where a workload could not be run; 130 after Ctrl-C.
    """
    rows = list(rows)
    left = _left(settings, rows)
    path = out / "rows.csv"
    status = 0
    file = RowsFile(path, GridRow, goes_on=True)
    try:
        with progress(len(left) * settings.n_steps) as tell:
            for name in left:
                run = WorkloadRun(settings, name, functools.partial(tell, name))
                try:
                    run.run()
                except RunFailedError as error:
                    sys.stderr.write(f"mimose bench: {name}: {first_line(error)}\n")
                    status = _FAILED
                except KeyboardInterrupt:
                    sys.stderr.write(
                        f"mimose bench: {name} was interrupted: its rows are kept, "
                        f"and --resume runs it anew\n"
                    )
                    status = _INTERRUPTED
                    break
                finally:
                    file.append(run.rows)
                    rows += run.rows
    except KeyboardInterrupt:  # between two of them
        status = _INTERRUPTED
    finally:
        file.close()
    if rows:
        present(rows, path, out)
    return status


def show_again(path: Path, out: Path, against: Path | None) -> int:
    """Show the rows of a run that is over; with another run's, compare the rankings.

    Args:
        path: The rows.
        out: The folder for the page and the pictures.
        against: Rows of another run of the same grid.

    Returns:
        The exit status: 0; 1 where the two runs rank strategies differently, or no two
        strategies can be ranked.

    Raises:
        ValueError: The rows cannot be read, or there are none.
        OSError: A file cannot be read, or the folder not be written.
    """
    rows, others = (
        [] if file is None else read(file, GridRow) for file in (path, against)
    )
    if not rows:
        msg = f"{path} has no rows"
        raise ValueError(msg)
    out.mkdir(parents=True, exist_ok=True)
    present(rows, path, out)
    if against is None:
        return 0
    found = rank(summarise(rows), summarise(others))
    sys.stderr.write(f"{rankings(found)}\n")
    return _FAILED if found.swapped or not found.pairs else 0


def present(rows: Sequence[GridRow], path: Path, out: Path) -> None:
    """Show a grid's rows: tables, the page, the picture, and JSON as the last line."""
    console = Console(soft_wrap=True, highlight=False)
    summaries = summarise(rows)
    show(summaries, console)
    files = {"rows": path, "page": out / "bench.html", "summary": out / "summary.json"}
    write_page(rows, files["page"])
    files |= draw_all(summaries, out)
    cells = [{**asdict(each), "keeps_budget": each.keeps_budget} for each in summaries]
    publish({"cells": cells}, files, console)


def _left(settings: GridSettings, rows: Sequence[GridRow]) -> list[str]:
    """Return the workloads that are still to run."""
    return [
        name
        for name in settings.workloads
        if not settings.is_complete([row for row in rows if row.workload == name])
    ]


def _n_lines(path: Path) -> int:
    with path.open(encoding="utf-8") as file:
        return sum(1 for _ in file)


def _free_name(path: Path) -> Path:
    """Return a name beside a file's that nothing has yet."""
    names = (path.with_name(f"rows.previous{i or ''}.csv") for i in itertools.count())
    return next(name for name in names if not name.exists())


def _resumed(path: Path, settings: GridSettings) -> list[GridRow]:
    """Return the rows that are there, if they are of a run like this one."""
    if not path.exists():
        return []
    said = path.with_name(_SETTINGS)
    before = json.loads(said.read_text(encoding="utf-8")) if said.exists() else {}
    for name, value in _described(settings).items():
        if before.get(name) != value:
            msg = (
                f"{path} was written with {name}={before.get(name)!r}, and this run "
                f"has {value!r}: choose another --out, or leave --resume out"
            )
            raise ValueError(msg)
    return read(path, GridRow)


def _described(settings: GridSettings) -> dict[str, Any]:
    """Return what has to be the same in a run that is resumed."""
    values = {**asdict(settings), "machine": dict(describe_machine(settings.device))}
    del values["workloads"], values["limited"], values["date"]
    described: dict[str, Any] = json.loads(json.dumps(values))
    return described
