"""The plan of every shape, as a map of layers by shapes."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.page.looks import (
    ACTION_COLOURS,
    OTHER_COLOUR,
    Figure,
    Parts,
    axis,
    frame,
    nothing,
    plain,
)
from mimose.page.steps import Shape, Steps
from mimose.records import StepRecord

# A step that measures recomputes all it can: that is no plan of its shape.
_MEASURED = "recompute, to measure"
_MOST_SHAPES = 300
_COLOURS = {**ACTION_COLOURS, _MEASURED: "#A6CEE8"}
_MOST_ROW_LABELS = 40
_MOST_COLUMN_LABELS = 24
_LONGEST_LABEL = 28


def layers(steps: Steps) -> Figure:
    """Draw the last plan of each shape, the smallest shape to the left.

    Args:
        steps: The steps.
    """
    title = "The plan of every shape, layer by layer"
    last = {s: i for s, i in steps.last_of_shape.items() if steps.records[i].actions}
    if not last:
        return nothing("layers", title, "No step of this run ran any layer.")
    shown = _some(list(last), _MOST_SHAPES)
    plans = [_plan(steps.records[last[shape]]) for shape in shown]
    rows = _rows(plans)
    columns = [steps.label(shape) for shape in shown]
    found = {action for plan in plans for action in plan.values()}
    actions = sorted(found, key=lambda a: ([*_COLOURS, a].index(a), a))
    layout = frame(
        xaxis=_labelled(
            columns, columns, _MOST_COLUMN_LABELS, title=_size_title(steps)
        ),
        yaxis=_labelled(rows, _short_names(rows), _MOST_ROW_LABELS, title="")
        | {"range": [len(rows) - 0.5, -0.5]},
    )
    traces = [_cells(plans, rows, columns, actions), *map(_legend, actions)]
    height = min(900, max(280, 170 + 16 * len(rows)))
    caption = _caption(len(shown), len(last))
    return Figure("layers", title, caption, traces, layout, height)


def _caption(n_shown: int, n_shapes: int) -> str:
    caption = (
        "A column is a shape, as in the last step that had it; a row is a layer, the "
        "first at the top. Kept layers hold their activations until backward; "
        "recomputed ones run their forward a second time there, and need less memory "
        "for it. White: the layer did not run."
    )
    if n_shown < n_shapes:
        caption += (
            f" {n_shown} of {n_shapes:,} shapes are drawn, evenly chosen by size."
        )
    return caption


def _plan(record: StepRecord) -> dict[str, str]:
    """Return the actions by event; where names are missing, by place."""
    names: Sequence[str] = record.events
    if len(names) != len(record.actions):
        names = [f"layer call {i}" for i in range(len(record.actions))]
    actions: Sequence[str] = record.actions
    if record.phase == "collect":
        actions = [_MEASURED if action == "recompute" else action for action in actions]
    return dict(zip(names, actions, strict=True))


def _rows(plans: Sequence[dict[str, str]]) -> list[str]:
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
    named = f" ({plain(' × '.join(steps.names))})" if steps.names else ""
    return f"shape of the batch{named}, from the smallest to the largest"


def _some(shapes: list[Shape], most: int) -> list[Shape]:
    """Choose at most so many, at even distances, the largest among them."""
    if len(shapes) <= most:
        return shapes
    return [shapes[(i + 1) * len(shapes) // most - 1] for i in range(most)]


def _labelled(
    places: Sequence[str], labels: Sequence[str], most: int, *, title: str
) -> Parts:
    """Make an axis of named places, with as many labels as there is room for."""
    every = -(-len(places) // most)
    return axis(
        title,
        type="category",
        tickmode="array",
        tickvals=[plain(place) for place in places[::every]],
        ticktext=[plain(label) for label in labels[::every]],
        showgrid=False,
    )


def _cells(
    plans: Sequence[dict[str, str]],
    rows: Sequence[str],
    columns: Sequence[str],
    actions: Sequence[str],
) -> Parts:
    code = {action: i for i, action in enumerate(actions)}
    return {
        "type": "heatmap",
        "x": [plain(column) for column in columns],
        "y": [plain(row) for row in rows],
        "z": [[code.get(plan.get(row, "")) for plan in plans] for row in rows],
        "zmin": -0.5,
        "zmax": len(actions) - 0.5,
        "colorscale": _steps_of_colour([_colour(action) for action in actions]),
        "showscale": False,
        "xgap": 1 if len(plans) <= 120 else 0,
        "ygap": 1 if len(rows) <= 60 else 0,
        "text": [[plain(plan.get(row, "")) for plan in plans] for row in rows],
        "hovertemplate": "%{y}<br>%{x}<br><b>%{text}</b><extra></extra>",
    }


def _colour(action: str) -> str:
    return _COLOURS.get(action, OTHER_COLOUR)


def _steps_of_colour(colours: Sequence[str]) -> list[tuple[float, str]]:
    """Make a scale without transitions."""
    n = len(colours)
    return [(end / n, c) for i, c in enumerate(colours) for end in (i, i + 1)]


def _legend(action: str) -> Parts:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [None],
        "y": [None],
        "name": action,
        "marker": {"symbol": "square", "size": 13, "color": _colour(action)},
    }
