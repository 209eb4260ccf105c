"""The fastest method, the one behind it, and whether noise could have made it so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def choose(
    models: Sequence[Model],
    spreads: Mapping[str, float],
    memory_bytes: float,
    batch: int | None,
) -> Choice | None:
    """Choose by throughput among the methods that fit.

    Args:
        models: The methods.
        spreads: By name, the standard error of a method's medians as a share.
        memory_bytes: What there is.
        batch: The batch that is given; None where each may have its best one, up to
            twice the largest that was run.

    Returns:
        The choice; None where nothing fits.
    """
    found = sorted(
        (
            (_rate(model, memory_bytes, batch), model.name)
            for model in models
            if model.is_usable
        ),
        key=lambda each: -each[0][1],
    )
    found = [each for each in found if each[0][1] > 0.0]
    if not found:
        return None
    (size, rate), name = found[0]
    (other_size, other_rate), other = found[1] if len(found) > 1 else ((0.0, 0.0), "")
    noise = noise_of(spreads, name, other)
    return Choice(
        name=name,
        batch=size,
        samples_per_second=rate,
        runner_up=other,
        runner_up_batch=other_size,
        runner_up_samples_per_second=other_rate,
        is_tie=bool(other) and rate / other_rate - 1.0 <= noise,
        too_few=bool(other) and math.isinf(noise),
    )


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
