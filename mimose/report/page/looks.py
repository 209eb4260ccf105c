"""What all figures share: colours, words and units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Okabe and Ito's palette: told apart with any colour vision, and in grey.
PHASE_COLOURS = {
    "collect": "#CC79A7",
    "step_down": "#E69F00",
    "plan": "#0072B2",
    "fallback": "#D55E00",
}
PHASE_SYMBOLS = {
    "collect": "diamond",
    "step_down": "triangle",
    "plan": "circle",
    "fallback": "square",
}
PHASE_WORDS = {
    "collect": "measuring: everything recomputed",
    "step_down": "first plans, checked",
    "plan": "planned",
    "fallback": "safest plan",
}
ACTION_COLOURS = {
    "keep": "#DDDDDD",
    "recompute": "#0072B2",
    "selective": "#56B4E9",
    "offload": "#009E73",
    "quantize": "#CC79A7",
    "pool": "#E69F00",
}
ACTION_WORDS = {
    "keep": "keep: its activations are held until backward",
    "recompute": "recompute: its forward runs a second time in backward",
    "selective": "selective: the costly part is kept, the cheap one recomputed",
    "offload": "offload: its activations wait in the host's memory",
    "quantize": "quantize: its activations are held in fewer bits",
    "pool": "pool: its activations are held in a smaller form",
}
OTHER_COLOUR = "#F0E442"
INK = "#222222"

_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FLOP_UNITS = (
    (10**18, "EFLOP"),
    (10**15, "PFLOP"),
    (10**12, "TFLOP"),
    (10**9, "GFLOP"),
)
_TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the page, with what is written above it."""

    name: str
    title: str
    caption: str
    picture: str = ""
    """HTML; empty if there is nothing to draw: the caption then says why, or what."""


def nothing(name: str, title: str, why: str) -> Figure:
    """Make a figure that says why it is not there, or what it would have shown."""
    return Figure(name, title, why)


def byte_unit(n_bytes: Iterable[float]) -> tuple[int, str]:
    """Choose the unit that fits the largest of some numbers of bytes."""
    largest = max(map(abs, n_bytes), default=0.0)
    return next((u for u in _BYTE_UNITS if largest >= u[0]), _BYTE_UNITS[1])


def flop_unit(flops: float) -> tuple[int, str]:
    """Choose the unit that fits a number of FLOPs."""
    return next((u for u in _FLOP_UNITS if flops >= u[0]), (10**6, "MFLOP"))


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose the unit that fits a time."""
    return next((u for u in _TIME_UNITS if seconds >= u[0]), (1e-3, "ms"))


def format_flops(flops: float) -> str:
    """Write a number of FLOPs for people.

    >>> format_flops(3_120_000_000)
    '3.12 GFLOP'
    """
    factor, unit = flop_unit(flops)
    return f"{_three_figures(flops / factor)} {unit}"


def format_seconds(seconds: float) -> str:
    """Write a time for people.

    >>> format_seconds(0.0123), format_seconds(5400)
    ('12.3 ms', '1.5 h')
    """
    factor, unit = time_unit(seconds)
    return f"{_three_figures(seconds / factor)} {unit}"


def _three_figures(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """Write how many there are of something.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
