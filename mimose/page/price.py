"""What it cost: step time by phase, deciding on plans, and recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.page.looks import (
    INK,
    PHASE_COLOURS,
    Figure,
    Parts,
    axis,
    counted,
    flop_unit,
    format_flops,
    format_seconds,
    frame,
    nothing,
    time_unit,
)
from mimose.page.steps import Steps

_PLANNING = "choosing plans"


def price(steps: Steps) -> Figure:
    """Draw bars of time and of recomputed FLOPs, by phase.

    Args:
        steps: The steps.
    """
    title = "Where the time went"
    found = {record.phase for record in steps.records}
    phases = [phase for phase in PHASE_COLOURS if phase in found]
    seconds = {p: _sum(steps, p, "seconds") for p in phases}
    flops = {p: _sum(steps, p, "recomputed_flops") for p in phases}
    if not any(seconds.values()) and not any(flops.values()):
        return nothing("price", title, "No step of this run was timed or recomputed.")
    time_factor, time_name = time_unit(sum(seconds.values()))
    flop_factor, flop_name = flop_unit(sum(flops.values()))
    planning = sum(record.plan_seconds for record in steps.records)
    counts = {p: sum(r.phase == p for r in steps.records) for p in phases}
    time_texts = [
        f"{format_seconds(seconds[p])}, {counted(counts[p], 'step')}" for p in phases
    ]
    traces = [
        _bars(
            [*phases, _PLANNING],
            [*(seconds[p] / time_factor for p in phases), planning / time_factor],
            [*time_texts, format_seconds(planning)],
            "",
        ),
        _bars(
            phases,
            [flops[p] / flop_factor for p in phases],
            [format_flops(flops[p]) for p in phases],
            "2",
        ),
    ]
    names = axis(autorange="reversed", showgrid=False)
    layout = frame(
        xaxis=axis(f"time in steps ({time_name})", domain=[0, 0.44]),
        yaxis=names,
        xaxis2=axis(f"recomputed ({flop_name})", domain=[0.58, 1], anchor="y2"),
        yaxis2={**names, "anchor": "x2"},
        showlegend=False,
        bargap=0.35,
    )
    caption = (
        "Left: a step's time runs from the start of its forward to the end of its "
        "backward, as the host sees it; choosing the plan is part of it, and the bar "
        "at the bottom. Data loading and the optimizer's step are not in it. Right: "
        "the work of running layers a second time, counted in floating-point "
        "operations, not guessed from the clock."
    )
    return Figure("price", title, caption, traces, layout, 160 + 46 * len(phases))


def _sum(steps: Steps, phase: str, name: str) -> float:
    return sum(getattr(r, name) or 0 for r in steps.records if r.phase == phase)


def _bars(
    names: Sequence[str], values: Sequence[float], texts: Sequence[str], which: str
) -> Parts:
    longest = max(values) or 1.0
    return {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": list(names),
        "xaxis": f"x{which}",
        "yaxis": f"y{which}",
        "text": texts,
        "textposition": ["inside" if v > 0.6 * longest else "outside" for v in values],
        "insidetextanchor": "end",
        "cliponaxis": False,
        "marker": {"color": [PHASE_COLOURS.get(name, INK) for name in names]},
        "hoverinfo": "y+text",
    }
