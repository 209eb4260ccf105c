"""What a misspelt name of a module or a class was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3
_CUTOFF = 0.8
"""A letter or two apart. At difflib's own 0.6 half of all names resemble each other,
for they share their first parts."""


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the few names that may have been meant, the likeliest first.

    Names are compared part by part, from their ends: ``layer`` may have meant
    ``bert.encoder.layer``, and ``encoder.layr`` too. Of a module and what is in it the
    module is returned.

    Args:
        name: What was written.
        names: What there is.
    """
    scored = {other: _likeness(name, other) for other in names if other}
    found = sorted(
        (other for other, score in scored.items() if score >= _CUTOFF),
        key=lambda other: (-scored[other], len(other)),
    )
    outer = [one for one in found if not any(one.startswith(f"{o}.") for o in found)]
    return outer[:_MOST]


def _likeness(name: str, other: str) -> float:
    """Return how alike the least alike of two names' parts are, from 0 to 1."""
    parts, others = name.lower().split("."), other.lower().split(".")
    if len(parts) > len(others):
        return 0.0
    pairs = zip(parts, others[-len(parts) :], strict=True)
    return min(_part_likeness(one, two) for one, two in pairs)


def _part_likeness(one: str, two: str) -> float:
    if one == two:
        return 1.0
    if one.isdigit() or two.isdigit():
        return 0.0  # another layer is no misspelt one
    return difflib.SequenceMatcher(None, one, two).ratio()
