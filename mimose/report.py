"""Numbers and text about a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mimose.budget import format_bytes
from mimose.estimator import StepFacts
from mimose.plan_cache import PlanCache
from mimose.policy import Memory, Policy
from mimose.records import StepRecord, Summary


def summarise(
    records: Sequence[StepRecord],
    *,
    budget_bytes: int,
    peak_bytes: int,
    units: int,
    cache: PlanCache,
    margin: float,
    kept_units: Mapping[str, str],
) -> Summary:
    """Sum up the records."""
    errors = [
        abs(r.observed_growth_bytes - r.predicted_growth_bytes)
        / r.predicted_growth_bytes
        for r in records
        if r.phase == "plan" and r.observed_growth_bytes and r.predicted_growth_bytes
    ]
    return Summary(
        steps=len(records),
        phases=dict(Counter(r.phase for r in records)),
        steps_over=sum((r.observed_peak_bytes or 0) > budget_bytes for r in records),
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        units=units,
        shapes=len({tuple(r.shape.items()) for r in records}),
        cache_hits=cache.hits,
        cache_misses=cache.misses,
        margin=margin,
        error_p50=float(np.quantile(errors, 0.5)) if errors else None,
        error_p99=float(np.quantile(errors, 0.99)) if errors else None,
        recomputed_flops=sum(r.recomputed_flops for r in records),
        collected_flops=sum(
            r.recomputed_flops for r in records if r.phase == "collect"
        ),
        plan_seconds=sum(r.plan_seconds for r in records),
        retries=sum(r.retries for r in records),
        kept_units=kept_units,
    )


def report(summary: Summary, records: Sequence[StepRecord]) -> str:
    """Write the report."""
    return str(summary) + format_bytes(summary.peak_bytes)


def explain(policy: Policy, facts: StepFacts, memory: Memory) -> str:
    """Write a plan."""
    return ""
