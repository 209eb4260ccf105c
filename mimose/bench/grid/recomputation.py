"""FLOPs of steps whose strategy does not tell them, counted with the clock off.

What a strategy recomputes are the FLOPs of a forward and backward, less those of plain
training on the same batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from mimose.bench.grid.flops import count_all
from mimose.bench.grid.rows import GridRow
from mimose.bench.grid.settings import Cell
from mimose.bench.grid.traces import Sizes

Count: TypeAlias = Callable[[Cell, int, str], int | None]
"""Takes a cell, a batch's index and a phase; counts a forward and backward."""

_Case: TypeAlias = tuple[str, str, str]
"""Of a step: its sizes, phase and plan."""

PLAIN = Cell("none", None, None)
_AT_ONCE = 2
"""Processes that count FLOPs at a time: it takes memory, and the clock is off."""


def fill_in(
    rows: Mapping[Cell, Sequence[GridRow]], sizes: Sequence[Sizes], count: Count
) -> dict[Cell, list[GridRow]]:
    """Return the rows with what was recomputed in each, where it can be told.

    Args:
        rows: Of the strategies that still run, plain training among them.
        sizes: Of the batches.
        count: Counts one.
    """
    asked = [c for c in rows if c != PLAIN and any(map(_is_unknown, rows[c]))]
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        jobs = {
            cell: pool.submit(_flops, cell, rows[cell], sizes, count)
            for cell in (asked and [PLAIN, *asked])
        }
        flops = {cell: job.result() for cell, job in jobs.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    plain = flops.pop(PLAIN, {})
    found = {cell: list(own) for cell, own in rows.items()}
    for cell, own in flops.items():
        found[cell] = [_filled(row, own, plain) for row in rows[cell]]
    found[PLAIN] = [dataclasses.replace(row, recomputed_flops=0) for row in rows[PLAIN]]
    return found


def _is_unknown(row: GridRow) -> bool:
    return row.recomputed_flops is None and not row.problem


def _filled(
    row: GridRow, own: Mapping[_Case, int | None], plain: Mapping[_Case, int | None]
) -> GridRow:
    total, base = own.get(_case(row)), plain.get((row.sizes, "", ""))
    if total is None or base is None:
        return row
    return dataclasses.replace(row, recomputed_flops=total - base)


def _flops(
    cell: Cell, rows: Sequence[GridRow], sizes: Sequence[Sizes], count: Count
) -> dict[_Case, int | None]:
    """Count a strategy's FLOPs on every size, by phase and plan."""
    cases: dict[tuple[str, str], dict[_Case, int]] = {}
    for row in filter(_is_unknown, rows):
        cases.setdefault((row.phase, row.plan), {}).setdefault(_case(row), row.step)
    found: dict[_Case, int | None] = {}
    for (phase, _), alike in cases.items():
        steps = list(alike.values())
        counted = count_all(
            [sizes[step] for step in steps],
            functools.partial(_count_place, cell, steps, phase, count),
        )
        found.update(zip(alike, counted, strict=True))
    return found


def _count_place(
    cell: Cell, steps: Sequence[int], phase: str, count: Count, place: int
) -> int | None:
    return count(cell, steps[place], phase)


def _case(row: GridRow) -> _Case:
    """Return what a step's FLOPs depend on, under one strategy."""
    return row.sizes, row.phase, row.plan
