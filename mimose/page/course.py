"""The run from its first step to its last: memory, prediction, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimose.page.looks import (
    INK,
    PHASE_COLOURS,
    PHASE_SYMBOLS,
    PHASE_WORDS,
    Figure,
    Parts,
    axis,
    frame,
)
from mimose.page.steps import Steps

_LEAST_WINDOW = 50


@dataclass(frozen=True, slots=True)
class _Row:
    """One of the rows, above each other, that share the axis of steps."""

    title: str
    caption: str
    height: float
    traces: list[Parts]
    line: tuple[float, str] | None = None
    """Where a line runs across, and how it is dashed."""


def course(steps: Steps) -> Figure:
    """Draw the run: use of the budget, prediction error, cache hits, recomputation.

    Args:
        steps: The steps.
    """
    rows = [row for row in (_uses(steps), _errors(steps), _rates(steps)) if row.traces]
    named = "step" if steps.n_runs == 1 else "step, counted through all runs"
    layout = frame(
        xaxis=axis(
            named,
            anchor=_axis_of(len(rows) - 1),
            range=_ends(len(steps)),
            tickformat=",",
        ),
        shapes=_borders(steps),
    )
    total = sum(row.height for row in rows)
    top = 1.0
    traces = []
    for number, row in enumerate(rows):
        bottom = max(0.0, top - row.height / total)
        where = _axis_of(number)
        domain = [bottom + (0.07 if number < len(rows) - 1 else 0.0), top]
        layout[f"yaxis{where[1:]}"] = axis(row.title, domain=domain)
        traces += [{**trace, "yaxis": where} for trace in row.traces]
        if row.line is not None:
            layout["shapes"].append(_line(where, *row.line))
        top = bottom
    return Figure(
        "course",
        "From the first step to the last",
        _caption(steps, rows),
        traces,
        layout,
        int(120 + 640 * total),
    )


def _axis_of(number: int) -> str:
    return "y" if number == 0 else f"y{number + 1}"


def _caption(steps: Steps, rows: Sequence[_Row]) -> str:
    parts = [row.caption for row in rows]
    if steps.n_runs > 1:
        parts.append(f"Vertical lines part the {steps.n_runs} runs of the file.")
    return " ".join([*parts, steps.drawn_text]).strip()


def _ends(n_steps: int) -> list[float]:
    margin = max(1.0, 0.01 * n_steps)
    return [-margin, n_steps - 1 + margin]


def _uses(steps: Steps) -> _Row:
    shares = {i: steps.records[i].budget_use for i in steps.drawn}
    traces = _dots(steps, shares)
    return _Row(
        "peak (% of budget)",
        "Peak: each step's, as a share of the budget (dashed: all of it).",
        0.42,
        [*traces, *_run_again(steps, shares)],
        (100, "dash"),
    )


def _errors(steps: Steps) -> _Row:
    errors = {i: steps.records[i].prediction_error for i in steps.drawn}
    return _Row(
        "error (% of growth)",
        "Error: how far the observed growth was off the predicted; above zero the step "
        "needed more.",
        0.29,
        [{**trace, "showlegend": False} for trace in _dots(steps, errors)],
        (0, "dot"),
    )


def _dots(steps: Steps, shares: Mapping[int, float | None]) -> list[Parts]:
    traces = []
    for phase, colour in PHASE_COLOURS.items():
        known = {
            i: 100 * share
            for i, share in shares.items()
            if share is not None and steps.records[i].phase == phase
        }
        if known:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": PHASE_WORDS[phase],
                    "legendgroup": phase,
                    "x": list(known),
                    "y": list(known.values()),
                    "text": [steps.hover(i) for i in known],
                    "hoverinfo": "text",
                    "marker": {
                        "color": colour,
                        "symbol": PHASE_SYMBOLS[phase],
                        "size": 5,
                        "opacity": 0.75,
                    },
                }
            )
    return traces


def _run_again(steps: Steps, shares: Mapping[int, float | None]) -> list[Parts]:
    """Ring the steps that were run again."""
    known = {
        i: 100 * share
        for i, share in shares.items()
        if share is not None and steps.records[i].retries
    }
    if not known:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "run again",
            "x": list(known),
            "y": list(known.values()),
            "text": [steps.hover(i) for i in known],
            "hoverinfo": "text",
            "marker": {
                "symbol": "circle-open",
                "size": 14,
                "color": INK,
                "line": {"width": 2},
            },
        }
    ]


def _rates(steps: Steps) -> _Row:
    window = max(_LEAST_WINDOW, len(steps) // 100)
    hits = np.array([float(record.cache_hit) for record in steps.records])
    redone = np.array([float(record.n_recomputed) for record in steps.records])
    calls = np.array([float(len(record.actions)) for record in steps.records])
    hit_rate = _recent(hits, window) / _recent(np.ones(len(steps)), window)
    share = _recent(redone, window) / np.maximum(_recent(calls, window), 1.0)
    return _Row(
        "rate (%)",
        f"Rate, over the last {window} steps: how often the plan came from the cache, "
        f"and the share of layer calls recomputed.",
        0.29,
        [
            _rate(steps, "plan from the cache", hit_rate, "#009E73", "solid"),
            _rate(steps, "layer calls recomputed", share, "#56B4E9", "dash"),
        ],
    )


def _recent(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Sum up each value with those before it, as far as the window reaches."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    recent: NDArray[np.float64] = sums[ends] - sums[np.maximum(0, ends - window)]
    return recent


def _rate(
    steps: Steps, name: str, rates: NDArray[np.float64], colour: str, dash: str
) -> Parts:
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": name,
        "x": steps.drawn,
        "y": [100 * float(rates[i]) for i in steps.drawn],
        "line": {"color": colour, "width": 2, "dash": dash},
        "hovertemplate": f"step %{{x}}: %{{y:.0f}} %<extra>{name}</extra>",
    }


def _line(where: str, height: float, dash: str) -> Parts:
    return {
        "type": "line",
        "xref": "paper",
        "yref": where,
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"color": INK, "width": 1.2, "dash": dash},
    }


def _borders(steps: Steps) -> list[Parts]:
    return [
        {
            "type": "line",
            "yref": "paper",
            "x0": start - 0.5,
            "x1": start - 0.5,
            "y0": 0,
            "y1": 1,
            "line": {"color": "#999999", "width": 1},
        }
        for start in steps.starts[1:]
    ]
