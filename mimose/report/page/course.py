"""The run from its first step to its last: memory, prediction, plans."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mimose.budget import format_bytes
from mimose.report.page.looks import Figure, byte_unit
from mimose.report.page.peaks import beyond_text
from mimose.report.page.scales import Extent, around_zero, extent
from mimose.report.page.steps import Steps
from mimose.report.page.svg import Panel, Point, Rule, Series, draw
from mimose.report.page.thinning import FEW, groups, rings, series, told

_LEAST_WINDOW = 50
_MOST_RUNS = 50
"""So many borders of runs are drawn, no more."""
_HELD_COLOUR = "#999999"


def course(steps: Steps) -> Figure:
    """Draw the run: peaks, prediction error, cache hits, recomputation.

    Args:
        steps: The steps.
    """
    title = "From the first step to the last"
    xs = np.arange(len(steps), dtype=float)
    margin = max(1.0, 0.01 * len(steps))
    last = len(steps) - 1
    x = Extent(-margin, last + margin, counts=(0, last))
    panels, captions = [], []
    for make in (_memory, _errors, _rates):
        panel, caption = make(steps, xs, x)
        if panel is not None:
            panels.append(panel)
            captions.append(caption)
    captions += [steps.marked_text, _of_runs(steps)]
    caption = " ".join(said for said in captions if said)
    return Figure("course", title, caption, draw(panels, title))


def _of_runs(steps: Steps) -> str:
    if steps.n_runs == 1:
        return ""
    drawn = f", the last {_MOST_RUNS}" if steps.n_runs > _MOST_RUNS else ""
    return f"Vertical lines part the {steps.n_runs} runs of the file{drawn}."


def _x_title(steps: Steps) -> str:
    return "step" if steps.n_runs == 1 else "step, counted through all runs"


def _memory(
    steps: Steps, xs: NDArray[np.float64], x: Extent
) -> tuple[Panel | None, str]:
    """Draw what the budget is about, on an axis that begins near it."""
    peaks = steps.values(lambda record: record.highest_bytes)
    if np.isnan(peaks).all():
        return None, ""
    starts = steps.values(lambda record: record.start_bytes)
    is_reserved = steps.are_reserved
    factor, unit = byte_unit(peaks[~np.isnan(peaks)].tolist())
    parts = groups(steps, xs, peaks)
    at = np.concatenate([part.positions for part in parts])
    budgets = {record.budget_bytes for record in steps.records}
    budget = steps.records[-1].budget_bytes if len(budgets) == 1 else None
    shown = peaks[at] if is_reserved else np.concatenate([peaks[at], starts[at]])
    ys = peaks / factor
    y = extent((shown / factor).tolist(), None if budget is None else budget / factor)
    held = _line("held before", _HELD_COLOUR, starts / factor, 1.5)
    read = (r for r in steps.records if r.highest_bytes is not None)
    is_mixed = is_reserved and any(r.reserved_peak_bytes is None for r in read)
    name = "reserved" if is_reserved and not is_mixed else "memory"
    rules = list(_borders(steps))
    note = ""
    if budget is not None and y.has_line:
        rules.append(Rule(budget / factor, f"budget {format_bytes(budget)}"))
    elif budget is not None:
        note = f"budget {format_bytes(budget)}, beyond this axis ↑"
    panel = Panel(
        x,
        y,
        _x_title(steps),
        f"peak {name} ({unit})",
        [
            *([] if is_reserved else [held]),
            *series(steps, parts, ys, lambda y: format_bytes(y * factor)),
            *rings(steps, xs, ys),
        ],
        rules,
        height=240,
        note=note,
    )
    caption = (
        "Memory: each step's peak, weights and optimizer included"
        + ("" if is_reserved else ", over what was held when it began (grey)")
        + ("; on an accelerator what its allocator reserved" if is_mixed else "")
        + ("." if y.low == 0 else "; the axis does not begin at 0.")
    )
    return panel, f"{told(parts)} {caption}"


def _line(
    name: str, colour: str, values: NDArray[np.float64], width: float, dash: str = ""
) -> Series:
    """Join a number of every step, of many steps a few."""
    at = np.unique(np.linspace(0, len(values) - 1, FEW).round().astype(int))
    points = [Point(float(i), float(values[i])) for i in at.tolist()]
    size = 3.0 if len(points) == 1 else 0.0
    return Series(
        name=name,
        colour=colour,
        points=points,
        size=size,
        line=width,
        dash=dash,
        opacity=1.0,
    )


def _errors(
    steps: Steps, xs: NDArray[np.float64], x: Extent
) -> tuple[Panel | None, str]:
    errors = 100 * steps.errors
    known = errors[~np.isnan(errors)]
    if not len(known):
        return None, ""
    parts = groups(steps, xs, errors)
    y = around_zero(known.tolist())
    panel = Panel(
        x,
        y,
        _x_title(steps),
        "error (% of growth)",
        series(steps, parts, errors, "{:+.2f} %".format),
        [Rule(0.0, dash="2 3"), *_borders(steps)],
        height=150,
        note=beyond_text(y, known),
    )
    return panel, "Error: how far the growth was off what was predicted."


def _rates(
    steps: Steps, xs: NDArray[np.float64], x: Extent
) -> tuple[Panel | None, str]:
    window = max(_LEAST_WINDOW, len(steps) // 100)
    hits = steps.values(lambda record: float(record.cache_hit))
    redone = steps.values(lambda record: float(record.n_recomputed))
    calls = steps.values(lambda record: float(len(record.actions)))
    hit_rate = _recent(hits, window) / _recent(np.ones(len(steps)), window)
    share = _recent(redone, window) / np.maximum(_recent(calls, window), 1.0)
    panel = Panel(
        x,
        Extent(-4.0, 104.0),
        _x_title(steps),
        "rate (%)",
        [
            _line("plan from the cache", "#009E73", 100 * hit_rate, 2.0),
            _line("layer calls recomputed", "#56B4E9", 100 * share, 2.0, "6 3"),
        ],
        list(_borders(steps)),
        height=150,
    )
    return panel, (
        f"Rate, over the last {window:,} steps: how often the plan came from the "
        f"cache, and the share of layer calls recomputed."
    )


def _recent(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Sum up each value with those before it, as far as the window reaches."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    recent: NDArray[np.float64] = sums[ends] - sums[np.maximum(0, ends - window)]
    return recent


def _borders(steps: Steps) -> list[Rule]:
    starts = steps.starts[1:][-_MOST_RUNS:]
    return [Rule(start - 0.5, is_vertical=True, dash="") for start in starts]
