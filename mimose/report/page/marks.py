"""Marks and letters of pictures, as SVG."""

from __future__ import annotations

from html import escape

from mimose.report.page.looks import INK


def symbol(kind: str, x: float, y: float, r: float) -> str:
    """Return the path of a mark.

    Args:
        kind: circle, ring, diamond, triangle, square, cross, dash, up or down.
        x: Its middle, across.
        y: Its middle, down.
        r: Half its width.
    """
    if kind in ("circle", "ring"):
        half = f"a{r:g} {r:g} 0 1 0 "
        return f"M{x - r:.1f} {y:.1f}{half}{2 * r:g} 0{half}-{2 * r:g} 0"
    corners = {
        "diamond": ((-1, 0), (0, -1), (1, 0), (0, 1)),
        "triangle": ((-1, 0.8), (0, -1), (1, 0.8)),
        "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
        "dash": ((-1.6, 0), (1.6, 0)),
        "up": ((-1.3, 2), (0, 0), (1.3, 2)),
        "down": ((-1.3, -2), (0, 0), (1.3, -2)),
    }
    if kind == "cross":
        return (
            f"M{x - r:.1f} {y - r:.1f}l{2 * r:g} {2 * r:g}m0-{2 * r:g}l-{2 * r:g} "
            f"{2 * r:g}"
        )
    path = "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in corners[kind])
    return f"M{path}" if kind == "dash" else f"M{path}Z"


def label(
    text: str, x: float, y: float, *, anchor: str = "start", colour: str = INK
) -> str:
    """Write a text into a picture.

    Args:
        text: What.
        x: Its start, middle or end.
        y: The line it stands on.
        anchor: start, middle or end.
        colour: Of the letters.
    """
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
