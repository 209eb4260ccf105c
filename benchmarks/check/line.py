"""One line of the table: what was expected, what was seen, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

HOLDS, MISSED, INFORMATION = "holds", "MISSED", "information"
_IMPOSSIBLE = "not possible here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One observation."""

    what: str
    expected: str
    seen: str
    verdict: str
    """`HOLDS`, `MISSED`, `INFORMATION`, or ``not possible here: `` and why."""


Check: TypeAlias = Callable[[torch.device], Iterator[Line]]


def judged(what: str, expected: object, seen: object, holds: bool) -> Line:
    """Return a line with a verdict."""
    verdict = HOLDS if holds else MISSED
    return Line(what=what, expected=str(expected), seen=str(seen), verdict=verdict)


def equal(what: str, expected: object, seen: object) -> Line:
    """Return a line that holds where both are equal."""
    return judged(what, expected, seen, expected == seen)


def at_most(what: str, limit: float, seen: float | None, form: str) -> Line:
    """Return a line that holds up to a limit; nothing seen misses it.

    Args:
        what: What was looked at.
        limit: The most it may be.
        seen: What it is.
        form: A format for both, such as ``"{:.1%}"``.
    """
    text = "nothing" if seen is None else form.format(seen)
    holds = seen is not None and seen <= limit
    return judged(what, f"≤ {form.format(limit)}", text, holds)


def none_over(name: str, over: int, steps: int) -> Line:
    """Return a line that holds where no step was over the budget."""
    what = f"{name}: steps over the budget"
    return equal(what, f"0 of {steps}", f"{over} of {steps}")


def told(what: str, seen: object, expected: str = "") -> Line:
    """Return a line without a verdict."""
    return Line(what=what, expected=expected, seen=str(seen), verdict=INFORMATION)


def impossible(what: str, why: str, seen: object = "") -> Line:
    """Return a line for what cannot be looked at here."""
    return Line(what=what, expected="", seen=str(seen), verdict=f"{_IMPOSSIBLE}: {why}")
