"""The steps of a file in order: which run each is of, its shape, and how large that is.

A file holds several runs where later ones were appended: their steps count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from mimose.budget import format_bytes
from mimose.records import StepRecord
from mimose.report.shapes import Shape, shape_text, shapes_of, sizes_text, split_runs

_MOST_MARKED = 200
_MOST_WORST = 10
_LONGEST_REASON = 120


class Steps:
    """Records, and what only shows beside the others of the same run.

    Args:
        records: In the order of the file.

    Attributes:
        records: In order of run and step.
        runs: The run of each, from 0.
        shapes: The shape of each.
    """

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self.records: list[StepRecord] = []
        self.runs: list[int] = []
        self.shapes: list[Shape] = []
        for number, run in enumerate(split_runs(records)):
            run.sort(key=lambda record: record.step)
            self.records += run
            self.runs += [number] * len(run)
            self.shapes += shapes_of(run)
        sizes = {shape: n_elements(shape) for shape in set(self.shapes)}
        self.elements = [sizes[shape] for shape in self.shapes]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def n_runs(self) -> int:
        """How many runs there are."""
        return 1 + self.runs[-1] if self.runs else 0

    @cached_property
    def starts(self) -> list[int]:
        """The positions at which a run begins."""
        return [
            i for i in range(len(self)) if not i or self.runs[i] != self.runs[i - 1]
        ]

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """The names of the sizes that vary, if they are the same for all steps."""
        found = {tuple(name for name, _ in shape) for shape in self.shapes}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def size_formula(self) -> str:
        """How `elements` follows from the sizes, in words."""
        return "its elements" if self.names is None else formula(self.names)

    @cached_property
    def last_of_shape(self) -> dict[Shape, int]:
        """The last position of each shape, from the smallest to the largest."""
        last = {shape: position for position, shape in enumerate(self.shapes)}
        return dict(sorted(last.items(), key=lambda item: (n_elements(item[0]), item)))

    @cached_property
    def are_reserved(self) -> bool:
        """Whether the budget of some steps is about reserved bytes: accelerators'."""
        return any(r.reserved_peak_bytes is not None for r in self.records)

    def label(self, shape: Shape) -> str:
        """Write a shape in short: the sizes alone, where all steps name the same."""
        return shape_text(shape) if self.names is None else sizes_text(shape)

    def is_unusual(self, position: int) -> bool:
        """Whether a step fell back, was run again or went over the budget."""
        record = self.records[position]
        return record.phase == "fallback" or record.retries > 0 or record.is_over

    def values(self, of: Callable[[StepRecord], float | None]) -> NDArray[np.float64]:
        """Return a number of every step, (n_steps,); NaN where it is not known.

        Args:
            of: Takes a record.
        """
        found = (of(record) for record in self.records)
        return np.array([np.nan if x is None else x for x in found], dtype=float)

    @cached_property
    def growth(self) -> NDArray[np.float64]:
        """The observed growth of every step, (n_steps,) bytes."""
        return self.values(lambda record: record.observed_growth_bytes)

    @cached_property
    def errors(self) -> NDArray[np.float64]:
        """The prediction error of every step, (n_steps,) shares of the growth."""
        return self.values(lambda record: record.prediction_error)

    @cached_property
    def over(self) -> list[int]:
        """The steps over the budget: all, or the highest of very many."""
        at = [i for i, record in enumerate(self.records) if record.is_over]
        return self._highest(at, lambda record: record.budget_use or 0.0)

    @cached_property
    def run_again(self) -> list[int]:
        """The steps that were run again: all, or those most often of very many."""
        at = [i for i, record in enumerate(self.records) if record.retries]
        return self._highest(at, lambda record: record.retries)

    def _highest(self, at: list[int], by: Callable[[StepRecord], float]) -> list[int]:
        highest = sorted(at, key=lambda i: -by(self.records[i]))[:_MOST_MARKED]
        return sorted(highest)

    @cached_property
    def worst(self) -> list[int]:
        """The steps whose peaks were predicted worst, of those under a plan."""
        known = [
            i
            for i in np.flatnonzero(~np.isnan(self.errors)).tolist()
            if self.records[i].phase == "plan"
        ]
        return sorted(known, key=lambda i: -abs(self.errors[i]))[:_MOST_WORST]

    @cached_property
    def marked_text(self) -> str:
        """What of the marked steps is left out, as a sentence; "" if nothing."""
        n_over = sum(record.is_over for record in self.records)
        if n_over <= _MOST_MARKED:
            return ""
        return (
            f"Of {n_over:,} steps over the budget the {_MOST_MARKED} highest are "
            f"ringed."
        )

    def hover(self, position: int) -> str:
        """Tell of a step in the lines that appear under the mouse."""
        return "\n".join(self._lines(position))

    def _lines(self, position: int) -> Iterator[str]:
        record = self.records[position]
        run = f"run {self.runs[position] + 1}, " if self.n_runs > 1 else ""
        yield f"{run}step {record.step:,} ({record.phase})"
        yield shape_text(self.shapes[position])
        if record.observed_peak_bytes is not None:
            yield f"peak {format_bytes(record.observed_peak_bytes)}"
        if record.reserved_peak_bytes is not None:
            budget = format_bytes(record.budget_bytes)
            reserved = format_bytes(record.reserved_peak_bytes)
            yield f"reserved {reserved}, of a budget of {budget}"
        if record.predicted_peak_bytes is not None:
            yield f"predicted {format_bytes(record.predicted_peak_bytes)}"
        yield f"{record.n_recomputed} of {len(record.actions)} layer calls recomputed"
        if record.retries:
            yield f"run again {record.retries} ×"
        if record.reason:
            yield record.reason[:_LONGEST_REASON]


def _factors(names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Part names into the batch's, if one alone is, and the others by argument."""
    batch = [name for name in names if name.endswith(".0")]
    common = batch if len(batch) == 1 else []
    by_argument: dict[str, list[str]] = {}
    for name in names:
        if name not in common:
            by_argument.setdefault(name.rpartition(".")[0], []).append(name)
    return common, list(by_argument.values())


def n_elements(shape: Shape) -> int:
    """Return how large a batch is: its number of elements, as far as they vary.

    >>> n_elements((("ids.0", 4), ("ids.1", 10), ("labels.1", 5)))
    60
    """
    sizes: Mapping[str, int] = dict(shape)
    common, groups = _factors(list(sizes))
    in_a_row = sum(prod(sizes[name] for name in group) for group in groups)
    return prod(sizes[name] for name in common) * (in_a_row if groups else 1)


def formula(names: Sequence[str]) -> str:
    """Write down what `n_elements` computes.

    >>> formula(("ids.0", "ids.1", "labels.1"))
    'ids.0 × (ids.1 + labels.1)'
    """
    common, groups = _factors(names)
    in_a_row = " + ".join(" × ".join(group) for group in groups)
    if common and len(groups) > 1:
        in_a_row = f"({in_a_row})"
    return " × ".join(part for part in (*common, in_a_row) if part) or "1"
