"""The shapes of steps: the sizes of the batch that vary, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

from mimose.records import StepRecord

Shape: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes that vary within the run, by name."""
_Names: TypeAlias = tuple[str, ...]


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
    until then; the others are as in the first. If the first record is not kept, some
    sizes are unknown.

    Args:
        run: The records of one run.
    """
    kinds = _kinds(run)
    firsts: dict[_Names, Mapping[str, int]] = {}
    varying: dict[_Names, set[str]] = {}
    for record in run:
        kind = kinds[tuple(record.shape)]
        first = firsts.setdefault(kind, record.shape).items()
        varying.setdefault(kind, set()).update(dict(record.shape.items() - first))
    shapes: list[Shape] = []
    for record in run:
        kind = kinds[tuple(record.shape)]
        sizes, shown = {**firsts[kind], **record.shape}, varying[kind] or kind
        names = dict.fromkeys((*kind, *record.shape))  # its own are never left out
        shapes.append(tuple((n, sizes[n]) for n in names if n in sizes and n in shown))
    return shapes


def _kinds(records: Sequence[StepRecord]) -> dict[_Names, _Names]:
    """Map the names of each record to the last names of the same signature.

    Of two records of a signature, the names of one contain those of the other.
    """
    kinds: dict[_Names, _Names] = {}
    for record in reversed(records):
        names = tuple(record.shape)
        if names not in kinds:
            alike = (kind for kind in kinds.values() if _is_one_in_other(kind, names))
            kinds[names] = next(alike, names)
    return kinds


def _is_one_in_other(names: _Names, others: _Names) -> bool:
    return set(names) <= set(others) or set(others) <= set(names)


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
    sizes = dict(shape)
    common, arguments = _factors(tuple(sizes))
    in_a_row = [prod(sizes[name] for name in argument) for argument in arguments]
    return prod(sizes[name] for name in common) * (sum(in_a_row) if in_a_row else 1)


def formula(names: Sequence[str]) -> str:
    """Return the formula of `n_elements` as text.

    >>> formula(("ids.0", "ids.1", "labels.1"))
    'ids.0 × (ids.1 + labels.1)'
    """
    common, arguments = _factors(names)
    in_a_row = " + ".join(" × ".join(argument) for argument in arguments)
    if common and len(arguments) > 1:
        in_a_row = f"({in_a_row})"
    return " × ".join(part for part in (*common, in_a_row) if part) or "1"


def _factors(names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Split names into the batch size, if there is only one, and others by argument."""
    batch = [name for name in names if name.endswith(".0")]
    common = batch if len(batch) == 1 else []
    arguments: dict[str, list[str]] = {}
    for name in names:
        if name not in common:
            arguments.setdefault(name.rpartition(".")[0], []).append(name)
    return common, list(arguments.values())
