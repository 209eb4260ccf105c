"""Tables of the page: every shape, and the steps out of the ordinary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mimose.budget import format_bytes
from mimose.page.looks import format_flops
from mimose.page.steps import (
    Shape,
    Steps,
    shape_text,
)
from mimose.records import StepRecord

Cell: TypeAlias = tuple[str, float | str]
"""What is shown, and what rows are sorted by."""

_MOST_ROWS = 500
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
    """List the shapes, the largest first.

    Args:
        steps: The steps.
    """
    of_shape: dict[Shape, list[StepRecord]] = defaultdict(list)
    for shape, record in zip(steps.shapes, steps.records, strict=True):
        of_shape[shape].append(record)
    shown = list(reversed(steps.last_of_shape))[:_MOST_ROWS]
    caption = "One row a shape; plan and prediction are those of its last step."
    if len(shown) < len(of_shape):
        caption += f" The {len(shown)} largest of {len(of_shape):,} shapes are listed."
    return Table(
        "shapes",
        "Every shape",
        caption,
        (
            *_size_columns(steps),
            "steps",
            "last phase",
            "recomputed",
            "predicted peak",
            "highest peak",
            "of budget",
            "redone a step",
            "ms a step",
        ),
        [_shape_row(steps, shape, of_shape[shape]) for shape in shown],
    )


def _shape_row(
    steps: Steps, shape: Shape, records: Sequence[StepRecord]
) -> tuple[Cell, ...]:
    position = steps.last_of_shape[shape]
    last = steps.records[position]
    n_calls = len(last.actions)
    highest = max(records, key=lambda record: record.observed_peak_bytes or -1)
    flops = sum(record.recomputed_flops for record in records) / len(records)
    return (
        *_sizes(steps, position),
        _number(len(records)),
        (last.phase, last.phase),
        (f"{last.n_recomputed} of {n_calls}", last.n_recomputed / max(1, n_calls)),
        _bytes(last.predicted_peak_bytes),
        _bytes(highest.observed_peak_bytes),
        _share(highest.budget_use),
        (format_flops(flops), flops),
        _milliseconds(records),
    )


def _size_columns(steps: Steps) -> tuple[str, ...]:
    """Name a column for every size, where all steps have the same sizes."""
    return ("shape",) if steps.names is None else steps.names


def _sizes(steps: Steps, position: int) -> tuple[Cell, ...]:
    shape = steps.shapes[position]
    if steps.names is None:
        return ((shape_text(shape), float(steps.elements[position])),)
    return tuple(_number(size) for _, size in shape)


def unusual_table(steps: Steps) -> Table:
    """List the steps that were not ordinary ones, and why.

    Args:
        steps: The steps.
    """
    at = [i for i in range(len(steps)) if _is_listed(steps, i)]
    shown = at[-_MOST_ROWS:]
    columns: tuple[str, ...] = (
        "step",
        *_size_columns(steps),
        "phase",
        "what happened",
        "peak",
        "of budget",
        "prediction off by",
        "run again",
    )
    if steps.n_runs > 1:
        columns = ("run", *columns)
    return Table(
        "unusual",
        "Steps out of the ordinary",
        _unusual_caption(steps, at, len(shown)),
        columns,
        [_unusual_row(steps, i) for i in shown],
    )


def _is_listed(steps: Steps, position: int) -> bool:
    record = steps.records[position]
    has_reason = bool(record.reason) and record.phase != "collect"
    return has_reason or steps.is_unusual(position)


def _unusual_caption(steps: Steps, at: Sequence[int], n_shown: int) -> str:
    if not at:
        return "None: no step fell back, was run again or is known to have gone over."
    caption = (
        "Steps over the budget, run again, under the safest plan, or with a remark. "
        "Steps that only measured are not listed."
    )
    reasons = Counter(_what_happened(steps.records[i]) for i in at).most_common(1)
    caption += f" Most often ({reasons[0][1]:,} ×): {reasons[0][0]}."
    if n_shown < len(at):
        caption += f" The last {n_shown} of {len(at):,} are listed."
    return caption


def _unusual_row(steps: Steps, position: int) -> tuple[Cell, ...]:
    record = steps.records[position]
    row = (
        _number(record.step),
        *_sizes(steps, position),
        (record.phase, record.phase),
        (_what_happened(record), _what_happened(record)),
        _bytes(record.observed_peak_bytes),
        _share(record.budget_use),
        _share(record.prediction_error, "{:+.1%}"),
        _number(record.retries),
    )
    return (_number(steps.runs[position] + 1), *row) if steps.n_runs > 1 else row


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
