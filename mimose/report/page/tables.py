"""Tables of the page: every shape, and the steps out of the ordinary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from mimose.budget import format_bytes
from mimose.records import StepRecord, kind_of
from mimose.report.page.looks import counted, format_flops
from mimose.report.page.steps import Steps, n_elements
from mimose.report.shapes import Shape, shape_text

Cell: TypeAlias = tuple[str, float | str]
"""What is shown, and what rows are sorted by."""

_MOST_ROWS = 100
_MANY_SHAPES = 40
"""Of more shapes than these, neighbours that differ in bytes alone share a row too."""
_UNKNOWN: Cell = ("–", -1.0)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


def shapes_table(steps: Steps) -> Table:
    """List the shapes, the largest first; neighbours that are alike share a row.

    Args:
        steps: The steps.
    """
    of_shape: dict[Shape, list[StepRecord]] = defaultdict(list)
    for shape, record in zip(steps.shapes, steps.records, strict=True):
        of_shape[shape].append(record)
    alike = [
        list(group)
        for _, group in groupby(
            reversed(steps.last_of_shape),
            key=lambda shape: _looks(steps, of_shape[shape], len(of_shape)),
        )
    ]
    shown = alike[:_MOST_ROWS]
    caption = "One row a shape; plan and prediction are those of its last step."
    if len(alike) < len(of_shape):
        made = counted(len(alike), "row")
        caption = (
            f"Neighbouring shapes that went the same way share a row: "
            f"{len(of_shape):,} shapes make {made}. Plan and prediction are those of "
            f"the last step of a row's largest shape."
        )
    if len(shown) < len(alike):
        caption += f" The {len(shown)} of the largest shapes are listed."
    if steps.are_reserved:
        caption += (
            " On an accelerator the highest peak is of reserved bytes, which the "
            "budget is about, the predicted one of bytes that tensors request."
        )
    return Table(
        "shapes",
        "Every shape",
        caption,
        (
            *_size_columns(steps),
            "shapes",
            "steps",
            "last phase",
            "recomputed",
            "predicted peak",
            "highest peak",
            "of budget",
            "redone a step",
            "ms a step",
        ),
        [
            _shape_row(steps, group, [r for shape in group for r in of_shape[shape]])
            for group in shown
        ],
    )


def _looks(
    steps: Steps, records: Sequence[StepRecord], n_shapes: int
) -> tuple[str | int, ...]:
    """Return what neighbouring shapes must have in common to share a row."""
    last = records[-1]
    plan = (last.phase, last.n_recomputed, len(last.actions))
    if n_shapes > _MANY_SHAPES:
        return plan
    highest = max(record.highest_bytes or -1 for record in records)
    return (*plan, format_bytes(last.predicted_peak_bytes or -1), format_bytes(highest))


def _shape_row(
    steps: Steps, shapes: Sequence[Shape], records: Sequence[StepRecord]
) -> tuple[Cell, ...]:
    last = steps.records[steps.last_of_shape[shapes[0]]]
    n_calls = len(last.actions)
    highest = max(records, key=lambda record: record.highest_bytes or -1)
    uses = [r.budget_use for r in records if r.budget_use is not None]
    flops = sum(record.recomputed_flops for record in records) / len(records)
    return (
        *_ranges(steps, shapes),
        _number(len(shapes)),
        _number(len(records)),
        (last.phase, last.phase),
        (f"{last.n_recomputed} of {n_calls}", last.n_recomputed / max(1, n_calls)),
        _bytes(last.predicted_peak_bytes),
        _bytes(highest.highest_bytes),
        _share(max(uses, default=None)),
        (format_flops(flops), flops),
        _milliseconds(records),
    )


def _ranges(steps: Steps, shapes: Sequence[Shape]) -> Iterator[Cell]:
    """Write the sizes of shapes; where they differ, from the least to the largest."""
    if steps.names is None:
        first, last = shapes[-1], shapes[0]
        text = shape_text(first)
        if first != last:
            text += f" … {shape_text(last)}"
        yield text, float(n_elements(last))
        return
    for sizes in zip(*([size for _, size in s] for s in shapes), strict=True):
        low, high = min(sizes), max(sizes)
        text = f"{high:,}" if low == high else f"{low:,} – {high:,}"
        yield text, float(high)


def _size_columns(steps: Steps) -> tuple[str, ...]:
    """Name a column for every size, where all steps have the same sizes."""
    return ("shape",) if steps.names is None else steps.names


def unusual_table(steps: Steps) -> Table:
    """List the steps that were not ordinary ones, and why.

    Args:
        steps: The steps.
    """
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i in range(len(steps)):
        if _is_listed(steps, i):
            alike[_kind(steps, i)].append(i)
    most_severe = sorted(alike.values(), key=lambda at: _severity(steps, at))
    shown = sorted(most_severe[:_MOST_ROWS])
    columns: tuple[str, ...] = (
        "steps",
        "first",
        "last",
        "phase",
        "what happened",
        "shape of the highest",
        "highest peak",
        "of budget",
        "worst prediction",
        "run again",
    )
    if steps.n_runs > 1:
        columns = ("run", *columns)
    return Table(
        "unusual",
        "Steps out of the ordinary",
        _unusual_caption(list(alike.values()), len(shown)),
        columns,
        [_unusual_row(steps, at) for at in shown],
    )


def _kind(steps: Steps, position: int) -> tuple[object, ...]:
    """Return what steps must have in common to share a row.

    Numbers may differ, and the actions that are tried.
    """
    record = steps.records[position]
    reason = kind_of(record.reason)
    is_again = record.retries > 0
    return steps.runs[position], record.phase, record.is_over, is_again, reason


def _severity(steps: Steps, at: Sequence[int]) -> tuple[bool, bool, int]:
    record = steps.records[at[0]]
    return not record.is_over, not record.retries, -len(at)


def _is_listed(steps: Steps, position: int) -> bool:
    record = steps.records[position]
    has_reason = bool(record.reason) and record.phase != "collect"
    return has_reason or steps.is_unusual(position)


def _unusual_caption(alike: Sequence[Sequence[int]], n_shown: int) -> str:
    if not alike:
        return "None: no step fell back, was run again or is known to have gone over."
    n_steps = sum(map(len, alike))
    caption = (
        "Steps over the budget, run again, under the safest plan, or with a remark; "
        f"{counted(n_steps, 'step')} in all. Those to which the same happened share a "
        "row, whatever numbers or tried actions were in its words: the words are those "
        "of the one with the highest peak. Steps that only measured are not listed."
    )
    if n_shown < len(alike):
        caption += (
            f" {n_shown} of {len(alike):,} rows are listed: over the budget and run "
            f"again first, then what happened most often."
        )
    return caption


def _unusual_row(steps: Steps, at: Sequence[int]) -> tuple[Cell, ...]:
    highest = max(at, key=lambda i: steps.records[i].highest_bytes or -1)
    record = steps.records[highest]
    errors = [e for i in at if (e := steps.records[i].prediction_error) is not None]
    said = _what_happened(record)
    shape = shape_text(steps.shapes[highest])
    row = (
        _number(len(at)),
        _number(steps.records[at[0]].step),
        _number(steps.records[at[-1]].step),
        (record.phase, record.phase),
        (said, said),
        (shape, shape),
        _bytes(record.highest_bytes),
        _share(record.budget_use),
        _share(max(errors, key=abs, default=None), "{:+.1%}"),
        _number(sum(steps.records[i].retries for i in at)),
    )
    return (_number(steps.runs[highest] + 1), *row) if steps.n_runs > 1 else row


def _what_happened(record: StepRecord) -> str:
    """Say why a step is listed: its reason, and whether it went over."""
    over = "over the budget" if record.is_over else ""
    return (
        "; ".join(part for part in (over, record.reason) if part) or "no reason given"
    )


def _number(number: int) -> Cell:
    return f"{number:,}", float(number)


def _bytes(n_bytes: float | None) -> Cell:
    return _UNKNOWN if n_bytes is None else (format_bytes(n_bytes), float(n_bytes))


def _share(share: float | None, form: str = "{:.1%}") -> Cell:
    return _UNKNOWN if share is None else (form.format(share), share)


def _milliseconds(records: Sequence[StepRecord]) -> Cell:
    times = [record.seconds for record in records if record.seconds is not None]
    if not times:
        return _UNKNOWN
    mean = 1e3 * sum(times) / len(times)
    return f"{mean:,.1f}", mean
