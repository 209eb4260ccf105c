"""Seconds that actions add, learned from the steps themselves.

Note: [Rates]
What an action adds follows from what it does: so long for each call, for each FLOP that
runs again, for each byte that is made again. A family's readings of an action, medians
by shape, give these three rates; with fewer shapes than rates they give one, of its
work in FLOPs. An action that was not timed in a family yet is put at what is known in
the same unit: its recomputation takes about what its forward took, anything else its
work at the usual rate. So all costs of a problem are seconds, or, before anything was
timed, all are FLOPs.

Note: [When plans are made anew]
Times are noisy, and a busy machine makes all of them longer at once, which changes no
plan. So newer rates take the place of those before without a word, and plans made so
far stay; only where costs have moved against each other by more than `_MOVED` since
plans were last thrown away, they are thrown away again. Rates are looked at when the
number of steps has doubled, and from some point on at even distances.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mimose.predictors import fit_rates
from mimose.types import Sizes

_MOVED = 1.15
"""So many times dearer, against the others, an action has to become."""
_LARGEST_GAP = 32
"""Steps between two looks at the rates, at the most."""
_FIRST_STEPS = 64
"""These all teach; then, taking a reading takes time as well, ..."""
_EVERY = 5
"""... one in so many."""
_MOST_READINGS = 8
"""Of one shape; the last ones."""
_MOST_SHAPES = 48
"""Of one action of a family; the last ones."""
_ENOUGH_SHAPES = 4
"""With fewer, one rate is fitted and not three."""
_UNKNOWN = 1e-10
"""Seconds of a FLOP, until one was timed: a CPU's core."""
_LEAST = 1e-9
"""Seconds that no action takes less than."""
_REPLAY_FLOPS = 25.0
"""FLOPs that take as long as rebuilding a byte by pointwise operators does, before any
is timed: they wait for memory, and run twice. On one CPU core 24% of a BERT layer's
time against 41% of its whole recomputation, which is its forward's FLOPs."""
FORWARD = "forward"
"""Stands for an action where the time of the forward itself is meant."""

Key: TypeAlias = tuple[str, str]
"""A family and an action."""


class Work(NamedTuple):
    """What an action does to one call, besides holding less."""

    flops: float
    """Run again."""
    freed_bytes: float
    """Let go, and there again in backward."""
    recomputes: bool = False
    """Whether it runs the forward as a whole."""
    replays: bool = False
    """Whether the bytes are made again, by operators that wait for memory."""

    @property
    def guess(self) -> float:
        """What it comes to in FLOPs, as long as nothing is timed."""
        if not self.replays:
            return self.flops
        return self.flops + _REPLAY_FLOPS * self.freed_bytes

    @property
    def parts(self) -> tuple[float, float, float]:
        """What has a rate of its own: the call, its FLOPs, its bytes."""
        return 1.0, self.flops, self.freed_bytes


@dataclass(frozen=True, slots=True)
class Seconds:
    """What an action adds, in seconds. Nothing in it is ever written to."""

    rates: Mapping[Key, tuple[float, float, float]]
    """By family and action: of a call, a FLOP, a byte."""
    usual: Mapping[str, float]
    """By action, seconds of a FLOP of its work, the median of all that was timed."""

    def of(self, family: str, action: str, work: Work) -> float:
        """Return what an action adds to one call.

        Args:
            family: The call's.
            action: Under which it runs.
            work: What that does.
        """
        rates = self.rates.get((family, action))
        if rates is None and work.recomputes:
            rates = self.rates.get((family, FORWARD))
        if rates is not None:
            a_call, a_flop, a_byte = rates
            seconds = a_call + a_flop * work.flops + a_byte * work.freed_bytes
            return max(_LEAST, seconds)
        usual = self.usual.get(action)
        if usual is None:  # of layers without products nothing is learned of FLOPs
            known = self.usual.values()
            usual = statistics.median(known) if known else _UNKNOWN
        return max(_LEAST, usual * work.guess)


class _Shape(NamedTuple):
    work: Work
    readings: deque[float]


class Timings:
    """Takes in readings; whoever plans gets `Seconds`, which do not change.

    Attributes:
        seconds: As of the last look at the rates; None before anything was timed.
    """

    def __init__(self) -> None:
        self.seconds: Seconds | None = None
        self._readings: dict[Key, dict[Sizes, _Shape]] = {}
        self._settled: Seconds | None = None
        """By which plans were last made anew."""
        self._n_offered = 0
        self._n_steps = 0
        self._next_look = 1

    def is_due(self) -> bool:
        """Take note of a step that could teach; return whether it is to."""
        self._n_offered += 1
        return self._n_offered <= _FIRST_STEPS or self._n_offered % _EVERY == 0

    def knows(self, key: Key, sizes: Sizes) -> bool:
        """Whether a shape of an action was timed."""
        return sizes in self._readings.get(key, ())

    def add(self, key: Key, sizes: Sizes, seconds: float, work: Work | None) -> None:
        """Take in a reading.

        Args:
            key: Of what.
            sizes: The event's own.
            seconds: How long it took.
            work: What was done; None where the shape is known.
        """
        shapes = self._readings.setdefault(key, {})
        if work is not None:
            while len(shapes) >= _MOST_SHAPES:
                del shapes[next(iter(shapes))]
            shapes[sizes] = _Shape(work, deque(maxlen=_MOST_READINGS))
        shapes[sizes].readings.append(seconds)

    def look(self) -> bool:
        """Take note of a step; return whether plans made so far are worth nothing.

        See Note: [When plans are made anew].
        """
        self._n_steps += 1
        if self._n_steps < self._next_look or not self._readings:
            return False
        self._next_look += min(self._n_steps, _LARGEST_GAP)
        self.seconds = self._fitted()
        if self._has_moved(self._settled, self.seconds):
            self._settled = self.seconds
            return True
        return False

    def keep(self, families: frozenset[str]) -> None:
        """Forget families that nobody knows any more."""
        self._readings = {k: s for k, s in self._readings.items() if k[0] in families}

    def _fitted(self) -> Seconds:
        rates, ratios = {}, dict[str, list[float]]()
        for key, shapes in self._readings.items():
            medians = [statistics.median(s.readings) for s in shapes.values()]
            works = [shape.work for shape in shapes.values()]
            counts = [float(len(shape.readings)) for shape in shapes.values()]
            own = [
                seconds / work.guess
                for seconds, work in zip(medians, works, strict=True)
                if work.guess > 0.0
            ]
            if own:
                ratios.setdefault(key[1], []).append(statistics.median(own))
            rates[key] = _rates(works, medians, counts, own)
        return Seconds(rates, {a: statistics.median(r) for a, r in ratios.items()})

    def _has_moved(self, old: Seconds | None, new: Seconds) -> bool:
        """Whether costs have moved against each other, for small or for large calls."""
        moves = list(self._moves(old, new))
        return any(max(end) > _MOVED * min(end) for end in zip(*moves, strict=True))

    def _moves(
        self, old: Seconds | None, new: Seconds
    ) -> Iterator[tuple[float, float]]:
        """Yield how many times dearer an action has become in a family.

        One number for its smaller half of shapes, and one for its larger.
        """
        recomputed = {
            family
            for (family, action), shapes in self._readings.items()
            if action != FORWARD and next(iter(shapes.values())).work.recomputes
        }
        for (family, action), shapes in self._readings.items():
            works = sorted(shape.work for shape in shapes.values() if shape.work.guess)
            if not works or (action == FORWARD and family in recomputed):
                continue
            half = (len(works) + 1) // 2
            yield (
                _move(old, new, family, action, works[:half]),
                _move(old, new, family, action, works[-half:]),
            )

    def state_dict(self) -> list[Any]:
        """Return the readings, ready for JSON."""
        return [
            [*key, list(sizes), list(shape.work), list(shape.readings)]
            for key, shapes in self._readings.items()
            for sizes, shape in shapes.items()
        ]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Take over what another one was told, in place of what is here.

        Args:
            state: What ``state_dict`` returned.
        """
        readings: dict[Key, dict[Sizes, _Shape]] = {}
        for family, action, sizes, (flops, freed, recomputes, replays), own in state:
            work = Work(float(flops), float(freed), bool(recomputes), bool(replays))
            shape = _Shape(work, deque(map(float, own), maxlen=_MOST_READINGS))
            shapes = readings.setdefault((str(family), str(action)), {})
            shapes[tuple(map(int, sizes))] = shape
        self._readings = readings
        self._n_steps, self._next_look = 0, 1
        self._settled = self.seconds = self._fitted() if readings else None


def _rates(
    works: Sequence[Work],
    medians: Sequence[float],
    counts: Sequence[float],
    ratios: Sequence[float],
) -> tuple[float, float, float]:
    """Return what a call, a FLOP and a byte take.

    Args:
        works: By shape.
        medians: Seconds.
        counts: Readings.
        ratios: Seconds of a FLOP of work, where there is any.
    """
    if not ratios:
        return statistics.median(medians), 0.0, 0.0
    if len(works) < _ENOUGH_SHAPES:
        rate = statistics.median(ratios)
        return 0.0, rate, rate * _REPLAY_FLOPS if works[0].replays else 0.0
    parts = np.array([work.parts for work in works])
    fitted = fit_rates(parts, np.array(medians), np.array(counts))
    a_call, a_flop, a_byte = fitted.tolist()
    return a_call, a_flop, a_byte


def _move(
    old: Seconds | None, new: Seconds, family: str, action: str, works: Sequence[Work]
) -> float:
    ratios = [
        new.of(family, action, work)
        / (work.guess if old is None else max(_LEAST, old.of(family, action, work)))
        for work in works
    ]
    return statistics.median(ratios)
