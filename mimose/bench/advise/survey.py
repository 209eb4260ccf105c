"""How much memory a step needs, by batch size and length, under one method.

Batches are doubled from an eighth of the sample's on, as long as a line through the
last two says that the next one fits; the last is the largest that does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimose.bench.advise.measured import Foretold, Measured, Weighed, foretold_of
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.settings import Settings
from mimose.bench.child import Child, RunFailedError
from mimose.exceptions import first_line

_SMALLEST = 8
"""The first batch is the sample's, divided by this."""
_DOUBLINGS = 6
"""From the first batch on, at the most."""
_LENGTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of the sample's length."""
_PASSES = 8
"""Over the first batches, for a session to learn from; ..."""
_FINE_PASSES = 16
"""... where it tries finer actions as well."""
_BATCHES = 8
"""To plan for, of each session."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A method's memory, and the sample's sizes."""

    measured: Measured
    batch: int = 0
    length: int | None = None


class _Stopped(Exception):
    """No larger batch can be tried; the message says why."""


def survey(
    child: Child, settings: Settings, method: str, most_seconds: float
) -> Surveyed:
    """Measure one method's memory.

    Args:
        child: A process of `mimose.bench.advise.work`.
        settings: The question.
        method: Its name.
        most_seconds: A step that takes longer is the last one.
    """
    try:
        facts = child.ask(["begin", {}])
    except RunFailedError as error:
        return Surveyed(Measured(method=method, why_not=first_line(error)))
    if facts["why_not"]:
        return Surveyed(Measured(method=method, why_not=facts["why_not"]))
    ladder = _Ladder(child, settings, facts, most_seconds)
    plans = METHODS[method].plans
    if plans:
        ladder.learn(facts["batch"], _FINE_PASSES if "fine" in method else _PASSES)
    weighed = list(ladder.climb(facts["batch"]))
    stopped = ladder.stopped
    if not plans and weighed:
        weighed += ladder.lengths(facts["batch"], facts["length"])
    measured = Measured(
        method=method,
        why_not="" if weighed else ladder.stopped,
        weighed=tuple(weighed),
        stopped=stopped,
    )
    if plans and weighed:
        top = max(each.batch for each in weighed)
        measured = replace(measured, foretold=ladder.foretell(top))
    return Surveyed(measured, facts["batch"], facts["length"])


class _Ladder:
    """Steps of growing size in one process.

    Attributes:
        stopped: Why no larger one was tried.
    """

    def __init__(
        self, child: Child, settings: Settings, facts: Any, most_seconds: float
    ) -> None:
        self.stopped = ""
        self._child = child
        self._most_seconds = most_seconds
        self._most_bytes = settings.budget_bytes
        available = facts["available_bytes"]
        if settings.device == "cpu" and available is not None:
            self._most_bytes = min(self._most_bytes, available)

    def climb(self, sample: int) -> list[Weighed]:
        """Return steps of doubled batches, then of the largest that fits."""
        first = max(1, sample // _SMALLEST)
        found: list[Weighed] = []
        with self._telling():
            for doubling in range(_DOUBLINGS + 1):
                batch = first * 2**doubling
                most = self._most(found)
                if batch > most:
                    if most > found[-1].batch:
                        found.append(self._weigh(int(most)))
                    self.stopped = f"a batch of {int(most) + 1} would not fit"
                    break
                found.append(self._weigh(batch))
                if found[-1].seconds > self._most_seconds:
                    self.stopped = f"a step of {batch} takes {found[-1].seconds:.1f} s"
                    break
        return found

    def lengths(self, batch: int, length: int | None) -> list[Weighed]:
        """Return steps of the sample's batch with shorter and longer texts."""
        found: list[Weighed] = []
        stopped = self.stopped
        with self._telling():
            for share in _LENGTHS if length is not None else ():
                tokens = max(1, round((length or 0) * share))
                if len(found) > 1 and self._grown(found, tokens) > self._most_bytes:
                    break
                found.append(self._weigh(batch, tokens))
                if found[-1].seconds > self._most_seconds:
                    break
        self.stopped = stopped
        return found

    def learn(self, sample: int, passes: int) -> None:
        """Let a session learn from small steps."""
        first = max(1, sample // _SMALLEST)
        points = [[first * factor, None] for factor in (1, 2, 3, 4)]
        with self._telling():
            self._ask("learn", points=points, passes=passes)

    def foretell(self, top: int) -> tuple[Foretold, ...]:
        """Return plans for batches up to some beyond the largest that ran."""
        found: tuple[Foretold, ...] = ()
        with self._telling():
            told = self._ask("foretell", batches=_spread(1, 2 * top, _BATCHES))
            found = tuple(map(foretold_of, told["table"]))
        return found

    def _most(self, found: Sequence[Weighed]) -> float:
        """Return the largest batch that fits by the line through the last two."""
        if len(found) < 2:
            return float("inf")
        low, high = found[-2:]
        slope = (high.peak_bytes - low.peak_bytes) / (high.batch - low.batch)
        if slope <= 0:
            return float("inf")
        fits = self._most_bytes * high.peak_bytes / max(high.reserved_bytes, 1)
        return high.batch + (fits - high.peak_bytes) / slope

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
        told = self._ask("weigh", batch=batch, length=length)
        of = f"a batch of {batch}" + ("" if length is None else f" × {length} tokens")
        if told.get("out_of_memory"):
            msg = f"memory ran out at {of}"
            raise _Stopped(msg)
        if "failed" in told:
            msg = f"{of} failed: {told['failed']}"
            raise _Stopped(msg)
        return Weighed(batch=batch, length=length, **told)

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._child.ask([command, arguments])
        except RunFailedError as error:
            raise _Stopped(first_line(error)) from error

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except _Stopped as stopped:
            self.stopped = str(stopped)


def _spread(low: int, high: int, n: int) -> list[int]:
    """Return whole numbers in equal ratios."""
    ratio = (high / low) ** (1 / (n - 1))
    return sorted({round(low * ratio**i) for i in range(n)})
