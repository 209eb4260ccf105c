"""What the rows of an experiment come to, strategy by strategy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mimose.bench.rows import StepRow

_LAST = 10
"""Steps over which the final loss is averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySummary:
    """One strategy in numbers. Growth is what a step took over what it began with."""

    strategy: str
    steps: int
    largest_growth_bytes: int
    steps_over: int
    """Steps whose peak was over the budget."""
    budget_use: float | None
    """Mean of growth ÷ (budget − start) over the steps that plain training cannot
    take within the budget; None without such steps."""
    texts_per_second: float
    seconds_ratio: float | None
    """Time of the same steps in plain training is 1."""
    recomputed_flops: int
    recomputed_ratio: float | None
    """Recomputation of the same steps when everything is recomputed is 1."""
    phases: Mapping[str, int]
    """Steps by the session's phase."""
    error_p50: float | None
    """Median of |peak − predicted peak| ÷ predicted growth, over planned steps."""
    error_p99: float | None
    loss: float
    """Mean over the last ten steps."""
    loss_is_equal: bool | None
    """Whether every step's loss is plain training's to the last bit."""
    accuracy: float | None
    """On held-out texts after the last step."""
    retries: int


def summarise(rows: Iterable[StepRow]) -> list[StrategySummary]:
    """Sum up the rows of one run, in the order in which strategies first appear.

    Ratios compare the steps that both strategies have taken, so that they hold for a
    run that was cut short.
    """
    by_strategy: dict[str, list[StepRow]] = {}
    for row in rows:
        by_strategy.setdefault(row.strategy, []).append(row)
    plain = by_strategy.get("none", [])
    full = by_strategy.get("full", [])
    return [_summarise_one(own, plain, full) for own in by_strategy.values()]


def _summarise_one(
    rows: Sequence[StepRow], plain: Sequence[StepRow], full: Sequence[StepRow]
) -> StrategySummary:
    errors = sorted(_errors(rows))
    return StrategySummary(
        strategy=rows[0].strategy,
        steps=len(rows),
        largest_growth_bytes=max(row.growth_bytes for row in rows),
        steps_over=sum(is_over(row) for row in rows),
        budget_use=_budget_use(rows, plain),
        texts_per_second=sum(row.texts for row in rows) / _seconds(rows),
        seconds_ratio=_ratio(rows, plain, _seconds),
        recomputed_flops=_flops(rows),
        recomputed_ratio=_ratio(rows, full, _flops),
        phases=dict(Counter(row.phase for row in rows if row.phase)),
        error_p50=_quantile(errors, 0.5),
        error_p99=_quantile(errors, 0.99),
        loss=statistics.fmean(row.loss for row in rows[-_LAST:]),
        loss_is_equal=_loss_is_equal(rows, plain),
        accuracy=rows[-1].accuracy,
        retries=sum(row.retries for row in rows),
    )


def is_over(row: StepRow) -> bool:
    """Tell whether a step held more than the budget."""
    return row.budget_bytes is not None and row.peak_bytes > row.budget_bytes


def _budget_use(rows: Sequence[StepRow], plain: Sequence[StepRow]) -> float | None:
    shares = [
        row.growth_bytes / (row.budget_bytes - row.start_bytes)
        for row, unlimited in zip(rows, plain, strict=False)
        if is_over(unlimited) and row.budget_bytes is not None
    ]
    return statistics.fmean(shares) if shares else None


def _errors(rows: Sequence[StepRow]) -> list[float]:
    return [
        abs(row.growth_bytes - row.predicted_growth_bytes) / row.predicted_growth_bytes
        for row in rows
        if row.phase == "plan" and row.predicted_growth_bytes
    ]


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ratio(
    rows: Sequence[StepRow],
    others: Sequence[StepRow],
    total: Callable[[Sequence[StepRow]], float],
) -> float | None:
    common = min(len(rows), len(others))
    below = total(others[:common])
    return total(rows[:common]) / below if below else None


def _seconds(rows: Sequence[StepRow]) -> float:
    return sum(row.seconds for row in rows)


def _flops(rows: Sequence[StepRow]) -> int:
    return sum(row.recomputed_flops for row in rows)


def _loss_is_equal(rows: Sequence[StepRow], plain: Sequence[StepRow]) -> bool | None:
    if not plain:
        return None
    return all(a.loss == b.loss for a, b in zip(rows, plain, strict=False))
