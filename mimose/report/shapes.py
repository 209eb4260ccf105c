"""Each step's shape: the sizes of its batch that vary, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

from mimose.records import StepRecord

Shape: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes that vary within the run, by name."""
_Names: TypeAlias = tuple[str, ...]


def split_runs(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Part the records where a step number comes again.

    Steps of one run may be out of order: they are written as they end.
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
    """Return each step's sizes, those known to vary by the last; all if none does.

    The first record of a signature names all sizes, the others those that had
    varied by then; what was not named was as in the first. Where that one is not kept,
    a size is left out.

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
    """Map the names that records have to the last ones of the same signature.

    Records of one kind have all their names, or all but the later ones, in common.
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
    """Write a shape in full."""
    return ", ".join(f"{name}={size}" for name, size in shape) or "(no sizes)"


def sizes_text(shape: Shape) -> str:
    """Write the sizes of a shape alone, where all have the same names."""
    return " × ".join(str(size) for _, size in shape) or "–"


def n_elements(shape: Shape) -> int:
    """Return how large a batch is: its number of elements, as far as they vary.

    >>> n_elements((("ids.0", 4), ("ids.1", 10), ("labels.1", 5)))
    60
    """
    sizes = dict(shape)
    common, arguments = _factors(tuple(sizes))
    in_a_row = [prod(sizes[name] for name in argument) for argument in arguments]
    return prod(sizes[name] for name in common) * (sum(in_a_row) if in_a_row else 1)


def formula(names: Sequence[str]) -> str:
    """Write down what `n_elements` computes.

    >>> formula(("ids.0", "ids.1", "labels.1"))
    'ids.0 × (ids.1 + labels.1)'
    """
    common, arguments = _factors(names)
    in_a_row = " + ".join(" × ".join(argument) for argument in arguments)
    if common and len(arguments) > 1:
        in_a_row = f"({in_a_row})"
    return " × ".join(part for part in (*common, in_a_row) if part) or "1"


def _factors(names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Part names into the batch's, if one alone is, and the others by argument."""
    batch = [name for name in names if name.endswith(".0")]
    common = batch if len(batch) == 1 else []
    arguments: dict[str, list[str]] = {}
    for name in names:
        if name not in common:
            arguments.setdefault(name.rpartition(".")[0], []).append(name)
    return common, list(arguments.values())
