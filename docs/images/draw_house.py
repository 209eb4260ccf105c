"""Draw the packages and what flows between them: ``docs/images/house.svg``.

python docs/images/draw_house.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

WIDTH, TALL = 800, 430
INK, SOFT, PLAIN, TORCH = "#1f2430", "#5b6270", "#2f6db5", "#d9822b"
BOXES = (  # name, what it does, left, top, width, whether it knows torch
    ("session.py", "attach; runtime/engine.py makes all parts", 70, 14, 640, True),
    ("inputs", "what arrives", 70, 100, 100, True),
    ("policy", "phase, plan", 256, 100, 100, False),
    ("distributed", "ranks agree", 432, 100, 108, True),
    ("runtime", "runs the step", 616, 100, 100, True),
    ("planners", "solve, judge", 70, 220, 100, False),
    ("cost", "what it needs", 256, 220, 100, False),
    ("exactness", "may it run twice?", 432, 220, 108, True),
    ("actions", "run a layer call", 616, 220, 100, True),
    ("predictors", "fits", 70, 312, 100, False),
    ("worker.py", "beside training", 256, 312, 100, False),
    ("records.py", "what report/ tells", 432, 312, 108, False),
    ("measure, memory", "marks, meters, wall", 596, 312, 140, True),
)
ARROWS = (  # corners, what flows, where that is written
    (((14, 126), (70, 126)), "call", (34, 118)),
    (((170, 126), (256, 126)), "StepInput", (213, 118)),
    (((356, 126), (432, 126)), "Decision", (394, 118)),
    (((540, 126), (616, 126)), "Decision", (578, 118)),
    (((716, 126), (790, 126)), "output", (750, 118)),
    (((666, 100), (666, 78), (306, 78), (306, 100)), "", (0, 0)),
    (((666, 144), (666, 220)), "layer call", (698, 190)),
    (((540, 246), (616, 246)), "state", (578, 238)),
    (((666, 264), (666, 312)), "boundaries", (702, 292)),
    (((306, 220), (306, 144)), "cost model", (342, 190)),
    (((276, 144), (276, 206), (120, 206), (120, 220)), "problem", (160, 199)),
    (((90, 220), (90, 178), (264, 178), (264, 144)), "plan", (130, 171)),
    (((170, 338), (210, 338), (210, 246), (256, 246)), "fits", (228, 238)),
    (((306, 312), (306, 264)), "lessons", (332, 292)),
    (((716, 140), (770, 140), (770, 390), (306, 390), (306, 356)), "", (0, 0)),
    (((486, 390), (486, 356)), "", (0, 0)),
)
HEIGHT = 44


def text(x: float, y: float, words: str, *, size: int = 11, **style: str) -> str:
    """Write words, centred."""
    extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle"{extra}>'
        f"{words}</text>"
    )


def arrow(corners: Sequence[tuple[int, int]]) -> str:
    """Draw a line through some points, with a head at the last."""
    (x0, y0), (x, y) = corners[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    line = " ".join(f"{a},{b}" for a, b in (*corners[:-1], (x - 6 * dx, y - 6 * dy)))
    back, side = (x - 8 * dx, y - 8 * dy), (4 * dy, 4 * dx)
    wings = " ".join(
        f"{back[0] + sign * side[0]},{back[1] + sign * side[1]}" for sign in (1, -1)
    )
    return (
        f'<polyline points="{line}" fill="none" stroke="{INK}" stroke-width="1.3"/>'
        f'<polygon points="{x},{y} {wings}" fill="{INK}"/>'
    )


def parts() -> Iterator[str]:
    """Draw boxes, arrows and what they are."""
    for name, does, x, y, width, knows_torch in BOXES:
        colour = TORCH if knows_torch else PLAIN
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="5" '
            f'fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>'
        )
        middle = x + width / 2
        yield text(middle, y + 19, name, size=13, font_weight="600")
        yield text(middle, y + 35, does, fill=SOFT)
    for corners, words, (x, y) in ARROWS:
        yield arrow(corners)
        if words:
            yield text(x, y, words)
    yield text(486, 72, "StepOutcome: how far the prediction was off")
    yield text(606, 384, "StepOutcome: samples, records")
    for x, colour, words in ((92, PLAIN, "knows no torch"), (222, TORCH, "torch")):
        yield f'<rect x="{x - 20}" y="404" width="14" height="11" fill="{colour}"/>'
        yield f'<text x="{x}" y="414" font-size="12" fill="{SOFT}">{words}</text>'


def drawing() -> str:
    """Return the whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TALL}" '
        f'font-family="system-ui, sans-serif" fill="{INK}">'
    )
    title = "<title>The packages, and what flows between them in a step</title>"
    ground = f'<rect width="{WIDTH}" height="{TALL}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, title, ground, *parts(), "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("house.svg").write_text(drawing(), encoding="utf-8")
