"""The plan of every shape, as a map of layers by shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mimose.records import StepRecord
from mimose.report.page.cells import Map, draw_map
from mimose.report.page.looks import (
    ACTION_COLOURS,
    ACTION_WORDS,
    OTHER_COLOUR,
    Figure,
    counted,
    nothing,
)
from mimose.report.page.steps import Steps
from mimose.report.shapes import Shape

# A step that measures recomputes all it can: that is no plan of its shape.
_MEASURED = "recompute, to measure"
_MOST_COLUMNS = 120
_MOST_ROWS = 100
_COLOURS = {**ACTION_COLOURS, _MEASURED: "#A6CEE8"}
_WORDS = {
    **ACTION_WORDS,
    _MEASURED: "recompute, to measure: no plan yet in the last step of that shape",
}
_LONGEST_LABEL = 28

_Plan = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Neighbours with one plan: shapes, or layers."""

    names: Sequence[str]
    plan: Sequence[str]
    """Down a column, or along a row."""


def layers(steps: Steps) -> Figure:
    """Draw the last plan of each shape, the smallest shape to the left.

    Args:
        steps: The steps.
    """
    title = "The plan of every shape, layer by layer"
    last = {s: i for s, i in steps.last_of_shape.items() if steps.records[i].actions}
    if not last:
        return nothing("layers", title, "No step of this run ran any layer.")
    plans = {shape: _plan(steps.records[i]) for shape, i in last.items()}
    events = _rows(list(plans.values()))
    found = {action for plan in plans.values() for action in plan.values()}
    if len(found) == 1 and all(len(plan) == len(events) for plan in plans.values()):
        return nothing("layers", title, _all_alike(len(plans), len(events), *found))
    columns = _columns(steps, plans, events)
    shown = _some(columns, _MOST_COLUMNS)
    rows = list(_alike_rows(events, shown))
    drawn = _some(rows, _MOST_ROWS)
    actions = sorted(found, key=lambda a: ([*_COLOURS, a].index(a), a))
    map_ = Map(
        rows=[_range(row.names, " – ") for row in drawn],
        columns=[_range(column.names, " … ") for column in shown],
        cells=[row.plan for row in drawn],
        colours={action: _COLOURS.get(action, OTHER_COLOUR) for action in actions},
        words={action: _WORDS.get(action, action) for action in actions},
        x_title=_size_title(steps),
    )
    caption = " ".join(_caption(columns, shown, rows, drawn, len(plans)))
    return Figure("layers", title, caption, draw_map(map_, title))


def _all_alike(n_shapes: int, n_layers: int, action: str) -> str:
    """Say in a sentence what a map of one colour would show."""
    shapes = "the one shape" if n_shapes == 1 else f"each of the {n_shapes:,} shapes"
    calls = (
        "the one layer call is"
        if n_layers == 1
        else f"all {n_layers:,} layer calls are"
    )
    done, why = {
        "keep": ("kept", "nothing had to be recomputed to stay within the budget"),
        "recompute": ("recomputed", "the budget left no room to keep any"),
        _MEASURED: (
            "recomputed to be measured",
            "no plan had been made when the run ended",
        ),
    }.get(action, (f"under {action}", "the planner chose nothing else"))
    return f"In {shapes} {calls} {done}: {why}. So there is no map to draw."


def _caption(
    columns: Sequence[_Alike],
    shown: Sequence[_Alike],
    rows: Sequence[_Alike],
    drawn: Sequence[_Alike],
    n_shapes: int,
) -> Iterator[str]:
    yield (
        "A column is a shape, as in the last step that had it; a row is a layer's "
        "call, the first at the top. White: the layer did not run."
    )
    if len(columns) < n_shapes:
        yield (
            f"Neighbouring shapes with the same plan share a column: {n_shapes:,} "
            f"shapes make {counted(len(columns), 'column')}."
        )
    if len(shown) < len(columns):
        yield f"{len(shown)} of these are drawn, evenly chosen by size."
    n_layers = sum(len(row.names) for row in rows)
    if len(rows) < n_layers:
        yield (
            f"Neighbouring layers that are always treated alike share a row: "
            f"{n_layers:,} calls make {counted(len(rows), 'row')}."
        )
    if len(drawn) < len(rows):
        yield f"{len(drawn)} of these rows are drawn, evenly chosen."


def _columns(
    steps: Steps, plans: dict[Shape, _Plan], events: Sequence[str]
) -> list[_Alike]:
    """Merge neighbouring shapes that have one plan."""

    def down(shape: Shape) -> tuple[str, ...]:
        return tuple(plans[shape].get(event, "") for event in events)

    return [
        _Alike([steps.label(shape) for shape in group], plan)
        for plan, group in groupby(plans, key=down)
    ]


def _alike_rows(events: Sequence[str], columns: Sequence[_Alike]) -> Iterator[_Alike]:
    """Merge neighbouring layers where there are too many for a row each."""
    names = _short_names(events)
    along = list(zip(*(column.plan for column in columns), strict=True))
    if len(names) <= _MOST_ROWS // 2:
        yield from (_Alike([n], row) for n, row in zip(names, along, strict=True))
        return
    for plan, group in groupby(range(len(names)), key=along.__getitem__):
        yield _Alike([names[i] for i in group], plan)


def _range(names: Sequence[str], between: str) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}{between}{names[-1]}"


def _plan(record: StepRecord) -> _Plan:
    """Return the actions by event; where names are missing, by place."""
    names: Sequence[str] = record.events
    if len(names) != len(record.actions):
        names = [f"layer call {i}" for i in range(len(record.actions))]
    actions: Sequence[str] = record.actions
    if record.phase == "collect":
        actions = [_MEASURED if action == "recompute" else action for action in actions]
    return dict(zip(names, actions, strict=True))


def _rows(plans: Sequence[_Plan]) -> list[str]:
    """Order the events of all plans: the longest plan's, then what only others ran."""
    longest = max(plans, key=len)
    return list(dict.fromkeys([*longest, *(event for p in plans for event in p)]))


def _short_names(events: Sequence[str]) -> list[str]:
    """Drop the number of the call where it says nothing, and what all have in common.

    Of the front that all share, the last part stays: it says what is counted.
    """
    if all(event.endswith("#0") for event in events):
        events = [event.removesuffix("#0") for event in events]
    if max(map(len, events)) <= _LONGEST_LABEL or len(events) == 1:
        return [_cut(event) for event in events]
    parts = [event.split(".") for event in events]
    front = max(0, _n_common(parts) - 1)
    back = _n_common([part[front + 1 :][::-1] for part in parts])
    return [
        _cut(
            ("…" if front else "")
            + ".".join(part[front : len(part) - back])
            + ("…" if back else "")
        )
        for part in parts
    ]


def _n_common(rows: Sequence[Sequence[str]]) -> int:
    """Count the places at the front in which all rows agree."""
    n_common = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        n_common += 1
    return n_common


def _cut(name: str) -> str:
    """Leave out the middle of a name that is too long."""
    if len(name) <= _LONGEST_LABEL:
        return name
    half = _LONGEST_LABEL // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def _size_title(steps: Steps) -> str:
    named = f" ({' × '.join(steps.names)})" if steps.names else ""
    return f"shape of the batch{named}, from the smallest to the largest"


def _some(alike: list[_Alike], most: int) -> list[_Alike]:
    """Choose at most so many, at even distances, the last among them."""
    if len(alike) <= most:
        return alike
    return [alike[(i + 1) * len(alike) // most - 1] for i in range(most)]
