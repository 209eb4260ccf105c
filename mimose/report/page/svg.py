"""Pictures as SVG: panels with two axes, one above the other, and their legend.

A picture is drawn here once, from numbers; the browser runs nothing to show it. What is
written in a point's `text` appears under the mouse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mimose.report.page.looks import INK
from mimose.report.page.marks import label, symbol
from mimose.report.page.scales import Extent, ticks

WIDTH = 1100
"""Of every picture; the browser fits it to the window."""
_LEFT = 92
_RIGHT = 20
_TOP = 22
_GAP = 38
_BOTTOM = 50
_LETTERS = 15.0
"""Between two lines of letters."""
_RIGHT_PART = 0.75
"""Behind this share of the axis the name of a rule stands to its left."""
_GRID = "#EBEBEB"
_FAINT = "#555555"


@dataclass(frozen=True, slots=True)
class Point:
    """A dot, with a bar where it stands for several values."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    symbol: str = ""
    """Of this dot; "" for that of its series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points that look alike, under one name in the legend."""

    name: str
    colour: str
    points: Sequence[Point]
    symbol: str = "circle"
    size: float = 3.5
    """Half a dot's width, in pixels; 0 for no dots."""
    line: float = 0.0
    """Width of the line that joins the points; 0 for none."""
    dash: str = ""
    opacity: float = 0.8
    tag: str = ""
    """Stands at the last point, as far above the others' as it takes to be read."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across a panel, or down it."""

    at: float
    label: str = ""
    is_vertical: bool = False
    dash: str = "7 4"
    to: float | None = None
    """Where a band ends that begins at the line; None for no band."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Series over the same two axes."""

    x: Extent
    y: Extent
    x_title: str
    y_title: str
    series: Sequence[Series]
    rules: Sequence[Rule] = ()
    height: int = 330
    """Between the axes, in pixels."""
    note: str = ""
    """Stands at the top, for what lies beyond."""


def draw(panels: Sequence[Panel], label: str) -> str:
    """Draw panels one above the other, on one axis across, and the legend above.

    Args:
        panels: At least one.
        label: What the picture is, for those who hear it.
    """
    height = sum(panel.height + _GAP for panel in panels) + _TOP + _BOTTOM - _GAP
    parts: list[str] = []
    top = float(_TOP)
    for panel in panels:
        is_last = panel is panels[-1]
        parts += _panel(panel, top, is_last=is_last)
        top += panel.height + _GAP
    series = [each for panel in panels for each in panel.series]
    return "\n".join([legend(_keys(series)), picture(parts, height, label)])


def picture(parts: Sequence[str], height: float, label: str) -> str:
    """Put the parts of a picture into one.

    Args:
        parts: SVG.
        height: In pixels.
        label: What the picture is.
    """
    return (
        f'<div class="picture"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">\n' + "\n".join(parts) + "\n</svg></div>"
    )


def legend(keys: Sequence[tuple[str, str]]) -> str:
    """Write a legend: each name behind what it looks like; a click hides it.

    Args:
        keys: Names, and the SVG of a mark around (8, 8).
    """
    items = "".join(
        f'<li><button aria-pressed="true" data-key="{escape(name)}">'
        f'<svg width="16" height="16" aria-hidden="true">{mark}</svg> '
        f"{escape(name)}</button></li>"
        for name, mark in keys
    )
    return f'<ul class="legend">{items}</ul>' if keys else ""


def _keys(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return a key for each name; a line and its dots, of two series, share one."""
    found: dict[str, str] = {}
    only_lines = set()
    for each in series:
        if each.name and each.name not in found:
            found[each.name] = _key(each)
            if each.line and not each.size:
                only_lines.add(each.name)
        elif each.name in only_lines and each.size and not each.line:
            found[each.name] += _key(each)
            only_lines.remove(each.name)
    return list(found.items())


def _key(series: Series) -> str:
    mark = ""
    if series.line:
        mark = (
            f'<path d="M0 8h16" stroke="{series.colour}" stroke-width="{series.line}"'
            f'{_dashed(series.dash)} fill="none"/>'
        )
    if series.size:
        inside = symbol(series.symbol, 8, 8, min(6.0, series.size + 1))
        mark += f'<path d="{inside}" {_paint(series)}/>'
    return mark


def _panel(panel: Panel, top: float, *, is_last: bool) -> Iterator[str]:
    bottom = top + panel.height
    right = WIDTH - _RIGHT
    for value, text in ticks(panel.y, max(3, panel.height // 50)):
        y = bottom - panel.height * panel.y.place(value)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{_GRID}"/>'
        yield label(text, _LEFT - 8, y + 4, anchor="end")
    for value, text in ticks(panel.x, 8):
        x = _x(panel, value)
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="{_GRID}"/>'
        if is_last:
            yield label(text, x, bottom + 18, anchor="middle")
    yield f'<path d="M{_LEFT} {top}V{bottom}H{right}" stroke="#999" fill="none"/>'
    middle = (top + bottom) / 2
    yield (
        f'<text transform="translate(20 {middle:.0f})rotate(-90)" '
        f'text-anchor="middle">{escape(panel.y_title)}</text>'
    )
    if is_last:
        yield label(panel.x_title, (_LEFT + right) / 2, bottom + 42, anchor="middle")
    for series in panel.series:
        yield from _series(panel, series, bottom)
    for rule in panel.rules:
        yield from _rule(panel, rule, top, bottom)
    yield from _rule_names(panel, bottom)
    yield from _tags(panel, top, bottom)
    if panel.note:
        yield label(panel.note, right - 6, top - 6, anchor="end", colour=_FAINT)


def _x(panel: Panel, value: float) -> float:
    return _LEFT + (WIDTH - _RIGHT - _LEFT) * panel.x.place(value)


def _series(panel: Panel, series: Series, bottom: float) -> Iterator[str]:
    yield (
        f'<g data-key="{escape(series.name)}" opacity="{series.opacity:g}" '
        f"{_paint(series)}>"
    )
    at = [
        (_x(panel, p.x), bottom - panel.height * panel.y.place(p.y))
        for p in series.points
    ]
    if series.line and at:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        yield (
            f'<path d="M{path}" fill="none" stroke="{series.colour}" '
            f'stroke-width="{series.line:g}"{_dashed(series.dash)}/>'
        )
    for point, (x, y) in zip(series.points, at, strict=True):
        yield _point(panel, series, point, x, y, bottom)
    yield "</g>"


def _point(
    panel: Panel, series: Series, point: Point, x: float, y: float, bottom: float
) -> str:
    """Draw a dot; one beyond the axis stands at its end, as an arrow."""
    side = panel.y.beyond(point.y)
    kind = {0: point.symbol or series.symbol, 1: "up", -1: "down"}[side]
    path = symbol(kind, x, y, series.size) if series.size else ""
    if point.low is not None and point.high is not None:
        ends = (
            bottom - panel.height * panel.y.place(end)
            for end in (point.low, point.high)
        )
        first, last = ends
        if first - last > 0.1:
            path += f"M{x:.1f} {first:.1f}V{last:.1f}"
    if not path:
        return ""
    if not point.text:
        return f'<path d="{path}"/>'
    return f'<path d="{path}"><title>{escape(point.text, quote=False)}</title></path>'


def _paint(series: Series) -> str:
    is_hollow = series.symbol in ("ring", "cross", "dash")
    fill = "none" if is_hollow else series.colour
    width = 2 if is_hollow else 1.6
    return f'fill="{fill}" stroke="{series.colour}" stroke-width="{width}"'


def _rule(panel: Panel, rule: Rule, top: float, bottom: float) -> Iterator[str]:
    if rule.is_vertical:
        path = f"M{_x(panel, rule.at):.1f} {top}V{bottom}"
    else:
        y = bottom - panel.height * panel.y.place(rule.at)
        path = f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"
        if rule.to is not None:
            end = bottom - panel.height * panel.y.place(rule.to)
            yield f'<path d="{path}V{end:.1f}H{_LEFT}z" fill="{INK}" opacity="0.08"/>'
        if rule.label:
            yield label(rule.label, _LEFT + 8, y - 6)
    yield f'<path d="{path}" stroke="{INK}" stroke-width="1.3"{_dashed(rule.dash)}/>'


def _rule_names(panel: Panel, bottom: float) -> Iterator[str]:
    """Name rules that go down, each a line higher than the one to its left."""
    named = [rule for rule in panel.rules if rule.is_vertical and rule.label]
    for row, rule in enumerate(sorted(named, key=lambda rule: rule.at)):
        x = _x(panel, rule.at)
        is_right = panel.x.place(rule.at) > _RIGHT_PART
        at, anchor = (x - 5, "end") if is_right else (x + 5, "start")
        yield label(rule.label, at, bottom - 6 - _LETTERS * row, anchor=anchor)


def _tags(panel: Panel, top: float, bottom: float) -> Iterator[str]:
    """Name series at their last points, none over another."""
    ends = [
        (bottom - panel.height * panel.y.place(each.points[-1].y) - 4, each)
        for each in panel.series
        if each.tag and each.points
    ]
    ends.sort(key=lambda end: -end[0])
    at: list[float] = []
    for y, _ in ends:
        at.append(min(y, at[-1] - _LETTERS if at else bottom))
    pushed = top + _LETTERS
    for row in reversed(range(len(at))):
        at[row] = max(at[row], pushed)
        pushed = at[row] + _LETTERS
    for y, (_, series) in zip(at, ends, strict=True):
        text = label(series.tag, _x(panel, series.points[-1].x) - 4, y, anchor="end")
        yield f'<g data-key="{escape(series.name)}">{text}</g>'


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""
