"""The fastest method, the one behind it, and whether noise could have made it so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.models import Model
from mimose.bench.advise.ties import noise_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to train with."""

    name: str
    batch: float
    samples_per_second: float
    runner_up: str
    """Empty where nothing else fits."""
    runner_up_batch: float
    runner_up_samples_per_second: float
    is_tie: bool
    """Whether the two cannot be told apart."""
    too_few: bool
    """Whether that is for too few timings, and not for their noise."""

    @property
    def ratio(self) -> float:
        """The best throughput ÷ the runner-up's; infinite without one."""
        if not self.runner_up_samples_per_second:
            return math.inf
        return self.samples_per_second / self.runner_up_samples_per_second


class _Candidate(NamedTuple):
    model: Model
    batch: float
    rate: float
    """Samples a second."""


def choose(
    models: Sequence[Model],
    spreads: Mapping[str, float],
    memory_bytes: float,
    batch: int | None,
) -> Choice | None:
    """Choose by throughput among the methods that fit.

    Plain training where nobody can tell it from the fastest: it needs no change.

    Args:
        models: The methods.
        spreads: By name, the standard error of a method's medians as a share.
        memory_bytes: What there is.
        batch: The batch that is given; None where each may have its best one, up to
            twice the largest that was run.

    Returns:
        The choice; None where nothing fits.
    """
    found = [
        _Candidate(model, *_rate(model, memory_bytes, batch))
        for model in models
        if model.is_usable
    ]
    found = sorted(
        (each for each in found if each.rate > 0.0), key=lambda each: -each.rate
    )
    if not found:
        return None
    noises = [_noise(found[0], each, spreads) for each in found]
    tied = [
        each
        for each, noise in zip(found, noises, strict=True)
        if found[0].rate / each.rate - 1.0 <= noise
    ]
    plain = [each for each in tied if each.model.name == PLAIN]
    best, *others = [*plain, *(each for each in found if each not in plain)]
    other = others[0] if others else None
    return Choice(
        name=best.model.name,
        batch=best.batch,
        samples_per_second=best.rate,
        runner_up="" if other is None else other.model.name,
        runner_up_batch=0.0 if other is None else other.batch,
        runner_up_samples_per_second=0.0 if other is None else other.rate,
        is_tie=other in tied,
        too_few=other is not None and math.isinf(_noise(best, other, spreads)),
    )


def _noise(one: _Candidate, other: _Candidate, spreads: Mapping[str, float]) -> float:
    """Return the share by which noise, and what is not known, could set two apart."""
    noise = noise_of(spreads, one.model.name, other.model.name)
    doubts = (each.model.doubt(each.batch) for each in (one, other))
    return math.hypot(noise, *doubts)


def _rate(model: Model, memory_bytes: float, batch: int | None) -> tuple[float, float]:
    """Return a batch and its samples a second; 0 where it does not fit.

    Or where nobody knows, as it is far beyond the batches that ran.
    """
    if batch is None:
        best = model.best(memory_bytes)
        return best.batch, best.samples_per_second
    if batch > model.farthest:
        return float(batch), 0.0
    seconds = model.step_seconds(batch, memory_bytes)
    return float(batch), batch / seconds if seconds > 0.0 else 0.0
