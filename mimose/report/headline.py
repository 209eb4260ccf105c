"""The main numbers of a run, from its records, and a verdict in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.budget import format_bytes
from mimose.records import StepRecord
from mimose.report.shapes import shapes_of, split_runs

PHASE_WORDS = {
    "collect": "measuring: everything recomputed",
    "step_down": "first plans, checked",
    "plan": "planned",
    "fallback": "safest plan",
}
FLOP_UNITS = {"EFLOP": 1e18, "PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6}
TIME_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The main numbers of a run: the page's, and those of ``mimose report``."""

    steps: int
    runs: int
    """The number of runs to which the steps belong."""
    shapes: int
    """Distinct shapes of the batch."""
    phases: Mapping[str, int]
    """The number of steps in each phase."""
    budget_bytes: int
    """The budget at the end of the last run."""
    budget_range: tuple[int, int]
    """The smallest and the largest budget of the last run."""
    peak_bytes: int | None
    """The highest observed peak; None if none was read."""
    budget_use: float | None
    """The highest observed peak as a share of its step's budget."""
    steps_read: int
    """Steps whose peak was read."""
    steps_over: int
    """Steps whose peak exceeded the budget."""
    recompute_share: float
    """The share of all layer calls that was recomputed."""
    recomputed_flops: int
    collected_flops: int
    """The part of them in phase `collect`."""
    cache_hit_rate: float
    """The share of all steps whose plan came from the cache."""
    seconds: float
    """The sum over all steps, from the start of the forward to the end of the
    backward."""
    plan_seconds: float
    """The part of `seconds` that it took to find or make plans."""
    retries: int
    """Forwards that ran again after they ran out of memory."""
    error_p50: float | None
    """The median of |observed − predicted| growth, as a share of the predicted growth,
    over the steps in phase `plan`; None without such steps."""
    error_p99: float | None
    error_bytes: float | None
    """The same median in bytes, |observed − predicted|."""


def headline(records: Sequence[StepRecord]) -> Headline:
    """Return the main numbers of one run or several.

    Args:
        records: Their records, at least one.
    """
    runs = split_runs(records)
    peaks = [r.highest_bytes for r in records if r.highest_bytes is not None]
    uses = [r.budget_use for r in records if r.budget_use is not None]
    errors = [
        (abs(r.prediction_error), abs(r.prediction_error * r.predicted_growth_bytes))
        for r in records
        if r.phase == "plan"
        and r.prediction_error is not None
        and r.predicted_growth_bytes is not None
    ]
    return Headline(
        steps=len(records),
        runs=len(runs),
        shapes=len({shape for run in runs for shape in shapes_of(run)}),
        phases=dict(Counter(record.phase for record in records)),
        budget_bytes=records[-1].budget_bytes,
        budget_range=budget_range(runs[-1]),
        peak_bytes=max(peaks, default=None),
        budget_use=max(uses, default=None),
        steps_read=len(peaks),
        steps_over=sum(record.is_over for record in records),
        recompute_share=sum(record.n_recomputed for record in records)
        / max(1, sum(len(record.actions) for record in records)),
        recomputed_flops=sum(record.recomputed_flops for record in records),
        collected_flops=sum(
            r.recomputed_flops for r in records if r.phase == "collect"
        ),
        cache_hit_rate=sum(record.cache_hit for record in records) / len(records),
        seconds=sum(record.seconds or 0.0 for record in records),
        plan_seconds=sum(record.plan_seconds for record in records),
        retries=sum(record.retries for record in records),
        error_p50=float(np.quantile([e for e, _ in errors], 0.5)) if errors else None,
        error_p99=float(np.quantile([e for e, _ in errors], 0.99)) if errors else None,
        error_bytes=float(np.median([n for _, n in errors])) if errors else None,
    )


def budget_range(records: Iterable[StepRecord]) -> tuple[int, int]:
    """Return the smallest and the largest budget of some steps, at least one."""
    budgets = {record.budget_bytes for record in records}
    return min(budgets), max(budgets)


def format_budgets(of_steps: tuple[int, int]) -> str:
    """Return a budget as text, or the range in which it moved.

    >>> format_budgets((2**30, 2**30)), format_budgets((2**30, 2**31))
    ('1.00 GiB', '1.00 GiB to 2.00 GiB')
    """
    return " to ".join(dict.fromkeys(map(format_bytes, of_steps)))


def verdict(numbers: Headline) -> str:
    """Return a sentence that says whether the budget was kept.

    Args:
        numbers: The run in numbers.
    """
    budget = f"budget of {format_budgets(numbers.budget_range)}"
    if numbers.runs > 1:
        budget = "budget of their run"
    if numbers.budget_use is None:
        return f"No peak could be read: whether the {budget} was kept is not known."
    use = f"the highest peak took {numbers.budget_use:.1%} of it"
    read = counted(numbers.steps_read, "step")
    if numbers.steps_over:
        return f"{numbers.steps_over:,} of {read} went over the {budget}; {use}."
    if numbers.steps_read < numbers.steps:
        read += f" whose peak was read (of {numbers.steps:,})"
    every = "All " if numbers.steps_read > 1 else ""
    return f"{every}{read} stayed within the {budget}; {use}."


def figures(numbers: Headline) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the number and a remark for each of the main numbers.

    Args:
        numbers: The run in numbers.
    """
    runs = f" in {numbers.runs} runs" if numbers.runs > 1 else ""
    shapes = f"with batches of {counted(numbers.shapes, 'shape')}{runs}"
    yield "steps", f"{numbers.steps:,}", shapes
    if numbers.peak_bytes is None or numbers.budget_use is None:
        yield "highest peak", "not known", "no peak could be read"
    else:
        is_one = numbers.runs == 1 and len({*numbers.budget_range}) == 1
        whose = "the budget" if is_one else "a step's budget, at the most"
        use = f"{numbers.budget_use:.1%} of {whose}"
        yield "highest peak", format_bytes(numbers.peak_bytes), use
        is_all = numbers.steps_read == numbers.steps
        read = f"of {numbers.steps_read:,}{'' if is_all else ' whose peak was read'}"
        yield "steps over the budget", f"{numbers.steps_over:,}", read
    if numbers.error_p50 is not None:
        yield (
            "prediction off by",
            f"{numbers.error_p50:.2%}",
            f"of the growth, median, {format_bytes(numbers.error_bytes or 0.0)}; "
            f"1 step in 100 by {numbers.error_p99:.2%} or more",
        )
    yield (
        "layer calls recomputed",
        f"{numbers.recompute_share:.1%}",
        f"{format_flops(numbers.recomputed_flops)}, "
        f"{format_flops(numbers.collected_flops)} of it while measuring",
    )
    rate = f"{numbers.cache_hit_rate:.1%}"
    yield "plans from the cache", rate, "of the steps; other plans were made new"
    timed = f"of {format_seconds(numbers.seconds)} in steps"
    spent = format_seconds(numbers.plan_seconds)
    yield "choosing plans took", spent, timed if numbers.seconds else "steps not timed"
    if numbers.retries:
        why = "after running out of memory"
        yield "forwards run again", f"{numbers.retries:,}", why
    most, *others = (
        f"{n:,} {PHASE_WORDS[phase].partition(':')[0].partition(',')[0]}"
        for phase, n in sorted(numbers.phases.items(), key=lambda item: -item[1])
    )
    yield "steps by phase", most, ", ".join(others) or "all of them"


def unit_of(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest one that is not above a number; else the smallest.

    Args:
        largest: The largest of the numbers to show.
        units: Named sizes, the largest first.
    """
    *_, smallest = units.items()
    return next((unit for unit in units.items() if largest >= unit[1]), smallest)


def format_flops(flops: float) -> str:
    """Return a number of FLOPs as text.

    >>> format_flops(3_120_000_000)
    '3.12 GFLOP'
    """
    return _in_unit(flops, FLOP_UNITS)


def format_seconds(seconds: float) -> str:
    """Return a time as text.

    >>> format_seconds(0.0123), format_seconds(5400)
    ('12.3 ms', '1.5 h')
    """
    return _in_unit(seconds, TIME_UNITS)


def _in_unit(number: float, units: Mapping[str, float]) -> str:
    unit, factor = unit_of(number, units)
    number /= factor
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun as text.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
