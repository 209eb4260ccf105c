"""Whether a method that saves memory raises the throughput, by two lines each.

The rule of Liu et al., "An Evaluation of Memory Optimization Methods for Training
Neural Networks": memory sets the largest batch, the batch shares out the fixed time of
a step. `compare` puts both methods' whole models side by side; `p_score` and `p_point`
say the same in one inequality where the methods share what does not grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .lines import LINE, Series

if TYPE_CHECKING:
    from collections.abc import Iterator

REACH = 2.0
"""How many times beyond the batches measured a verdict may be. PAPAYA's series, fitted
up to a half of their largest batch, tell bytes at that batch to 5% and seconds to 8%;
up to a third, to 10 and 14%. (Not those of DTR, whose law changes on the way.)"""
_ROUNDING = 1e-9
"""A batch within so much of a whole number is that number."""


class Best(NamedTuple):
    """The most throughput that a memory allows."""

    batch: float
    """Samples a step; 0 where none fits, infinite where memory does not grow."""
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class MethodModel:
    """What a step takes by its batch, under one method."""

    name: str
    memory: Series
    """Bytes at the peak."""
    seconds: Series
    """Of a whole step."""

    def step_seconds(self, batch: float) -> float:
        """Return the seconds of a step."""
        return self.seconds.predict(batch)

    def peak_bytes(self, batch: float) -> float:
        """Return the bytes at a step's peak."""
        return self.memory.predict(batch)

    @property
    def refused(self) -> str:
        """Why nothing may be said from it, in words; empty where something may."""
        parts = (("memory", self.memory), ("time", self.seconds))
        said = (f"{self.name}'s {what}: {s.refused}" for what, s in parts if s.refused)
        return "; ".join(said)

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits.

        Args:
            memory_bytes: What there is; leave room for fragmentation (the source takes
                0.8 of the device).
            whole: Whether samples are whole.

        Returns:
            Samples; 0 where less than one fits, infinite where memory does not grow.
        """
        batch = self.memory.inverse(memory_bytes)
        if batch < 1.0 - _ROUNDING:
            return 0.0
        if not whole or math.isinf(batch):
            return batch
        return float(math.floor(batch * (1.0 + _ROUNDING)))

    def best_throughput(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch with the most samples a second, of those that fit.

        That is the largest as long as a step has fixed time. Without (a line that is
        negative at 0, a knee beyond which a sample costs more than at it) it is the
        smallest beyond the knee, or the smallest measured: between those throughput
        only rises or only falls. A batch at which the model's seconds are not positive
        is not one of them.
        """
        largest = self.largest_batch(memory_bytes, whole=whole)
        if largest <= 0.0:
            return Best(0.0, 0.0)
        found = Best(largest, self._rate(largest))
        for batch in self._turns(whole=whole):
            if batch < largest and self._rate(batch) > found.samples_per_second:
                found = Best(batch, self._rate(batch))
        return found

    @property
    def turn(self) -> float:
        """The batch beyond which throughput falls, if a line of seconds is below 0."""
        return max(1.0, self.seconds.knee, self.seconds.lowest)

    def _turns(self, *, whole: bool) -> Iterator[float]:
        """Yield the batches at which throughput may stop rising."""
        if self.seconds.intercept < 0.0:
            batch = self.turn
            yield from (math.floor(batch), math.ceil(batch)) if whole else (batch,)

    def _rate(self, batch: float) -> float:
        """Return samples a second; 0 where the model's seconds are not positive."""
        if math.isinf(batch):
            slope = self.seconds.slope
            return 1.0 / slope if slope > 0.0 else math.inf
        seconds = self.step_seconds(batch)
        return batch / seconds if seconds > 0.0 else 0.0


def p_score(plain: MethodModel, method: MethodModel) -> float:
    """Return the bytes a sample saves for each second a sample costs more.

    `method` raises the best throughput exactly if this is above `p_point`, as far as
    both take as much where there is no sample: the same bytes and the same seconds.

    Returns:
        Infinite where memory is saved at no cost; nan where a sample takes more memory
        and less time, for which the rule was not made.

    Raises:
        ValueError: A series is not a line.
    """
    for model in (plain, method):
        _need_lines(model)
    saved = plain.memory.slope - method.memory.slope
    paid = method.seconds.slope - plain.seconds.slope
    if paid > 0.0:
        return saved / paid
    if saved < 0.0:
        return -math.inf if paid == 0.0 else math.nan
    return 0.0 if saved == paid == 0.0 else math.inf


def p_point(plain: MethodModel, memory_bytes: float) -> float:
    """Return the free bytes for each second of fixed time in a step.

    Infinite where a step has no fixed time: then nothing is won by larger batches.

    Raises:
        ValueError: A series is not a line.
    """
    _need_lines(plain)
    fixed = plain.seconds.intercept
    return (memory_bytes - plain.memory.intercept) / fixed if fixed > 0.0 else math.inf


def _need_lines(model: MethodModel) -> None:
    for what, series in (("memory", model.memory), ("seconds", model.seconds)):
        if series.form != LINE:
            msg = (
                f"{model.name}'s {what} is a {series.form}, and the p-score is of "
                "lines: fit it with form='line', or use compare, which needs none"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a method does to the best throughput within a memory."""

    plain: str
    method: str
    memory_bytes: float
    plain_batch: float
    """The largest batch that fits, in samples; 0 where none does."""
    method_batch: float
    plain_best: Best
    method_best: Best
    interval: tuple[float, float] | None
    """Of the ratio, from repeated readings; None where there are none."""
    extrapolation: float
    """How many times beyond the batches measured the farther of the two bests is; 1
    where both are among them."""
    refused: str
    """Why there is no verdict, in words; empty where there is one."""

    @property
    def ratio(self) -> float:
        """The method's best throughput ÷ plain's.

        Infinite where only the method fits, nan where neither does.
        """
        mine = self.method_best.samples_per_second
        theirs = self.plain_best.samples_per_second
        if theirs > 0.0:
            return mine / theirs
        return math.inf if mine > 0.0 else math.nan

    @property
    def batch(self) -> str:
        """What it does to the largest batch: ``"raises"``, ``"lowers"``, ``"same"``."""
        if self.method_batch == self.plain_batch:
            return "same"
        return "raises" if self.method_batch > self.plain_batch else "lowers"

    @property
    def exists(self) -> bool:
        """Whether there is a verdict."""
        return not self.refused

    @property
    def pays(self) -> bool | None:
        """Whether the method is faster at its best; None where there is no verdict."""
        return None if self.refused else self.ratio > 1.0


def compare(
    plain: MethodModel,
    method: MethodModel,
    memory_bytes: float,
    *,
    interval: tuple[float, float] | None = None,
    whole: bool = True,
    reach: float = REACH,
) -> Verdict:
    """Say whether a method raises the best throughput within a memory.

    Args:
        plain: Without it.
        method: With it.
        memory_bytes: What there is for both.
        interval: Of the ratio, from `ratio_interval`; where 1 is inside there is no
            verdict.
        whole: Whether samples are whole.
        reach: How many times the largest batch measured a verdict may be about.
    """
    bests = [m.best_throughput(memory_bytes, whole=whole) for m in (plain, method)]
    beyond = max(_beyond(plain, bests[0]), _beyond(method, bests[1]))
    reasons = [model.refused for model in (plain, method) if model.refused]
    if beyond > reach:
        reasons.append(
            f"its batches ({bests[0].batch:g} plain, {bests[1].batch:g} with "
            f"{method.name}) lie {beyond:.1f} times beyond what was "
            f"measured, more than {reach:g}: measure nearer to them"
        )
    if bests[0].batch == bests[1].batch == 0.0:
        reasons.append(f"not one sample fits into {memory_bytes:.0f} bytes")
    elif interval is not None and interval[0] <= 1.0 <= interval[1]:
        reasons.append(
            f"the difference is within the noise: the ratio is between "
            f"{interval[0]:.3f} and {interval[1]:.3f}"
        )
    return Verdict(
        plain=plain.name,
        method=method.name,
        memory_bytes=memory_bytes,
        plain_batch=plain.largest_batch(memory_bytes, whole=whole),
        method_batch=method.largest_batch(memory_bytes, whole=whole),
        plain_best=bests[0],
        method_best=bests[1],
        interval=interval,
        extrapolation=beyond,
        refused="; ".join(reasons),
    )


def _beyond(model: MethodModel, best: Best) -> float:
    """Return how many times a batch is outside of what was measured; 1 inside."""
    if best.batch == 0.0:
        return 1.0
    least = max(model.memory.lowest, model.seconds.lowest)
    most = min(model.memory.highest, model.seconds.highest)
    above = 1.0 if math.isinf(most) else best.batch / most
    return max(1.0, above, least / best.batch)
