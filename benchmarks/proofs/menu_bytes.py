"""The bytes of `menu`: the five ways and plain training, a budget at a time."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.proofs.common import Settings, progress
from mimose.bench.grid.runner import GridRow, GridSettings, WorkloadRun
from mimose.bench.rows import Row, RowsFile, RunSettings, read
from mimose.usage import UsageError

MENU = "mimose-menu"
"""This library, with all exact actions."""
STRATEGIES = ("oracle", MENU, "oracle-menu", "static", "static-menu")
"""What is compared."""

_SAME = ("scale", "seed", "threads", "device", "torch", "transformers", "mimose")
_Kind = TypeVar("_Kind", bound=Row)


def bytes_of(
    settings: Settings, options: argparse.Namespace, *, runs: bool
) -> list[GridRow]:
    """Return every step of every strategy, and of plain training.

    Args:
        settings: The proof's.
        options: The command line's.
        runs: Whether what is not there yet is run.

    Raises:
        UsageError: Rows that are to be kept were measured with something else.
    """
    path = settings.out / "menu.csv"
    grid = GridSettings(
        workloads=tuple(options.tasks),
        strategies=("none", *STRATEGIES),
        budgets=tuple(options.budgets),
        steps=options.steps,
        warm_up=options.warm_up,
        scale=options.scale,
        seed=settings.seed,
        threads=settings.threads,
        device=settings.device,
        date=settings.date,
    )
    is_kept = path.exists() and (options.resume or not runs)
    rows = kept(path, GridRow, grid, grid.scale) if is_kept else []
    parts = [(task, share) for task in grid.workloads for share in grid.budgets]
    left = [part for part in parts if not _is_done(rows, grid, *part)]
    if not runs or not left:
        return rows
    rows = [row for row in rows if not _is_of(row, left)]
    with contextlib.closing(RowsFile(path, GridRow)) as file:
        file.append(rows)
        for task, share in left:
            found = _run(replace(grid, budgets=(share,)), task)
            known = {row.workload for row in rows if row.strategy == "none"}
            if task in known:
                found = [row for row in found if row.strategy != "none"]
            file.append(found)
            rows += found
            progress(f"menu: bytes of {task} at {share:g}: done")
    return rows


def _run(grid: GridSettings, task: str) -> list[GridRow]:
    run = WorkloadRun(grid, task)
    run.run()
    return run.rows


def kept(
    path: Path, kind: type[_Kind], settings: RunSettings, scale: str
) -> list[_Kind]:
    """Read the rows of an earlier run like this one.

    Raises:
        UsageError: They were measured with something else.
    """
    rows = read(path, kind)
    now = {**settings.provenance(), "scale": scale}
    for row in rows:
        for name in _SAME:
            if getattr(row, name) != now[name]:
                msg = (
                    f"{path} has {name} {getattr(row, name)!r}, and this run has "
                    f"{now[name]!r}: choose another --out, or leave --resume out"
                )
                raise UsageError(msg)
    return rows


def _is_of(row: GridRow, parts: Sequence[tuple[str, float]]) -> bool:
    """Whether a row is of one of the tasks and budgets."""
    return (row.workload, row.budget_share) in parts


def _is_done(
    rows: Sequence[GridRow], grid: GridSettings, task: str, share: float
) -> bool:
    """Whether a task's rows at a budget, and plain training's, are all there."""
    own = [
        row
        for row in rows
        if row.workload == task and row.budget_share in (None, share)
    ]
    return replace(grid, budgets=(share,)).is_complete(own)
