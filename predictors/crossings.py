"""The memory sizes at which another method becomes the fastest."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .throughput import MethodModel


_APART = 1e-9
"""Sizes nearer to each other are one."""


class Flip(NamedTuple):
    """Where the fastest method changes."""

    memory_bytes: float
    before: str | None
    """The fastest just below; None where none fits."""
    after: str | None
    """The fastest just above."""


class _Piece(NamedTuple):
    """Seconds a sample, ``p + q / batch`` with ``batch = (bytes - base) / slope``."""

    p: float
    q: float
    base: float
    slope: float


def flips(
    models: Sequence[MethodModel], memory_low: float, memory_high: float
) -> list[Flip]:
    """Return where the method of the best throughput changes, least memory first.

    Seconds a sample are a ratio of two lines in the memory, piece by piece, so that two
    methods cross at roots of quadratics: they are found exactly, not by a search. Here
    samples are not whole; with whole ones best throughputs are stairs, which cross many
    times around each of these sizes. A method of which not one sample fits is out.

    Args:
        models: At least one; of methods that are as fast the first one is named.
        memory_low: Bytes.
        memory_high: Bytes, more.

    Raises:
        ValueError: The sizes are not positive, finite and in order.
    """
    if not 0.0 < memory_low < memory_high < math.inf:
        msg = (
            f"memory from {memory_low} to {memory_high} bytes: both have to be "
            "positive and finite, the first one smaller"
        )
        raise ValueError(msg)
    places = [memory_low]
    for at in sorted(_places(models)):
        if places[-1] * (1.0 + _APART) < at < memory_high * (1.0 - _APART):
            places.append(at)
    places.append(memory_high)
    found: list[Flip] = []
    before = _fastest(models, (places[0] + places[1]) / 2.0)
    for at, then in itertools.pairwise(places[1:]):
        after = _fastest(models, (at + then) / 2.0)
        if after != before:
            found.append(Flip(at, before, after))
        before = after
    return found


def _fastest(models: Sequence[MethodModel], memory_bytes: float) -> str | None:
    rates = [
        model.best_throughput(memory_bytes, whole=False).samples_per_second
        for model in models
    ]
    most = max(rates, default=0.0)
    return models[rates.index(most)].name if most > 0.0 else None


def _places(models: Sequence[MethodModel]) -> Iterator[float]:
    """Yield every size at which the fastest may change, and others."""
    for model in models:
        yield from _ends(model)
    for one, other in itertools.combinations(models, 2):
        for pair in itertools.product(_pieces(one), _pieces(other)):
            yield from _crossings(*pair)


def _ends(model: MethodModel) -> Iterator[float]:
    """Yield where a method's throughput jumps: where it begins to fit, and a pole.

    Elsewhere it has no jumps, so that two methods change places at crossings only.
    """
    yield model.peak_bytes(1.0)
    seconds = model.seconds
    if seconds.intercept < 0.0 < seconds.slope:
        yield model.peak_bytes(-seconds.intercept / seconds.slope)


def _pieces(model: MethodModel) -> Iterator[_Piece]:
    """Yield what seconds a sample may be, whichever piece holds where."""
    memory, seconds = model.memory, model.seconds
    line = _Piece(seconds.slope, seconds.intercept, memory.intercept, memory.slope)
    yield line
    yield line._replace(p=0.0, q=seconds.floor)
    if seconds.intercept < 0.0:  # throughput rises no more
        yield line._replace(p=model.step_seconds(model.turn) / model.turn, q=0.0)


def _crossings(one: _Piece, other: _Piece) -> Iterator[float]:
    """Yield the sizes at which two pieces take as long a sample.

    ``p + q * slope / (bytes - base)`` of both are equal; multiplied out that is a
    quadratic in the bytes, taken from the first one's base for precision.
    """
    gap = other.base - one.base
    p = one.p - other.p
    mine, theirs = one.q * one.slope, other.q * other.slope
    # p * m * (m - gap) + mine * (m - gap) - theirs * m = 0, with m = bytes - one.base
    for root in _roots(p, mine - theirs - p * gap, -mine * gap):
        yield one.base + root


def _roots(a: float, b: float, c: float) -> Iterator[float]:
    """Yield the real roots of ``a * x**2 + b * x + c``."""
    if a == 0.0:
        if b != 0.0:
            yield -c / b
        return
    inner = b * b - 4.0 * a * c
    if inner < 0.0:
        return
    far = -(b + math.copysign(math.sqrt(inner), b)) / 2.0
    yield far / a
    if far != 0.0:
        yield c / far
