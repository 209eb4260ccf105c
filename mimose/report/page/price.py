"""What it cost: step time by phase, deciding on plans, and recomputed FLOPs."""

from __future__ import annotations

from mimose.report.page.bars import Bar, draw_bars
from mimose.report.page.looks import (
    INK,
    PHASE_COLOURS,
    Figure,
    counted,
    flop_unit,
    format_flops,
    format_seconds,
    nothing,
    time_unit,
)
from mimose.report.page.steps import Steps

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
    time_bars = [Bar(_PLANNING, planning / time_factor, format_seconds(planning), INK)]
    for p in reversed(phases):
        text = f"{format_seconds(seconds[p])}, {counted(counts[p], 'step')}"
        time_bars.insert(0, Bar(p, seconds[p] / time_factor, text, PHASE_COLOURS[p]))
    flop_bars = [
        Bar(p, flops[p] / flop_factor, format_flops(flops[p]), PHASE_COLOURS[p])
        for p in phases
    ]
    picture = draw_bars(
        [
            (f"time in steps ({time_name})", time_bars),
            (f"recomputed ({flop_name})", flop_bars),
        ],
        title,
    )
    caption = (
        "Left: a step's time runs from the start of its forward to the end of its "
        "backward, as the host sees it; choosing the plan is part of it, and the bar "
        "at the bottom. Data loading and the optimizer's step are not in it. Right: "
        "the work of running layers a second time, counted in floating-point "
        "operations, not guessed from the clock."
    )
    return Figure("price", title, caption, picture)


def _sum(steps: Steps, phase: str, name: str) -> float:
    return sum(getattr(r, name) or 0 for r in steps.records if r.phase == phase)
