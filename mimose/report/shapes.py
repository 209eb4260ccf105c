"""The shapes of steps: the sizes of the batch that vary, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mimose.records import StepRecord

Shape: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes that vary within the run, by name."""


def split_runs(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Split records into runs: a new run begins when a step number repeats.

    Steps of one run may be out of order, because they are written when they end.
    """
    runs: list[list[StepRecord]] = []
    seen: set[int] = set()
    for record in records:
        if not runs or record.step in seen:
            runs.append([])
            seen.clear()
        seen.add(record.step)
        runs[-1].append(record)
    return runs


def shapes_of(run: Sequence[StepRecord]) -> list[Shape]:
    """Return each step's sizes that vary during the run; all sizes if none varies.

    The first record of a signature has all sizes, the later ones those that had varied
    until then; the others are as before. If the first record is not kept, some sizes
    are unknown.

    Args:
        run: The records of one run.
    """
    values: dict[str, set[int]] = {}
    for record in run:
        for name, size in record.shape.items():
            values.setdefault(name, set()).add(size)
    shown = [name for name, sizes in values.items() if len(sizes) > 1] or [*values]
    shapes: list[Shape] = []
    known: dict[str, int] = {}
    for record in run:
        if known.keys().isdisjoint(record.shape):  # another signature
            known = {}
        known |= record.shape
        shapes.append(tuple((name, known[name]) for name in shown if name in known))
    return shapes


def shape_text(shape: Shape) -> str:
    """Return a shape as text."""
    return ", ".join(f"{name}={size}" for name, size in shape) or "(no sizes)"


def sizes_text(shape: Shape) -> str:
    """Return the sizes of a shape as text, without their names."""
    return " × ".join(str(size) for _, size in shape) or "–"


def n_elements(shape: Shape) -> int:
    """Return the size of a batch: the number of its elements, from sizes that vary.

    >>> n_elements((("ids.0", 4), ("ids.1", 10), ("labels.1", 5)))
    60
    """
    batches = [size for name, size in shape if name.endswith(".0")]
    has_batch = len(batches) == 1
    in_a_row: dict[str, int] = {}
    for name, size in shape:
        if not (has_batch and name.endswith(".0")):
            argument = name.rpartition(".")[0]
            in_a_row[argument] = in_a_row.get(argument, 1) * size
    rows = batches[0] if has_batch else 1
    return rows * (sum(in_a_row.values()) if in_a_row else 1)
