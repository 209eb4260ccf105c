"""Of which methods it is not known how fast they are, or whether a batch fits."""

from __future__ import annotations

import re

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.methods import METHODS
from mimose.predictors.throughput import REACH

_NOT_FOR_ALL = ("sdpa", "offload")
"""Of these nothing is measured where a model cannot have them."""
_UNREACHED = re.compile(r"no time was left for (?P<names>[^:]*)")
"""A note of measuring: these methods are not among those measured."""


def fits_untimed(advice: Advice) -> list[str]:
    """Return exact methods with which the batch fits, and that no choice compares."""
    return [
        each.name
        for each in advice.methods
        if each.is_exact
        and each.fits_sample
        and advice.measurements.batch <= REACH * each.highest
        and not _is_compared(advice, each.name)
    ]


def room_untimed(advice: Advice) -> list[str]:
    """Return exact methods that fit with some batch, and that no choice compares."""
    return [
        each.name
        for each in advice.methods
        if each.is_exact
        and not each.why_not
        and each.largest_batch != 0
        and not _is_usable(advice, each.name)
    ]


def fits_unknown(advice: Advice) -> list[str]:
    """Return exact methods of which nobody knows whether the batch fits with them."""
    far = advice.measurements.batch
    measured = [
        each.name
        for each in advice.methods
        if each.is_exact
        and not _is_compared(advice, each.name)
        and (
            each.fits_sample is None
            or (each.fits_sample and far > REACH * each.highest)
        )
        and not (each.why_not and each.name in _NOT_FOR_ALL)
    ]
    return [*measured, *unreached(advice)]


def room_unknown(advice: Advice) -> list[str]:
    """Return exact methods of which nobody knows whether any batch fits with them."""
    measured = [
        each.name
        for each in advice.methods
        if each.is_exact and each.why_not and each.name not in _NOT_FOR_ALL
    ]
    return [*measured, *unreached(advice)]


def unreached(advice: Advice) -> list[str]:
    """Return exact methods that were left out for lack of time."""
    found = map(_UNREACHED.match, advice.measurements.notes)
    names = [name for note in found if note for name in note["names"].split(", ")]
    return [name for name in names if name in METHODS and METHODS[name].is_exact]


def _is_usable(advice: Advice, name: str) -> bool:
    return name in advice.models and advice.models[name].is_usable


def _is_compared(advice: Advice, name: str) -> bool:
    """Tell whether the choice at the batch that is given counts a method."""
    if not _is_usable(advice, name):
        return False
    return advice.measurements.batch <= advice.models[name].farthest
