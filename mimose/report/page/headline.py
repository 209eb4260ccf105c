"""A run in numbers, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.budget import format_bytes
from mimose.records import StepRecord
from mimose.report.page.looks import PHASE_WORDS, counted, format_flops, format_seconds
from mimose.report.page.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What the top of the page and ``mimose report`` say."""

    steps: int
    runs: int
    """How many runs the steps are of."""
    shapes: int
    """Distinct shapes of the batch."""
    phases: Mapping[str, int]
    """Steps by phase."""
    budget_bytes: int
    """The last run's budget."""
    peak_bytes: int | None
    """The highest observed peak; None if none was read."""
    budget_use: float | None
    """The highest observed peak as a share of its run's budget."""
    steps_read: int
    """Steps whose peak was read."""
    steps_over: int
    """Steps whose peak exceeded the budget."""
    recompute_share: float
    """Of all layer calls, the share that was recomputed."""
    recomputed_flops: int
    collected_flops: int
    """The part of it spent in phase `collect`."""
    cache_hit_rate: float
    """Of all steps, the share whose plan came from the cache."""
    seconds: float
    """Of all steps, each from the start of its forward to the end of its backward."""
    plan_seconds: float
    """Time spent to decide on plans, part of `seconds`."""
    retries: int
    """Forwards run again after running out of memory."""
    error_p50: float | None
    """Median of |observed − predicted| growth, as a share of predicted growth, over
    the steps in phase `plan`; None if there are none."""
    error_p99: float | None
    error_bytes: float | None
    """The same median in bytes, |observed − predicted|."""


def headline(steps: Steps) -> Headline:
    """Sum up the records of a run.

    Args:
        steps: At least one.
    """
    records = steps.records
    peaks = [r.highest_bytes for r in records if r.highest_bytes is not None]
    uses = [r.budget_use for r in records if r.budget_use is not None]
    p50, p99, n_bytes = _errors(records)
    return Headline(
        steps=len(records),
        runs=steps.n_runs,
        shapes=len(steps.last_of_shape),
        phases=dict(Counter(record.phase for record in records)),
        budget_bytes=steps.records[-1].budget_bytes,
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
        error_p50=p50,
        error_p99=p99,
        error_bytes=n_bytes,
    )


def _errors(
    records: Sequence[StepRecord],
) -> tuple[float | None, float | None, float | None]:
    """Return the median and the 99th percentile as shares, and the median in bytes."""
    known = [
        (abs(error), abs(error * growth))
        for record in records
        if record.phase == "plan"
        and (error := record.prediction_error) is not None
        and (growth := record.predicted_growth_bytes) is not None
    ]
    if not known:
        return None, None, None
    shares, n_bytes = np.array(known).T
    p50, p99 = np.quantile(shares, (0.5, 0.99)).tolist()
    return p50, p99, float(np.median(n_bytes))


def verdict(headline: Headline) -> str:
    """Say in a sentence whether the budget was kept.

    Args:
        headline: The run in numbers.
    """
    budget = f"budget of {format_bytes(headline.budget_bytes)}"
    if headline.runs > 1:
        budget = "budget of their run"
    if headline.budget_use is None:
        return f"No peak could be read: whether the {budget} was kept is not known."
    use = f"the highest peak took {headline.budget_use:.1%} of it"
    read = counted(headline.steps_read, "step")
    if headline.steps_over:
        return f"{headline.steps_over:,} of {read} went over the {budget}; {use}."
    if headline.steps_read < headline.steps:
        read += f" whose peak was read (of {headline.steps:,})"
    every = "All " if headline.steps_read > 1 else ""
    return f"{every}{read} stayed within the {budget}; {use}."


def facts(headline: Headline) -> Iterator[tuple[str, str, str]]:
    """Yield the run's numbers for people: name, number and a remark of each.

    Args:
        headline: The run in numbers.
    """
    runs = f" in {headline.runs} runs" if headline.runs > 1 else ""
    yield (
        "steps",
        f"{headline.steps:,}",
        f"with batches of {counted(headline.shapes, 'shape')}{runs}",
    )
    yield from _memory(headline)
    yield (
        "layer calls recomputed",
        f"{headline.recompute_share:.1%}",
        f"{format_flops(headline.recomputed_flops)}, "
        f"{format_flops(headline.collected_flops)} of it while measuring",
    )
    yield (
        "plans from the cache",
        f"{headline.cache_hit_rate:.1%}",
        "of the steps; the others' were made anew",
    )
    yield (
        "choosing plans took",
        format_seconds(headline.plan_seconds),
        f"of {format_seconds(headline.seconds)} in steps"
        if headline.seconds
        else "steps not timed",
    )
    if headline.retries:
        yield (
            "forwards run again",
            f"{headline.retries:,}",
            "after running out of memory",
        )
    yield _phases(headline.phases)


def _phases(phases: Mapping[str, int]) -> tuple[str, str, str]:
    """Tell of all phases at once, the one of most steps first."""
    found = sorted(phases.items(), key=lambda item: -item[1])
    most, *others = (f"{n:,} {_in_short(PHASE_WORDS[phase])}" for phase, n in found)
    return "steps by phase", most, ", ".join(others) or "all of them"


def _in_short(words: str) -> str:
    """Leave out what explains: what stands behind a colon or a comma."""
    return words.partition(":")[0].partition(",")[0]


def written(number: str, remark: str) -> str:
    """Write a fact's number and remark as one text.

    >>> written("20 ms", "of 3 s in steps"), written("39 planned", "4 measuring")
    ('20 ms of 3 s in steps', '39 planned, 4 measuring')
    """
    return f"{number}{' ' if remark.startswith('of ') else ', '}{remark}"


def _memory(headline: Headline) -> Iterator[tuple[str, str, str]]:
    if headline.peak_bytes is None or headline.budget_use is None:
        yield "highest peak", "not known", "no peak could be read"
    else:
        yield (
            "highest peak",
            format_bytes(headline.peak_bytes),
            f"{headline.budget_use:.1%} of the budget"
            if headline.runs == 1
            else f"at most {headline.budget_use:.1%} of a run's budget",
        )
        is_all = headline.steps_read == headline.steps
        read = "" if is_all else " whose peak was read"
        yield (
            "steps over the budget",
            f"{headline.steps_over:,}",
            f"of {headline.steps_read:,}{read}",
        )
    if headline.error_p50 is not None and headline.error_p99 is not None:
        n_bytes = headline.error_bytes
        off = "" if n_bytes is None else f", {format_bytes(n_bytes)}"
        yield (
            "prediction off by",
            f"{headline.error_p50:.2%}",
            f"of the growth, median{off}; 1 step in 100 by {headline.error_p99:.2%} or "
            f"more",
        )
