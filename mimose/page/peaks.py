"""What a step needed: its peak by the batch's size, and against the prediction."""

from __future__ import annotations

from collections.abc import Callable

from mimose.budget import format_bytes
from mimose.page.looks import (
    INK,
    PHASE_COLOURS,
    PHASE_SYMBOLS,
    PHASE_WORDS,
    Figure,
    Parts,
    axis,
    byte_unit,
    frame,
    nothing,
    plain,
)
from mimose.page.steps import Steps
from mimose.records import StepRecord

_MOST_BUDGETS = 4


def peaks(steps: Steps) -> Figure:
    """Draw each step's peak against the size of its batch, with the budget.

    Args:
        steps: The steps.
    """
    title = "Peak memory by the size of the batch"
    known = [
        n_bytes
        for r in steps.records
        for n_bytes in (r.observed_peak_bytes, r.predicted_peak_bytes)
        if n_bytes is not None
    ]
    if not known:
        return nothing("peaks", title, "No peak was observed or predicted in this run.")
    budgets = list(dict.fromkeys(r.budget_bytes for r in steps.records))
    factor, unit = byte_unit([*known, *budgets])
    traces = _by_phase(
        steps, lambda r: _scaled(r.observed_peak_bytes, factor), is_hollow=False
    )
    traces += _by_phase(
        steps, lambda r: _scaled(r.predicted_peak_bytes, factor), is_hollow=True
    )
    traces += _over(steps, factor)
    layout = frame(
        xaxis=axis(f"size of the batch: {plain(steps.size_formula)}", tickformat=","),
        yaxis=axis(f"peak memory ({unit})"),
        shapes=[_budget_line(n_bytes / factor) for n_bytes in budgets[-_MOST_BUDGETS:]],
        annotations=[_budget_label(b, factor) for b in budgets[-_MOST_BUDGETS:]],
    )
    return Figure("peaks", title, _peaks_caption(steps, len(budgets)), traces, layout)


def _peaks_caption(steps: Steps, n_budgets: int) -> str:
    parts = [
        "A dot is a training step: the most memory held at any moment of it, weights "
        "and optimizer included. The dashed line is the budget; no dot should lie "
        "above it. Hollow: what was predicted before the step ran."
    ]
    reserved = [r.reserved_peak_bytes for r in steps.records if r.reserved_peak_bytes]
    if reserved:
        parts.append(
            "Dots are bytes that tensors requested; the budget is about what the "
            f"allocator reserved for them, {format_bytes(max(reserved))} at the most."
        )
    if all(record.observed_peak_bytes is None for record in steps.records):
        parts.append("Peaks could not be read in this run: only predictions are shown.")
    if n_budgets > _MOST_BUDGETS:
        parts.append(f"Of {n_budgets} budgets the last {_MOST_BUDGETS} are drawn.")
    parts.append("A size is named after an argument of the model and its dimension.")
    return " ".join([*parts, steps.drawn_text]).strip()


def predictions(steps: Steps) -> Figure:
    """Draw observed against predicted growth, with the diagonal.

    Args:
        steps: The steps.
    """
    title = "Was the prediction right?"
    pairs = {
        i: (r.predicted_growth_bytes, float(r.observed_growth_bytes))
        for i, r in enumerate(steps.records)
        if r.predicted_growth_bytes is not None and r.observed_growth_bytes is not None
    }
    if not pairs:
        why = "No step has both a predicted and an observed peak, so none is compared."
        return nothing("predictions", title, why)
    factor, unit = byte_unit(n_bytes for pair in pairs.values() for n_bytes in pair)
    traces = []
    for phase in PHASE_COLOURS:
        at = [i for i in steps.drawn if steps.records[i].phase == phase and i in pairs]
        if at:
            xs, ys = ([pairs[i][side] / factor for i in at] for side in (0, 1))
            traces.append(_dots(steps, phase, at, xs, ys, is_hollow=False))
    most = max(max(pair) for pair in pairs.values()) / factor
    layout = frame(
        xaxis=axis(f"predicted growth ({unit})"),
        yaxis=axis(f"observed growth ({unit})"),
    )
    caption = (
        "Growth is how far a step rose above what was held when it began. On the line "
        "the prediction was exact; above it the step needed more than predicted. "
    )
    return Figure(
        "predictions",
        title,
        (caption + steps.drawn_text).strip(),
        [_diagonal(most), *traces],
        layout,
    )


def _diagonal(most: float) -> Parts:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [0, most],
        "y": [0, most],
        "name": "observed = predicted",
        "line": {"color": INK, "width": 1.2, "dash": "dot"},
        "hoverinfo": "skip",
    }


def _scaled(n_bytes: float | None, factor: int) -> float | None:
    return None if n_bytes is None else n_bytes / factor


def _by_phase(
    steps: Steps, height: Callable[[StepRecord], float | None], *, is_hollow: bool
) -> list[Parts]:
    traces = []
    for phase in PHASE_COLOURS:
        at = [i for i in steps.drawn if steps.records[i].phase == phase]
        heights = {i: height(steps.records[i]) for i in at}
        ys = {i: y for i, y in heights.items() if y is not None}
        if ys:
            xs = [float(steps.elements[i]) for i in ys]
            traces.append(
                _dots(steps, phase, list(ys), xs, list(ys.values()), is_hollow)
            )
    return traces


def _dots(
    steps: Steps,
    phase: str,
    at: list[int],
    xs: list[float],
    ys: list[float],
    is_hollow: bool,
) -> Parts:
    """Draw some steps of a phase, solid or hollow."""
    symbol = PHASE_SYMBOLS[phase]
    marker: Parts = {"color": PHASE_COLOURS[phase], "size": 7, "opacity": 0.75}
    if is_hollow:
        marker.update(symbol=f"{symbol}-open", size=11, line={"width": 1})
    else:
        marker["symbol"] = symbol
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"predicted ({phase})" if is_hollow else PHASE_WORDS[phase],
        "x": xs,
        "y": ys,
        "text": [steps.hover(i) for i in at],
        "hoverinfo": "text",
        "marker": marker,
    }


def _over(steps: Steps, factor: int) -> list[Parts]:
    """Ring the steps that went over the budget."""
    at = [i for i in steps.drawn if steps.records[i].is_over]
    if not at:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "over the budget",
            "x": [steps.elements[i] for i in at],
            "y": [(steps.records[i].observed_peak_bytes or 0) / factor for i in at],
            "hoverinfo": "skip",
            "marker": {
                "symbol": "circle-open",
                "size": 15,
                "color": INK,
                "line": {"width": 2},
            },
        }
    ]


def _budget_line(height: float) -> Parts:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"color": INK, "width": 1.5, "dash": "dash"},
    }


def _budget_label(budget_bytes: int, factor: int) -> Parts:
    return {
        "xref": "paper",
        "x": 0.005,
        "xanchor": "left",
        "y": budget_bytes / factor,
        "yanchor": "bottom",
        "text": f"budget {format_bytes(budget_bytes)}",
        "showarrow": False,
    }
