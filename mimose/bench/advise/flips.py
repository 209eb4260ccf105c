"""The memory sizes at which another method becomes the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mimose.bench.advise.models import Model

_SIZES = 200
FURTHEST = 4.0
"""From the memory asked about, down and up."""
_CLEARLY = 1.01
"""Another method has to be so many times faster: else two that are as fast flip at
every batch."""
_PRECISION = 1e-3
_REACH = 2.0
"""How many times the largest batch measured an answer may be about."""


class Flip(NamedTuple):
    """Where the fastest method changes."""

    memory_bytes: float
    before: str
    """The fastest with less; empty where nothing fits."""
    after: str


def flips(models: Sequence[Model], memory_bytes: float) -> tuple[Flip, ...]:
    """Return where the method of the best throughput changes, least memory first.

    Samples are not whole here: with whole ones throughput is a stair, and two stairs
    cross many times. Looked at are 200 sizes from a quarter to four times the memory,
    as far as batches stay within twice those measured; a change between two of them is
    then halved down to one in a thousand.

    Args:
        models: The methods.
        memory_bytes: About which.
    """
    usable = [model for model in models if model.is_usable]
    sizes = np.geomspace(memory_bytes / FURTHEST, memory_bytes * FURTHEST, _SIZES)
    found = []
    name = ""
    for low, high in itertools.pairwise(float(size) for size in sizes):
        if any(
            model.largest_batch(high, whole=False) > _REACH * model.highest
            for model in usable
            if model.name == name
        ):
            break
        then = _fastest(usable, high, name)
        if then != name:
            found.append(Flip(_between(usable, low, high, name), name, then))
            name = then
    return tuple(found)


def _fastest(models: Sequence[Model], memory_bytes: float, now: str) -> str:
    """Return the fastest; the one so far unless another is clearly faster."""
    rates = {
        model.name: model.best(memory_bytes, whole=False).samples_per_second
        for model in models
    }
    best = max(rates, key=lambda name: rates[name], default="")
    if not best or rates[best] <= 0.0:
        return ""
    return best if rates[best] > _CLEARLY * rates.get(now, 0.0) else now


def _between(models: Sequence[Model], low: float, high: float, name: str) -> float:
    while high / low > 1.0 + _PRECISION:
        middle = (low * high) ** 0.5
        if _fastest(models, middle, name) == name:
            low = middle
        else:
            high = middle
    return high
