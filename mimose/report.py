"""A session in numbers, and as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mimose.budget import format_bytes
from mimose.plan_cache import PlanCache
from mimose.planners import PlanningProblem, Timeline
from mimose.records import PHASES, Records, StepRecord, Summary

_MOST_SHAPES = 12
_MOST_REASONS = 5


def summarise(
    records: Records,
    *,
    budget_bytes: int,
    peak_bytes: int,
    units: int,
    cache: PlanCache,
    margin: float,
    kept_units: Mapping[str, str],
    fragmentation: float | None = None,
    given_back: int | None = None,
    inexact_units: Mapping[str, str],
) -> Summary:
    """Sum up the records of a session.

    Args:
        records: The records that are kept, and the totals of all.
        budget_bytes: The budget.
        peak_bytes: The highest reading of all.
        units: How many modules are planned for.
        cache: The plans.
        margin: The safety margin now, as a share of predicted growth.
        kept_units: Units that cannot be recomputed, and why.
        fragmentation: On an accelerator, reserved growth for each byte of growth.
        given_back: On an accelerator, how often free blocks were given back.
        inexact_units: Units that are recomputed, but not to the bit, and why.
    """
    errors = [
        abs(record.prediction_error)
        for record in records
        if record.phase == "plan" and record.prediction_error is not None
    ]
    totals = records.totals()
    return Summary(
        steps=totals.steps,
        phases=dict(totals.phases),
        steps_over=totals.steps_over,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        units=units,
        shapes=_n_shapes(records),
        cache_hits=cache.hits,
        cache_misses=cache.misses,
        margin=margin,
        error_p50=float(np.quantile(errors, 0.5)) if errors else None,
        error_p99=float(np.quantile(errors, 0.99)) if errors else None,
        recomputed_flops=totals.recomputed_flops,
        collected_flops=totals.collected_flops,
        plan_seconds=totals.plan_seconds,
        retries=totals.retries,
        kept_units=kept_units,
        fragmentation=fragmentation,
        given_back=given_back,
        inexact_units=inexact_units,
    )


def _n_shapes(records: Sequence[StepRecord]) -> int:
    """Count the shapes by the sizes known to vary by now: early records name more."""
    if not records:
        return 0
    first, names = records[0].shape, records[-1].shape
    return len({tuple(r.shape.get(n, first.get(n)) for n in names) for r in records})


def report(summary: Summary, records: Sequence[StepRecord]) -> str:
    """Write what happened in a session.

    Args:
        summary: The session in numbers.
        records: Its records.
    """
    parts = [_overview(summary), _shapes(records), _reasons(records)]
    parts.append(_reasoned("Layers that are always kept", summary.kept_units))
    parts.append(_reasoned("Layers not exact when recomputed", summary.inexact_units))
    return "\n\n".join(part for part in parts if part)


def _reasoned(title: str, units: Mapping[str, str]) -> str:
    lines = [f"  {name}: {why}" for name, why in units.items()]
    return "\n".join([title, *lines]) if lines else ""


def _overview(summary: Summary) -> str:
    phases = ", ".join(
        f"{summary.phases[phase]} {phase}"
        for phase in PHASES
        if phase in summary.phases
    )
    share = summary.peak_bytes / summary.budget_bytes
    lines = [
        f"mimose: {summary.steps} steps, {summary.units} units, "
        f"{summary.shapes} shapes",
        f"  budget       {format_bytes(summary.budget_bytes)}; highest reading "
        f"{format_bytes(summary.peak_bytes)} ({share:.0%}); "
        f"{summary.steps_over} steps over",
        f"  phases       {phases or 'none yet'}",
        f"  plans        {summary.cache_hits} from the cache, "
        f"{summary.cache_misses} decided anew, "
        f"{summary.plan_seconds * 1e3:.1f} ms in all",
        f"  recomputed   {summary.recomputed_flops / 1e9:.2f} GFLOP, of which "
        f"{summary.collected_flops / 1e9:.2f} while collecting",
        f"  margin       {summary.margin:.1%} of the predicted growth",
    ]
    if summary.error_p50 is not None and summary.error_p99 is not None:
        lines.append(
            f"  prediction   off by {summary.error_p50:.2%} of the growth (median), "
            f"{summary.error_p99:.2%} (99th percentile)"
        )
    if summary.fragmentation is not None:
        lines.append(
            f"  fragmented   {summary.fragmentation:.2f} bytes reserved for each byte "
            f"of growth; free blocks given back before {summary.given_back} steps"
        )
    if summary.retries:
        lines.append(f"  run again    {summary.retries} forwards")
    return "\n".join(lines)


def _shapes(records: Sequence[StepRecord]) -> str:
    """List the last record of each shape, the largest growth first."""
    last = {tuple(record.shape.items()): record for record in records}
    by_growth = sorted(last.values(), key=lambda r: -(r.observed_growth_bytes or 0))
    rows = [("shape", "steps", "phase", "recomputed", "predicted", "observed")]
    steps = Counter(tuple(record.shape.items()) for record in records)
    for record in by_growth[:_MOST_SHAPES]:
        n_recomputed = sum(action != "keep" for action in record.actions)
        rows.append(
            (
                _shape_text(record.shape),
                str(steps[tuple(record.shape.items())]),
                record.phase,
                f"{n_recomputed}/{len(record.actions)}",
                _bytes_or_dash(record.predicted_peak_bytes),
                _bytes_or_dash(record.observed_peak_bytes),
            )
        )
    if len(rows) == 1:
        return ""
    hidden = len(last) - _MOST_SHAPES
    more = [f"({hidden} smaller shapes not shown)"] if hidden > 0 else []
    return "\n".join(["Peaks by shape, the largest first", *_table(rows), *more])


def _reasons(records: Sequence[StepRecord]) -> str:
    reasons = Counter(r.reason for r in records if r.reason and r.phase != "collect")
    if not reasons:
        return ""
    lines = [f"  {n} × {reason}" for reason, n in reasons.most_common(_MOST_REASONS)]
    return "\n".join(["Steps out of the ordinary", *lines])


def explain(
    problem: PlanningProblem, laid_out: Timeline, *, shape: Mapping[str, int], why: str
) -> str:
    """Write a plan, event by event, and which segment binds.

    Args:
        problem: The step, at exact sizes.
        laid_out: The step under the plan.
        shape: Its sizes by name.
        why: How the plan came about.
    """
    names = laid_out.segments
    peaks = dict(zip(names, laid_out.peak_bytes_by_segment.tolist(), strict=True))
    rows = [("event", "action", "holds", "could free", "GFLOP", "peak fwd", "peak bwd")]
    for index, event in enumerate(problem.events):
        action = int(laid_out.choice[index])
        held = problem.held_bytes[index]
        rows.append(
            (
                event,
                problem.actions[action],
                format_bytes(held[action]),
                format_bytes(held[0] - held.min()),
                f"{problem.cost[index, action] / 1e9:.3f}",
                format_bytes(peaks[f"forward of {event}"]),
                format_bytes(peaks[f"backward of {event}"]),
            )
        )
    holders = laid_out.holders().items()
    return "\n".join(
        [
            f"Shape {_shape_text(shape)}: {why}",
            f"  starts at {format_bytes(problem.start_bytes)}, peaks at "
            f"{format_bytes(laid_out.peak_bytes)}, budget "
            f"{format_bytes(problem.budget_bytes)}",
            f"  binding: {', '.join(laid_out.binding_segments)}",
            "  held there: " + "; ".join(f"{k} {format_bytes(v)}" for k, v in holders),
            "",
            *_table(rows),
        ]
    )


def _shape_text(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in shape.items()) or "(no sizes)"


def _bytes_or_dash(n_bytes: float | None) -> str:
    return "–" if n_bytes is None else format_bytes(n_bytes)


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Align the columns: text to the left, the rest to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
