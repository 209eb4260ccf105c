"""How much memory a step needs, by batch size and length, under one method.

Batches are doubled from a sixteenth of the sample's on, as long as a line through the
last two says that the next one fits; the last is the largest that does. Where only few
fit into the budget, larger ones are run on what the machine has beside it: two or three
sizes are no curve, and they say what the method would do with more.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimose.bench.advise.measured import Foretold, Measured, Weighed, foretold_of
from mimose.bench.advise.methods import Method
from mimose.bench.child import Child, RunFailedError
from mimose.exceptions import first_line
from mimose.usage import UsageError

_SMALLEST = 16
"""The first batch is the sample's, divided by this."""
_DOUBLINGS = 7
"""From the first batch on, at the most."""
_LINE = 4
_PATIENCE = 8.0
"""So many times longer may each of the few first steps take: they are what a line
needs."""
_LEARNED = 4
"""Batches of plain training, the smallest, that a session learns from."""
_LEAST_LENGTHS = 2
"""Of plain training: a line tells which sizes grow with the text."""
_LEAST_PASSES = 2
_LEARNING = 6.0
"""So many of the longest steps allowed are spent on learning."""
_FORETELLING = 6.0
"""And on asking what plans would cost."""
_FEWEST = 5
"""Batches, if there are as many."""
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of the sample's length, where nobody knows which will come."""
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Of the lengths that will come."""
_UNKNOWN = "its session had too little to learn from in the time it had"


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A process with its model: what it says of itself."""

    why_not: str
    """Why the method cannot be had; empty where it can."""
    batch: int = 0
    """Of the sample."""
    length: int | None = None
    available_bytes: int | None = None
    """That processes can still have of the machine's memory."""
    total_bytes: int | None = None
    """Of the device."""
    held_bytes: int = 0
    """Before the first step."""
    alters: bool = False
    """Whether the method's gradients are others for this model, though not for most."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A method's memory."""

    measured: Measured
    learned: Mapping[str, Any] | None = None
    """By a session that plans: what its timed steps begin with."""


def begin(child: Child) -> Begun:
    """Let a process of `mimose.bench.advise.work` build its model."""
    try:
        return Begun(**child.ask(["begin", {}]))
    except RunFailedError as error:
        return Begun(why_not=first_line(error))


def survey(
    child: Child,
    begun: Begun,
    method: Method,
    *,
    budget_bytes: int,
    machine_bytes: int,
    most_seconds: float,
    lengths: Sequence[int] = (),
    plain: Sequence[Weighed] = (),
) -> Surveyed:
    """Measure one method's memory.

    Args:
        child: The process.
        begun: What it has said.
        method: The method.
        budget_bytes: No step is tried that would need more, but where too few fit.
        machine_bytes: What there is: no step at all is tried that would need more.
        most_seconds: A step that takes longer is the last one.
        lengths: Those that will come.
        plain: What plain training ran: a session that plans learns at such sizes.

    Raises:
        UsageError: Lengths will come, and the sample has none.
    """
    name = method.name
    if begun.why_not:
        return Surveyed(Measured(method=name, why_not=begun.why_not))
    if lengths and begun.length is None:
        msg = "lengths were given, and the sample has no tokens: leave them out"
        raise UsageError(msg)
    most_bytes = min(budget_bytes, machine_bytes)
    ladder = _Ladder(
        child, begun, method.parts, most_bytes, machine_bytes, most_seconds
    )
    tokens = _tokens(begun.length, lengths)
    learned: Mapping[str, Any] | None = None
    foretold: tuple[Foretold, ...] = ()
    if method.plans:
        if not ladder.learn(plain, method.passes, budget_bytes):
            return Surveyed(Measured(method=name, why_not=ladder.stopped))
        weighed, foretold = ladder.climb_planned(plain, tokens)
        learned = ladder.learned()
    else:
        weighed = ladder.climb()
    stopped = ladder.stopped
    if not weighed:
        return Surveyed(Measured(method=name, why_not=stopped or _UNKNOWN))
    if not method.plans:
        weighed += ladder.lengths(tokens)
    return Surveyed(
        Measured(
            method=name,
            weighed=tuple(weighed),
            stopped=stopped,
            foretold=foretold,
            alters=begun.alters,
        ),
        learned,
    )


class _StoppedError(Exception):
    """No larger batch can be tried; the message says why."""


class _Ladder:
    """Steps of growing size in one process.

    Attributes:
        stopped: Why no larger one was tried.
    """

    def __init__(
        self,
        child: Child,
        begun: Begun,
        parts: int,
        most_bytes: int,
        machine_bytes: int,
        most_seconds: float,
    ) -> None:
        self.stopped = ""
        self._child = child
        self._sample = begun.batch
        self._parts = parts
        first = max(1, begun.batch // _SMALLEST)
        self._first = -(-first // parts) * parts
        self._most_bytes = most_bytes
        self._machine_bytes = machine_bytes
        self._most_seconds = most_seconds

    def climb(self) -> list[Weighed]:
        """Return steps of doubled batches, then of the largest that fits.

        Of batches that are cut in parts, multiples of these: a line goes through no
        others.
        """
        found: list[Weighed] = []
        with self._telling():
            for doubling in range(_DOUBLINGS + 1):
                batch = self._first * 2**doubling
                most = self._whole(self._most(found, self._most_bytes))
                if batch > most and not self.stopped:
                    too_large = int(most) + self._parts if most else found[0].batch
                    self.stopped = f"a batch of {too_large} would not fit"
                    if found and most > found[-1].batch:
                        found.append(self._weigh(int(most)))
                if batch > most and (
                    len(found) >= _FEWEST
                    or batch > self._most(found, self._machine_bytes)
                ):
                    break
                weighed = self._first_of(batch) if not found else self._weigh(batch)
                if weighed is None:
                    continue
                found.append(weighed)
                if self._is_slow(weighed, len(found)):
                    break
        with self._telling():
            self._fill(found)
        return found

    def _first_of(self, batch: int) -> Weighed | None:
        """Return the first step; None where so few samples cannot be trained on.

        Batch normalisation of one value, for one.
        """
        try:
            return self._weigh(batch)
        except _StoppedError:
            if batch >= self._sample:
                raise
            return None

    def _fill(self, found: list[Weighed]) -> None:
        """Put further batches between, where there are few."""
        while len(found) < _FEWEST:
            gaps = [high.batch / low.batch for low, high in itertools.pairwise(found)]
            index = gaps.index(max(gaps)) if gaps else 0
            middle = (found[index].batch * found[index + 1].batch) ** 0.5 if gaps else 0
            batch = self._parts * round(middle / self._parts)
            if not gaps or batch in {each.batch for each in found}:
                break
            found.insert(index + 1, self._weigh(batch))

    def lengths(self, tokens: Sequence[int]) -> list[Weighed]:
        """Return steps of the sample's batch with shorter and longer texts."""
        found: list[Weighed] = []
        with self._telling():
            for length in tokens:
                if len(found) > 1 and self._grown(found, length) > self._most_bytes:
                    break
                found.append(self._weigh(self._sample, length))
                if self._is_slow(found[-1]):
                    break
        return found

    def learn(self, plain: Sequence[Weighed], passes: int, budget_bytes: int) -> bool:
        """Let a session learn from small steps, of sizes that can be trained on.

        As many passes as the time allows, by what plain training took. Tell whether it
        could.
        """
        batches = [each for each in plain if each.length is None][:_LEARNED]
        if len(batches) < 2:
            self.stopped = "plain training ran at too few sizes to learn from"
            return False
        first = batches[0].batch
        points: list[Any] = [[each.batch, None] for each in batches]
        points += [[first, each.length] for each in plain if each.length is not None]
        seconds = sum(each.seconds for each in batches) * len(points) / len(batches)
        affordable = round(_LEARNING * self._most_seconds / max(seconds, 1e-6))
        has_learned = False
        with self._telling():
            self._ask(
                "learn",
                points=points,
                passes=max(_LEAST_PASSES, min(passes, affordable)),
                budget_bytes=budget_bytes,
            )
            has_learned = True
        return has_learned

    def learned(self) -> Mapping[str, Any] | None:
        """Return what the session has learned; None where its process has died."""
        found: Mapping[str, Any] | None = None
        with self._telling():
            found = self._ask("learned")["learned"]
        return found

    def climb_planned(
        self, plain: Sequence[Weighed], tokens: Sequence[int]
    ) -> tuple[list[Weighed], tuple[Foretold, ...]]:
        """Return steps of batches that plans hold for, and what is foretold of all.

        A session trusts its predictions up to some multiple of what it has measured, so
        it is asked again after each larger step; where it trusts no further one, the
        next is run with everything recomputed, as a user's would be. Smaller batches
        than those of plain training cannot be trained on, and of lengths it knows what
        plain training ran.
        """
        smallest = min(each.batch for each in plain)
        if len({each.length for each in plain} - {None}) < _LEAST_LENGTHS:
            tokens = []
        points: list[tuple[int, int | None]] = [
            (self._first * 2**doubling, None) for doubling in range(_DOUBLINGS + 1)
        ]
        points += [(self._sample, length) for length in tokens]
        found: dict[int, Weighed] = {}
        table: dict[tuple[int, int | None], Foretold] = {}
        most_seconds = _FORETELLING * self._most_seconds
        until = time.monotonic() + most_seconds
        with self._telling():
            while True:
                missing = [each for each in points if each not in table]
                self._foretell(missing, table, until - time.monotonic())
                has_more = len(table) > len(points) - len(missing)
                foretold = _in_order(table)
                fitting = self._fitting(foretold)
                left = [b for b in fitting if b >= smallest and b not in found]
                left = left or self._unforetold(foretold, found)
                if not (left or has_more) or time.monotonic() > until:
                    break
                if not left:
                    continue  # time for one question was too short for all sizes
                found[left[0]] = self._weigh(left[0])
                if self._is_slow(found[left[0]]):
                    break
            self._foretell(points, table, most_seconds)  # from all that was learned
        return [found[batch] for batch in sorted(found)], _in_order(table)

    def _foretell(
        self,
        points: Sequence[tuple[int, int | None]],
        table: dict[tuple[int, int | None], Foretold],
        most_seconds: float,
    ) -> None:
        """Add plans for these sizes, run or not, as many as the time allows."""
        if not points or most_seconds <= 0.0:
            return
        told = self._ask("foretell", points=points, most_seconds=most_seconds)
        for each in map(foretold_of, told["table"]):
            table[each.batch, each.length] = each

    def _fitting(self, foretold: Sequence[Foretold]) -> list[int]:
        """Return the doubled batches that fit, and the largest one of all."""
        rows = [each for each in foretold if each.length is None]
        fitting = [each for each in rows if each.least_bytes <= self._most_bytes]
        batches = [each.batch for each in fitting]
        beyond = rows[len(fitting) : len(fitting) + 1]
        if fitting and beyond:
            low, high = fitting[-1], beyond[0]
            spare = self._most_bytes - low.least_bytes
            share = spare / (high.least_bytes - low.least_bytes)
            most = int(low.batch + share * (high.batch - low.batch))
            self.stopped = f"a batch of {most + 1} would not fit"
            if most > low.batch:
                batches.append(most)
        return batches

    def _unforetold(
        self, foretold: Sequence[Foretold], found: Mapping[int, Weighed]
    ) -> list[int]:
        """Return the next doubled batch, where the least memory's line says it fits."""
        rows = [each for each in foretold if each.length is None]
        largest = max(found, default=0)
        if len(rows) < 2 or rows[-1].batch != largest:
            return []  # all that is foretold has run, and the last was trusted
        low, high = rows[-2:]
        slope = (high.least_bytes - low.least_bytes) / (high.batch - low.batch)
        least = high.least_bytes + slope * high.batch
        most = self._first * 2**_DOUBLINGS
        fits = least <= self._most_bytes and 2 * largest <= most
        return [2 * largest] if fits else []

    def _is_slow(self, weighed: Weighed, n_found: int = _LINE) -> bool:
        """Tell whether a step was the last one; the first few may take longer."""
        most = self._most_seconds * (1 if n_found >= _LINE else _PATIENCE)
        if weighed.seconds > most:
            self.stopped = (
                f"a step of {weighed.batch} takes {weighed.seconds:.1f} s, too long to "
                f"go on in the time that is given"
            )
        return weighed.seconds > most

    def _whole(self, batch: float) -> float:
        """Return the next smaller batch of whole parts."""
        return batch if math.isinf(batch) else batch // self._parts * self._parts

    @staticmethod
    def _most(found: Sequence[Weighed], most_bytes: int) -> float:
        """Return the largest batch that fits by the line through the last two."""
        if not found:
            return math.inf
        if len(found) < 2:
            return math.inf if found[0].reserved_bytes <= most_bytes else 0.0
        low, high = found[-2:]
        slope = (high.peak_bytes - low.peak_bytes) / (high.batch - low.batch)
        if slope <= 0:
            return math.inf
        fits_bytes = most_bytes * high.peak_bytes / max(high.reserved_bytes, 1)
        return max(0.0, high.batch + (fits_bytes - high.peak_bytes) / slope)

    @staticmethod
    def _grown(found: Sequence[Weighed], tokens: int) -> float:
        """Return what a longer text needs, growing at most as its square does."""
        low, high = found[-2:]
        assert low.length is not None
        assert high.length is not None
        slope = (high.reserved_bytes - low.reserved_bytes) / (high.length - low.length)
        further = (tokens - high.length) * tokens / high.length
        return high.reserved_bytes + slope * further

    def _weigh(self, batch: int, length: int | None = None) -> Weighed:
        of = f"a batch of {batch}" + ("" if length is None else f" × {length} tokens")
        told = self._ask("weigh", f" at {of}", batch=batch, length=length)
        if told.get("out_of_memory"):
            msg = f"memory ran out at {of}"
            raise _StoppedError(msg)
        return Weighed(batch=batch, length=length, **told)

    def _ask(self, command: str, where: str = "", **arguments: Any) -> dict[str, Any]:
        try:
            told = self._child.ask([command, arguments])
        except RunFailedError as error:
            msg = f"it failed{where}: {first_line(error)}"
            raise _StoppedError(msg) from error
        if "failed" in told:
            msg = f"it failed{where}: {told['failed']}"
            raise _StoppedError(msg)
        return told

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except _StoppedError as stopped:
            self.stopped = str(stopped)


def _in_order(
    table: Mapping[tuple[int, int | None], Foretold],
) -> tuple[Foretold, ...]:
    """Return batches, then lengths, the smaller ones first."""
    return tuple(
        table[key] for key in sorted(table, key=lambda each: (each[1] or 0, each[0]))
    )


def _tokens(length: int | None, lengths: Sequence[int]) -> list[int]:
    """Return the lengths to measure; none where the sample is no text."""
    if length is None:
        return []
    if not lengths:
        return sorted({max(1, round(share * length)) for share in _SHARES})
    found = {round(each) for each in np.quantile(lengths, _QUANTILES)}
    if len(found) < _LINE:  # a curve needs more than the lengths that come
        found |= {max(1, round(share * max(lengths))) for share in (0.25, 0.5, 0.75)}
    return sorted(found)
