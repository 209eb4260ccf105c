"""Seconds of a step, by method and batch size: all methods take turns, round by round.

A method's reading is the median of the steps of a turn; rounds have another order each.
On a CPU each step is set against the machine's pace around it, and told in seconds of
its usual pace, unless the clock scatters less.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mimose.bench.advise.crew import Crew
from mimose.bench.advise.measured import Measured, Timed, Weighed
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.training import Point
from mimose.bench.advise.turns import untimed
from mimose.bench.child import RunFailedError
from mimose.exceptions import first_line

ENOUGH_ROUNDS = 7
MOST_ROUNDS = 40
_MOST_POINTS = 6
_LEAST_POINTS = 4
"""A knee can be told from a line from here on."""
_LEAST_SECONDS = 0.1
"""Of a point in a turn: shorter steps are taken several at a time."""
_MOST_STEPS = 8
_LEAST_STEPS = 2
"""Of short steps, however little time there is."""
_BEGINNING = 0.3
"""Seconds that a turn takes for its model, about."""
_NO_PLAN = "its session made no plan that keeps the budget"
_LEAST_RATIO = 0.1
"""Of the seconds expected: less was no usual turn."""


class Sized(NamedTuple):
    """Sizes that are timed."""

    point: Point
    n_steps: int
    """That a turn takes of them."""
    seconds: float
    """Of one, about."""
    stays: bool = False
    """Whether it is timed even where others are left out for lack of time."""

    def cost(self, method: str) -> float:
        """Return about how long a turn spends on them."""
        return (self.n_steps + untimed(method)) * self.seconds


class Reading(NamedTuple):
    """A step in one round: the median of those that a turn takes."""

    seconds: float
    """By the clock."""
    paces: float
    """Over the machine's pace right before and after."""


def reading_of(seconds: Sequence[float], paces: Sequence[float]) -> Reading | None:
    """Return the medians of steps; None where none was the method's.

    Args:
        seconds: (n_steps,) of each, not a number for one without a plan.
        paces: (n_steps + 1,) before the first and after each.
    """
    around = [(before + after) / 2 for before, after in itertools.pairwise(paces)]
    steps = [
        each for each in zip(seconds, around, strict=True) if not math.isnan(each[0])
    ]
    if not steps:
        return None
    ratios = [step / pace for step, pace in steps]
    return Reading(
        statistics.median(step for step, _ in steps), statistics.median(ratios)
    )


def _scatter(readings: Iterable[Sequence[float]]) -> float:
    """Return the interquartile range of rounds as a share, the median over sizes."""
    shares = []
    for each in readings:
        low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
        shares.append(float((high - low) / middle))
    return statistics.median(shares)


class Rounds:
    """Turns of all methods, round by round, about until a time.

    Plain training has one at the least; others may have none, and are then told of.
    Steps, then sizes are left out where seven rounds would not fit, as far as a fit can
    do without them.

    Args:
        crew: The processes.
        points: Of each method, with how many steps a turn takes of each.
        learned: By sessions that plan, by method.
        budget_bytes: For these.
        seed: Of the order in which they take turns.

    Attributes:
        failed: By method, why it takes no more turns.
        notes: What was left out, and why.
        unplanned: By method, sizes at which its session made no plan.
        n_rounds: In which all had a turn that were not left out and had not failed.
    """

    def __init__(
        self,
        crew: Crew,
        points: Mapping[str, Sequence[Sized]],
        learned: Mapping[str, Any],
        *,
        budget_bytes: int,
        seed: int,
    ) -> None:
        self._arguments = {"budget_bytes": budget_bytes}
        self._learned = dict(learned)
        self._readings: dict[str, dict[Point, list[Reading]]] = {}
        self._paces: list[float] = []
        self.failed: dict[str, str] = {}
        self.notes: list[str] = []
        self.unplanned: dict[str, list[Point]] = {}
        self.n_rounds = 0
        self._crew = crew
        self._order = random.Random(seed)
        self._points = {name: list(points[name]) for name in points}

    def run(self, until: float, tell: Callable[[str, float], None]) -> None:
        """Take turns until the time is used.

        Args:
            until: By `time.monotonic`.
            tell: Is told what is going on, and the share that is done, from 0 to 1.
        """
        began = time.monotonic()
        self._fit_into(until, ENOUGH_ROUNDS)
        while self._points and self.n_rounds < MOST_ROUNDS:
            self.run_one(
                lambda what: tell(
                    what, min(1.0, (time.monotonic() - began) / max(until - began, 1.0))
                ),
                until,
            )
            if self.n_rounds == 1:
                self._fit_into(until, ENOUGH_ROUNDS - 1)
            if time.monotonic() + self._round_seconds() > until:
                break

    def run_one(
        self,
        tell: Callable[[str], None] = lambda _: None,
        until: float = math.inf,
    ) -> None:
        """Let each method take one turn.

        A first turn that would end too late is not taken, but for plain training's.
        """
        names = list(self._points)
        self._order.shuffle(names)
        if not self.n_rounds and PLAIN in names:
            names.sort(key=lambda name: name != PLAIN)
        for name in names:
            late = time.monotonic() + self._turn_seconds(name) > until
            if late and not self.n_rounds and name != PLAIN:
                del self._points[name]
                self.notes.append(f"{name} was not timed: no time was left for it")
                continue
            tell(f"round {self.n_rounds + 1}: {name}")
            self._turn(name)
        self.n_rounds += 1

    def timed(self, method: str) -> tuple[Timed, ...]:
        """Return what was timed of a method."""
        return tuple(
            Timed(batch=point.batch, length=point.length, rounds=tuple(seconds))
            for point, seconds in self.seconds(method).items()
        )

    @property
    def pace(self) -> float:
        """The machine's usual one: the median over all steps."""
        return statistics.median(self._paces) if self._paces else 1.0

    @property
    def by_pace(self) -> bool | None:
        """Whether steps are told at the machine's pace; None where it keeps one.

        Not where the clock scatters less for most methods: where others have the same
        core by turns of some milliseconds, they hit a step or the little work, not
        both.
        """
        if len(set(self._paces)) <= 1:
            return None
        steadier = [
            _scatter([each.seconds for each in at] for at in of.values())
            < _scatter([each.paces for each in at] for at in of.values())
            for of in self._readings.values()
            if of
        ]
        return 2 * sum(steadier) <= len(steadier)

    def seconds(
        self, method: str, pace: float | None = None
    ) -> dict[Point, list[float]]:
        """Return the seconds of a step at each point, in each round, as they are told.

        Args:
            method: Its name.
            pace: At this pace of the machine; None for its usual one in these rounds,
                or the clock where that is steadier.
        """
        if pace is None and not self.by_pace:
            return self.by_the_clock(method)
        usual = self.pace if pace is None else pace
        found = self._readings.get(method, {})
        return {at: [usual * each.paces for each in found[at]] for at in found}

    def by_the_clock(self, method: str) -> dict[Point, list[float]]:
        """Return the seconds of a step at each point, in each round, as they were."""
        found = self._readings.get(method, {})
        return {at: [each.seconds for each in found[at]] for at in found}

    def _turn(self, name: str) -> None:
        points = self._points[name]
        asked: Sequence[Any] = [[*each.point, each.n_steps] for each in points]
        began = time.monotonic()
        try:
            arguments = {**self._arguments, "points": asked}
            arguments["learned"] = self._learned.get(name)
            told = self._crew.ask(name, arguments)
        except RunFailedError as error:
            self.failed[name] = first_line(error)
            del self._points[name]
            return
        self._heed(name, time.monotonic() - began)
        of = self._readings.setdefault(name, {})
        unplanned = []
        for each, seconds, paces in zip(
            points, told["seconds"], told["paces"], strict=True
        ):
            self._paces += paces
            reading = reading_of(seconds, paces)
            if reading is None:
                unplanned.append(each)
            else:
                of.setdefault(each.point, []).append(reading)
        found = self.unplanned.setdefault(name, [])
        found += [each.point for each in unplanned]
        if len(unplanned) == len(points):
            self.failed[name] = f"{_NO_PLAN} at any size that was timed"
            del self._points[name]
            return
        for each in unplanned:
            self._drop(name, each, f": {_NO_PLAN} there")

    def _turn_seconds(self, name: str) -> float:
        """Return about how long a method's turn takes."""
        return _BEGINNING + sum(each.cost(name) for each in self._points[name])

    def _round_seconds(self) -> float:
        return sum(self._turn_seconds(name) for name in self._points)

    def _heed(self, name: str, taken: float) -> None:
        """Expect of each size what the turn that was just taken makes likely."""
        points = self._points[name]
        expected = self._turn_seconds(name) - _BEGINNING
        if expected > 0.0:
            ratio = max(_LEAST_RATIO, (taken - _BEGINNING) / expected)
            points[:] = [each._replace(seconds=ratio * each.seconds) for each in points]

    def _fit_into(self, until: float, n_rounds: int) -> None:
        """Take fewer steps of each size, then fewer sizes, until the rounds fit.

        Of batches and of lengths four stay, as many as a fit needs.
        """
        left = until - time.monotonic()
        while n_rounds * self._round_seconds() > left:
            if self._take_fewer_steps():
                continue
            costs = {
                (name, sized): sized.cost(name)
                for name in self._points
                for sized in self._spare(name)
            }
            if not costs:
                if self.n_rounds:
                    self.notes.append(
                        "too little time for seven rounds: medians are of fewer"
                    )
                return
            dearest = max(costs, key=lambda each: costs[each])
            self._drop(*dearest, ", for lack of time")

    def _take_fewer_steps(self) -> bool:
        """Halve the steps of the sizes of which most are taken; tell whether any."""
        most = max(
            (each.n_steps for points in self._points.values() for each in points),
            default=1,
        )
        if most <= _LEAST_STEPS:
            return False
        for points in self._points.values():
            points[:] = [
                each._replace(n_steps=max(_LEAST_STEPS, most // 2))
                if each.n_steps == most
                else each
                for each in points
            ]
        return True

    def _drop(self, name: str, sized: Sized, why: str) -> None:
        self._points[name].remove(sized)
        point = sized.point
        self._readings.get(name, {}).pop(point, None)
        of = f"a batch of {point.batch}"
        of += "" if point.length is None else f" × {point.length} tokens"
        self.notes.append(f"{name} was not timed at {of}{why}")

    def _spare(self, name: str) -> Iterator[Sized]:
        """Yield the sizes of a method that it can do without."""
        for has_length in (False, True):
            kind = [
                sized
                for sized in self._points[name]
                if (sized.point.length is not None) == has_length
            ]
            if len(kind) > _LEAST_POINTS:
                yield from (each for each in kind if not each.stays)


def sized(point: Point, seconds: float) -> Sized:
    """Return sizes with as many steps in a turn as their seconds allow."""
    most = round(_LEAST_SECONDS / max(seconds, 1e-6))
    return Sized(point, max(1, min(_MOST_STEPS, most)), seconds)


def points_of(
    measured: Measured, batch: int, budget_bytes: int, *, with_lengths: bool
) -> list[Sized]:
    """Return sizes to time, each with its number of steps.

    Args:
        measured: What is known of a method.
        batch: The sample's: it stays among them if it ran.
        budget_bytes: For methods that plan.
        with_lengths: Whether lengths are timed as well.
    """
    chosen = _chosen([each for each in measured.weighed if each.length is None], batch)
    found = [
        sized(Point(each.batch), each.seconds)._replace(stays=each.batch == batch)
        for each in chosen
    ]
    if not with_lengths:
        return found
    lengths = [
        sized(Point(each.batch, each.length), each.seconds)
        for each in measured.weighed
        if each.length is not None
    ]
    longest = max((each.seconds for each in measured.weighed), default=0.0)
    lengths += [
        Sized(Point(each.batch, each.length), 1, longest)
        for each in measured.foretold
        if each.length is not None and each.least_bytes <= budget_bytes
    ]
    return lengths + found


def _chosen(weighed: Sequence[Weighed], batch: int) -> list[Weighed]:
    """Return batches in about equal ratios; the first, the last and this one stay."""
    found = list(weighed)
    while len(found) > _MOST_POINTS:
        gaps = {
            i: found[i + 1].batch / found[i - 1].batch
            for i in range(1, len(found) - 1)
            if found[i].batch != batch
        }
        del found[min(gaps, key=lambda i: gaps[i])]
    return found
