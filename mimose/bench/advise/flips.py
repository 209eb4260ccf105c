"""The memory sizes at which another method becomes the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mimose.bench.advise.models import Model
from mimose.bench.advise.ties import noise_of

_SIZES = 200
FURTHEST = 4.0
"""From the memory asked about, down and up."""
_CLEARLY = 0.01
"""Another method has to be faster by such a share, however little noise there is: else
two that are as fast flip at every batch."""
_PRECISION = 1e-3


class Flip(NamedTuple):
    """Where the fastest method changes."""

    memory_bytes: float
    before: str
    """The fastest with less; empty where nothing fits."""
    after: str
    ties: tuple[str, ...]
    """Those that are as fast as `after` there, within the noise."""
    batch: float
    """With which `after` is the fastest there."""


def flips(
    models: Sequence[Model], spreads: Mapping[str, float], memory_bytes: float
) -> tuple[Flip, ...]:
    """Return where the method of the best throughput changes, least memory first.

    Samples are not whole here: with whole ones throughput is a stair, and two stairs
    cross many times. Looked at are 200 sizes from a quarter to four times the memory,
    as far as the fastest one's batches stay within twice those measured; a change
    between two of them is then halved down to one in a thousand. As long as another
    method is faster by no more than the noise, nothing changes.

    Args:
        models: The methods.
        spreads: By name, the standard error of a method's medians as a share.
        memory_bytes: About which.
    """
    race = _Race([model for model in models if model.is_usable], spreads)
    sizes = np.geomspace(memory_bytes / FURTHEST, memory_bytes * FURTHEST, _SIZES)
    found = []
    name = ""
    for low, high in itertools.pairwise(float(size) for size in sizes):
        if race.is_far(name, high):
            break
        if race.fastest(high, name) == name:
            continue
        at = race.between(low, high, name)
        then = race.fastest(at, name)
        ties, batch = race.ties(at, then), race.batch(at, then)
        found.append(Flip(at, name, then, ties, batch))
        name = then
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Race:
    """Methods against each other at any memory."""

    models: Sequence[Model]
    spreads: Mapping[str, float]

    def fastest(self, memory_bytes: float, now: str) -> str:
        """Return the fastest; the one so far unless another is clearly faster."""
        rates = self._rates(memory_bytes)
        best = max(rates, key=lambda name: rates[name], default="")
        if not best:
            return ""
        return best if self._is_clear(rates[best], best, rates, now) else now

    def ties(self, memory_bytes: float, name: str) -> tuple[str, ...]:
        """Return the others that nobody can tell from this one."""
        rates = self._rates(memory_bytes)
        return tuple(
            each
            for each in rates
            if each != name and not self._is_clear(rates[name], name, rates, each)
        )

    def is_far(self, name: str, memory_bytes: float) -> bool:
        """Tell whether a method's largest batch is beyond what may be told."""
        return any(
            model.largest_batch(memory_bytes, whole=False) > model.farthest
            for model in self.models
            if model.name == name
        )

    def batch(self, memory_bytes: float, name: str) -> float:
        """Return a method's best batch."""
        model = next(each for each in self.models if each.name == name)
        return model.best(memory_bytes, whole=False).batch

    def between(self, low: float, high: float, name: str) -> float:
        """Return the memory at which this one is no more the fastest."""
        while high / low > 1.0 + _PRECISION:
            middle = (low * high) ** 0.5
            if self.fastest(middle, name) == name:
                low = middle
            else:
                high = middle
        return high

    def _rates(self, memory_bytes: float) -> dict[str, float]:
        """Return the best throughput of each that fits."""
        found = {
            model.name: model.best(memory_bytes, whole=False).samples_per_second
            for model in self.models
        }
        return {name: rate for name, rate in found.items() if rate > 0.0}

    def _is_clear(
        self, rate: float, name: str, rates: Mapping[str, float], other: str
    ) -> bool:
        """Tell whether one is faster than another by more than the noise."""
        if other not in rates:
            return True
        margin = max(_CLEARLY, noise_of(self.spreads, name, other))
        return rate > (1.0 + margin) * rates[other]
