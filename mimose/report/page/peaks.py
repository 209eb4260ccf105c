"""What a step needed: its growth by the batch's size, and against the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimose.budget import format_bytes
from mimose.report.page.looks import INK, Figure, byte_unit, counted, nothing
from mimose.report.page.scales import Extent, around_zero, extent, whole
from mimose.report.page.steps import Steps
from mimose.report.page.svg import Panel, Point, Rule, Series, draw
from mimose.report.page.thinning import Group, groups, ringed, rings, series, told

_WORST = "worst of the plans"
_SAME = 0.02
"""What differs by less, of the largest, is all the same in a picture."""
_WORST_COLOUR = "#7B3294"


def peaks(steps: Steps) -> Figure:
    """Draw each step's growth against the size of its batch, with what was left for it.

    Args:
        steps: The steps.
    """
    title = "What a step needed, by the size of the batch"
    predicted = steps.values(lambda record: record.predicted_growth_bytes)
    is_observed = not np.isnan(steps.growth).all()
    ys = steps.growth if is_observed else predicted
    if np.isnan(ys).all():
        return nothing("peaks", title, "No peak was observed or predicted in this run.")
    xs = np.array(steps.elements, dtype=float)
    room = _room(steps)
    parts = groups(steps, xs, ys)
    said = _said(steps, is_observed, room)
    if len(set(xs[~np.isnan(ys)].tolist())) == 1:
        return Figure("peaks", title, " ".join([_of_one_size(steps, ys), *said[1:]]))
    factor, unit = byte_unit(ys[~np.isnan(ys)].tolist())
    line = None if room is None else room.high / factor
    y = extent(_heights(parts, ys / factor), line)
    marks = [
        *series(steps, parts, ys / factor, lambda y: format_bytes(y * factor)),
        *_predicted(steps, parts, predicted / factor, is_observed=is_observed),
        *rings(steps, xs, ys / factor),
    ]
    rules = []
    if room is not None and y.has_line:
        said_there = "what the budget leaves"
        if room.high - room.low > _SAME * room.high:
            said_there = "what the budget leaves: in the grey, by step"
        rules.append(Rule(room.high / factor, said_there, to=room.low / factor))
    panel = Panel(
        whole(xs[~np.isnan(ys)].tolist()),
        y,
        f"size of the batch: {steps.size_formula}",
        f"growth of a step ({unit})",
        marks,
        rules,
        note=_note(y, room, factor, ys),
    )
    said = [told(parts), *said, steps.marked_text]
    caption = " ".join(sentence for sentence in said if sentence)
    return Figure("peaks", title, caption, draw([panel], title))


def _heights(parts: Sequence[Group], ys: NDArray[np.float64]) -> list[float]:
    """Return what an axis has to show: the ends of all bars."""
    ends = (ys[part.positions] for part in parts)
    return [float(end) for own in ends for end in (own.min(), own.max())]


@dataclass(frozen=True, slots=True)
class _Room:
    """What the last run's budget left for a step, in bytes, over all of its steps."""

    low: float
    middle: float
    high: float


def _room(steps: Steps) -> _Room | None:
    """Return what was left, without the hundredth of the steps at either end.

    None where the budget is not about the same bytes as growth is.
    """
    own = steps.records[steps.starts[-1] :]
    if any(record.reserved_peak_bytes is not None for record in own):
        return None
    left = [record.budget_bytes - record.start_bytes for record in own]
    return _Room(*np.quantile(left, (0.01, 0.5, 0.99)).tolist())


def _said(steps: Steps, is_observed: bool, room: _Room | None) -> list[str]:
    last = steps.records[-1]
    budget = format_bytes(last.budget_bytes)
    said = [
        "Growth is how far a step rose above what was held when it began, at any "
        "moment of its forward and backward."
    ]
    if room is not None:
        of = "The last run's budget" if steps.n_runs > 1 else "The budget"
        said.append(
            f"{of} of {budget} leaves {format_bytes(room.middle)} for it "
            f"({format_bytes(room.low)} to {format_bytes(room.high)}, by step); the "
            f"other {format_bytes(last.budget_bytes - room.middle)} were held before."
        )
    said += _of_reserved(steps)
    if not is_observed:
        said.append("Peaks could not be read in this run: these are predictions.")
    said.append("A size is named after an argument of the model and its dimension.")
    return said


def _of_reserved(steps: Steps) -> Iterator[str]:
    """Say what the budget of an accelerator is about; of several runs, the last's."""
    if not steps.are_reserved:
        return
    own = steps.records[steps.starts[-1] :]
    reserved = [r.reserved_peak_bytes for r in own if r.reserved_peak_bytes is not None]
    if not reserved:
        yield "In runs on an accelerator growth is of bytes that tensors requested."
        return
    budget = format_bytes(own[-1].budget_bytes)
    one, of = "These", "the"
    if steps.n_runs > 1:
        one, of = "In runs on an accelerator these", "the last run's"
    yield (
        f"{one} are bytes that tensors requested; {of} budget of {budget} is about "
        f"what the allocator reserved for them, {format_bytes(max(reserved))} at "
        f"the most."
    )


def _of_one_size(steps: Steps, ys: NDArray[np.float64]) -> str:
    """Say what there is to say of steps that are all of one size."""
    known = ys[~np.isnan(ys)]
    middle = format_bytes(float(np.median(known)))
    if len(known) == 1:
        return f"The one step grew by {middle}."
    return (
        f"All batches were of one size, so there is no picture of sizes: "
        f"{counted(len(known), 'step')} grew by {middle} (median), from "
        f"{format_bytes(float(known.min()))} to {format_bytes(float(known.max()))}. "
        f"Step by step they are shown below."
    )


def _predicted(
    steps: Steps,
    parts: Sequence[Group],
    predicted: NDArray[np.float64],
    *,
    is_observed: bool,
) -> list[Series]:
    """Draw a dash where the plans said the growth would be."""
    points = []
    for part in parts if is_observed else ():
        own = predicted[part.positions]
        if not np.isnan(own).all():
            points.append(Point(part.x, float(np.nanmedian(own))))
    if not points:
        return []
    return [
        Series(name="predicted", colour=INK, points=points, symbol="dash", opacity=0.6)
    ]


def _note(y: Extent, room: _Room | None, factor: float, ys: NDArray[np.float64]) -> str:
    """Name what lies above the picture."""
    highest = float(np.nanmax(ys))
    notes = []
    if highest / factor > y.high:
        notes.append(f"highest step: {format_bytes(highest)} ↑")
    if room is not None and not y.has_line:
        left = room.middle
        times = f", {left / highest:,.0f} × the highest step" if highest > 0 else ""
        notes.append(f"the budget leaves {format_bytes(left)}{times} ↑")
    return "   ".join(notes)


def predictions(steps: Steps) -> Figure:
    """Draw how far the observed growth was off the predicted.

    Args:
        steps: The steps.
    """
    title = "Was the prediction right?"
    errors = 100 * steps.errors
    known = ~np.isnan(errors)
    if not known.any():
        why = "No step has both a predicted and an observed peak, so none is compared."
        return nothing("predictions", title, why)
    predicted = steps.values(lambda record: record.predicted_growth_bytes)
    if np.ptp(predicted[known]) <= _SAME * np.abs(predicted[known]).max():
        return nothing("predictions", title, _of_one_growth(predicted, errors, known))
    factor, unit = byte_unit(predicted[known].tolist())
    xs = predicted / factor
    parts = groups(steps, xs, errors)
    y = around_zero(_heights(parts, errors))
    panel = Panel(
        whole(xs[known].tolist()),
        y,
        f"predicted growth ({unit})",
        "observed over predicted (%)",
        [
            *series(steps, parts, errors, "{:+.2f} %".format),
            *ringed(steps, _WORST, _WORST_COLOUR, steps.worst, xs, errors),
            *rings(steps, xs, errors),
        ],
        [Rule(0.0, dash="2 3")],
        note=beyond_text(y, errors[known]),
    )
    caption = (
        "At 0 a step grew by what was predicted; above it the step needed more. "
        "Predictions are of the growth alone, whatever was held before."
    )
    return Figure(
        "predictions", title, f"{told(parts)} {caption}", draw([panel], title)
    )


def _of_one_growth(
    predicted: NDArray[np.float64],
    errors: NDArray[np.float64],
    known: NDArray[np.bool_],
) -> str:
    """Say what there is to say where all predictions are the same."""
    growth = format_bytes(float(np.median(predicted[known])))
    own = errors[known]
    if len(own) == 1:
        return f"One step was predicted to grow by {growth}; it was {own[0]:+.2f}% off."
    return (
        f"All of {counted(len(own), 'step')} were predicted to grow by about {growth}. "
        f"They were {np.median(own):+.2f}% off (median), from {own.min():+.2f}% to "
        f"{own.max():+.2f}%; above 0 a step needed more. Step by step they are shown "
        f"below."
    )


def beyond_text(y: Extent, errors: NDArray[np.float64]) -> str:
    """Name the errors that lie beyond an axis, in per cent; "" if none does."""
    low, high = float(errors.min()), float(errors.max())
    notes = [f"highest: {high:+,.0f} % ↑"] if high > y.high else []
    notes += [f"lowest: {low:+,.0f} % ↓"] if low < y.low else []
    return "   ".join(notes)
