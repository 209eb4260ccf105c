"""Draw how a step's memory rises and falls under two plans: ``docs/images/step.svg``.

    python docs/images/draw_step.py

The levels and peaks are those that `mimose.planners` judges plans by; the sizes are
made up, so that every part can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mimose.planners import Plan, PlanningProblem, lay_out, make_planner

BUDGET = 147
KEEP, RECOMPUTE, OTHER, INK, SOFT = (
    "#2f6db5",
    "#d9822b",
    "#8a8f98",
    "#1f2430",
    "#5b6270",
)
LEFT, WIDE, TALL, PANEL = 30, 60, 1.12, 292
"""Where the drawing begins, a segment's width, scale in points, a panel's height."""


def problem(budget: float) -> PlanningProblem:
    """Make a step of four equal layers; one unit may be read as one MiB."""
    both = np.ones((4, 1))
    return PlanningProblem(
        calls=("layer 1", "layer 2", "layer 3", "layer 4"),
        actions=("keep", "recompute"),
        allowed=np.ones((4, 2), dtype=bool),
        held_bytes=both * [34.0, 7.0],
        forward_transient_bytes=both * [40.0, 20.0],
        backward_transient_bytes=both * [12.0, 42.0],
        backward_retained_bytes=np.full(4, 2.0),
        cost=both * [0.0, 1.0],
        gap_bytes=np.array([4.0, 0.0, 0.0, 0.0, 3.0]),
        gap_transient_bytes=np.array([6.0, 0.0, 0.0, 0.0, 16.0]),
        start_bytes=40.0,
        budget_bytes=budget,
        host_bytes=np.zeros((4, 2)),
        host_budget_bytes=0.0,
    )


def segments(plan: Plan) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield (name, colour, level at the start, at the end, peak) of what changes."""
    step = problem(BUDGET)
    choice = np.array([step.actions.index(action) for action in plan.actions])
    line = lay_out(step, choice)
    freed = step.held_bytes[0, choice[0]] - step.backward_retained_bytes[0]
    levels = [*line.level_bytes, line.level_bytes[-1] - freed]
    for index, name in enumerate(line.segments):
        level, after = float(levels[index]), float(levels[index + 1])
        peak = float(line.peak_bytes_by_segment[index])
        if peak == level == after:
            continue
        call = next((i for i, e in enumerate(step.calls) if name.endswith(e)), None)
        colour = OTHER
        if call is not None and not name.startswith("gap"):
            colour = KEEP if plan.actions[call] == "keep" else RECOMPUTE
        yield name, colour, level, after, peak


def text(x: float, y: float, words: str, *, size: int = 12, **style: str) -> str:
    """Write words."""
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{extra}>{words}</text>'


def panel(plan: Plan, top: float, title: str) -> Iterator[str]:
    """Draw one plan."""
    floor = top + PANEL - 62
    rows = list(segments(plan))
    right = LEFT + WIDE * len(rows)

    def height(n_bytes: float) -> float:
        return floor - TALL * n_bytes

    yield text(LEFT, top + 4, title, size=14, font_weight="600")
    outline = [f"M{LEFT} {height(rows[0][2]):g}"]
    for index, (name, colour, level, after, peak) in enumerate(rows):
        x = LEFT + WIDE * index
        rise = TALL * (peak - level)
        yield (
            f'<rect x="{x}" y="{height(level):g}" width="{WIDE}" '
            f'height="{TALL * level:g}" fill="{colour}" opacity="0.30"/>'
        )
        yield (
            f'<rect x="{x + 1}" y="{height(peak):g}" width="{WIDE - 2}" '
            f'height="{rise:g}" fill="{colour}" opacity="0.13"/>'
        )
        yield (
            f'<path d="M{x + 1} {height(peak):g}h{WIDE - 2}" stroke="{colour}" '
            f'stroke-width="2.5"/>'
        )
        outline.append(f"H{x + WIDE} V{height(after):g}")
        words = name.replace(" of layer", "").replace("gap before layer 1", "embed")
        for row, word in enumerate(words.split()):
            at = x + WIDE / 2, floor + 16 + 14 * row
            yield text(*at, word, size=11, text_anchor="middle")
    yield (
        f'<path d="{" ".join(outline)}" fill="none" stroke="{INK}" stroke-width="1.6"/>'
    )
    y = height(BUDGET)
    yield (
        f'<path d="M{LEFT} {y:g}H{right}" stroke="#b3261e" stroke-width="1.5" '
        f'stroke-dasharray="6 4"/>'
    )
    yield text(right + 6, y + 4, "budget", fill="#b3261e")
    yield f'<path d="M{LEFT} {floor}H{right}" stroke="{INK}"/>'
    marks = [LEFT + WIDE * i for i in range(len(rows) + 1)]
    marks += [  # a recomputation lies inside its layer's backward
        LEFT + WIDE * i + WIDE / 2
        for i, (name, colour, *_) in enumerate(rows)
        if name.startswith("backward") and colour == RECOMPUTE
    ]
    for x in sorted(marks):
        yield f'<circle cx="{x:g}" cy="{floor}" r="3.2" fill="{INK}"/>'


def drawing() -> str:
    """Return the whole picture."""
    everything = make_planner("none").plan(problem(BUDGET))
    chosen = make_planner("optimal").plan(problem(BUDGET))
    recomputed = [
        e for e, a in zip(chosen_calls(), chosen.actions, strict=True) if a != "keep"
    ]
    lines = [
        *panel(everything, 24, "Everything kept: over the budget"),
        *panel(chosen, 24 + PANEL, f"A plan: {' and '.join(recomputed)} recomputed"),
        *legend(30 + 2 * PANEL),
    ]
    width, tall = 750, 62 + 2 * PANEL
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" '
        f'font-family="system-ui, sans-serif" fill="{INK}">'
    )
    ground = f'<rect width="{width}" height="{tall}" rx="8" fill="#ffffff"/>'
    title = "<title>Memory through one training step under two plans</title>"
    return "\n".join([head, title, ground, *lines, "</svg>", ""])


def chosen_calls() -> tuple[str, ...]:
    """Return the layers' names."""
    return problem(BUDGET).calls


def legend(y: float) -> Iterator[str]:
    """Say what the signs mean."""
    x = float(LEFT)
    for colour, words, width in (
        (KEEP, "kept", 62),
        (RECOMPUTE, "recomputed", 104),
        (OTHER, "outside the layers", 146),
    ):
        yield f'<rect x="{x:g}" y="{y - 10}" width="14" height="11" fill="{colour}"/>'
        yield text(x + 20, y, words, fill=SOFT)
        x += width
    yield f'<path d="M{x:g} {y - 4}h18" stroke="{INK}" stroke-width="1.6"/>'
    yield text(x + 24, y, "held at a segment's start", fill=SOFT)
    x += 186
    yield f'<path d="M{x:g} {y - 4}h18" stroke="{KEEP}" stroke-width="2.5"/>'
    yield text(x + 24, y, "its peak", fill=SOFT)
    x += 88
    yield f'<circle cx="{x:g}" cy="{y - 4}" r="3.2" fill="{INK}"/>'
    yield text(x + 10, y, "mark", fill=SOFT)


if __name__ == "__main__":
    Path(__file__).with_name("step.svg").write_text(drawing(), encoding="utf-8")
