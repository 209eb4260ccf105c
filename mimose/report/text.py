"""Text for a terminal: wrapped lines, tables, a session's report, a shape's plan."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mimose.budget import format_bytes
from mimose.planners import PlanningProblem, Timeline
from mimose.records import (
    FEWER_SHAPES,
    MUCH,
    RankWaits,
    Records,
    StepRecord,
    Summary,
    kind_of,
    shape_text,
    shapes_of,
    sizes_text,
)
from mimose.report.page import error_quantiles, format_flops, format_seconds

_MOST_SHAPES = 12
_MOST_REASONS = 5
_PAYS = 0.05
"""The gain in throughput that makes a batch twice as large worthwhile."""
_UNKNOWN = 100
"""The width if it is not known: in a file, a pipe or a log."""


def terminal_width() -> int:
    """Return the width of the terminal in characters."""
    return max(60, shutil.get_terminal_size((_UNKNOWN, 24)).columns)


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Wrap a text between words.

    Args:
        text: The text.
        width: Characters in a line.
        first: Indent of the first line.
        rest: Indent of the other lines.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def named(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return names with their texts, in two columns.

    Args:
        rows: Names and texts.
        width: Characters in a line.
    """
    aside = max((len(name) for name, _ in rows), default=0) + 1
    lines: list[str] = []
    for name, text in rows:
        first = f"  {name.ljust(aside)} "
        lines += wrapped(text, width, first=first, rest=" " * len(first))
    return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table: the first column aligned to the left, the others to the right.

    Args:
        rows: The rows; the first has the names of the columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = map(str.rjust, others, widths[1:])
        lines.append("  ".join(["", first.ljust(widths[0]), *cells]))
    return lines


def summarise(records: Records, *, budget_bytes: int, **state: Any) -> Summary:
    """Return the summary of a session.

    Args:
        records: The records in memory, with the totals of all.
        budget_bytes: The present budget.
        state: The other fields of `Summary`, by name.
    """
    totals = asdict(records.totals())
    budgets = (*totals["budget_range"], budget_bytes)
    return Summary(
        budget_bytes=budget_bytes,
        shapes=len(set(shapes_of(records))),
        **totals | {"budget_range": (min(budgets), max(budgets))},
        **error_quantiles(records),
        **state,
    )


def report(summary: Summary, records: Sequence[StepRecord], width: int) -> str:
    """Return the report of a session.

    Args:
        summary: Its summary.
        records: Its records.
        width: Characters in a line.
    """
    kept = [f"{name}: {why}" for name, why in summary.kept_units.items()]
    inexact = [f"{name}: {why}" for name, why in summary.inexact_layers.items()]
    parts = [
        _overview(summary, width),
        _shapes(records, width),
        _reasons(records, width),
        _listed("Layers that are always kept", kept, width),
        _listed("Layers not exact when recomputed", inexact, width),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _hidden(n: int, most: int, what: str) -> list[str]:
    return [f"({n - most} other {what} not shown)"] if n > most else []


def _listed(title: str, items: Sequence[str], width: int) -> list[str]:
    """Return items below a title; nothing if there are none."""
    lines = [
        line for item in items for line in wrapped(item, width, first="  ", rest="    ")
    ]
    return [*wrapped(title, width), *lines] if lines else []


def _overview(summary: Summary, width: int) -> list[str]:
    phases = ", ".join(f"{n} {phase}" for phase, n in summary.phases.items())
    least, most = summary.budget_range
    now, use = format_bytes(summary.budget_bytes), ""
    if least < most:
        now += f" now, {format_bytes(least)} to {format_bytes(most)} before"
    else:
        use = f" ({summary.peak_bytes / summary.budget_bytes:.0%})"
    outside = summary.peak_bytes > most and not summary.steps_over
    budget = (
        f"{now}; highest reading {format_bytes(summary.peak_bytes)}{use}"
        f"{', outside of forward and backward' if outside else ''}; "
        f"{summary.steps_over} steps over"
    )
    plans = (
        f"{summary.cache_hits} from the cache, {summary.cache_misses} made, "
        f"{summary.plan_seconds * 1e3:.1f} ms in all"
    )
    recomputed = (
        f"{format_flops(summary.recomputed_flops)}, "
        f"{format_flops(summary.collected_flops)} of it while collecting"
    )
    rows = [
        ("budget", budget),
        ("phases", phases or "none yet"),
        ("plans", plans),
        ("recomputed", recomputed),
        ("margin", f"{summary.margin:.1%} of the predicted growth"),
        *_rarer(summary),
    ]
    title = (
        f"mimose: {summary.steps} steps, {summary.layers} layers, "
        f"{summary.shapes} shapes"
    )
    return [*wrapped(title, width), *named(rows, width)]


def _rarer(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the lines that only some sessions have."""
    for sentence in summary.unplanned:
        yield "unplanned", sentence
    if summary.rehearsed:
        yield "state", summary.rehearsed
    if summary.error_p50 is not None and summary.error_p99 is not None:
        off = f"off by {summary.error_p50:.2%} of the growth (median), "
        yield "prediction", f"{off}{summary.error_p99:.2%} (99th percentile)"
    if summary.host is not None:
        host = summary.host
        pinned = f" ({format_bytes(host.pinned_peak_bytes)} pinned)"
        yield (
            "host",
            f"at most {format_bytes(host.peak_bytes)} of "
            f"{format_bytes(host.budget_bytes)} held"
            f"{pinned if host.pinned_peak_bytes else ''}; {host.n_refused} tensors did "
            f"not fit and stayed on the device",
        )
    if summary.byte_price is not None:
        flops, precision, source = summary.byte_price
        yield (
            "prices",
            f"a byte moved as {flops:g} FLOPs ({precision} precision, {source})",
        )
    if summary.agreement is not None:
        n_ranks, n_exchanges, seconds, n_changed = summary.agreement
        yield (
            "ranks",
            f"{n_ranks} agree; {n_changed} forwards ran another plan than this rank "
            f"would have run alone; {n_exchanges} exchanges took {seconds:.2f} s",
        )
    if summary.fragmentation is not None:
        yield (
            "fragmented",
            f"{summary.fragmentation:.2f} bytes reserved for each byte of growth; "
            f"the allocator freed its cached blocks {summary.flushes} times",
        )
    if summary.fixed_seconds is not None and summary.batch_seconds is not None:
        yield "pace", _pace(summary.fixed_seconds, summary.batch_seconds)
    if summary.first_times is not None:
        n_new, n_steps, share, _ = summary.first_times
        yield (
            "new shapes",
            f"{n_new} of the last {n_steps} steps met a shape for the first time, "
            f"which took {share:.0%} of their time"
            + (f". {FEWER_SHAPES}" if share > MUCH else ""),
        )
    if summary.rank_waits is not None:
        yield "waiting", _waits(summary.rank_waits)
    if summary.least_rows_share > _PAYS:
        yield (
            "min_rows",
            f"costs {summary.least_rows_share:.0%} of the tokens a second, predicted "
            f"in the mean over lengths: a smaller one trains more",
        )
    if summary.largest_to_come:
        least = summary.least_peak_to_come
        needs = "what it needs is not known yet"
        if least is not None:
            needs = f"it needs at least {format_bytes(least)}"
        shape = tuple(summary.largest_to_come.items())
        yield "expected", f"{shape_text(shape)} is the largest shape; {needs}"
    if summary.retries:
        yield (
            "run again",
            f"{summary.retries} forwards, because memory ran out, or too little was "
            f"left for the backward",
        )


def _waits(waits: RankWaits) -> str:
    """Return how long ranks wait for the slowest, and for which most often."""
    n_most = max(waits.slowest)
    share = waits.waited / waits.seconds if waits.seconds else 0.0
    return (
        f"ranks wait {share:.1%} of the time for the slowest, as predicted for "
        f"{waits.n_steps} steps; most often, in {n_most} of them, for rank "
        f"{waits.slowest.index(n_most)}"
    )


def _pace(fixed_seconds: float, batch_seconds: float) -> str:
    """Return the parts of a step's time, and from where larger batches gain little.

    Doubling a batch raises the throughput by a share of ``fixed / (fixed + 2 batch)``.
    """
    text = f"a step has a fixed time of {format_seconds(fixed_seconds)}"
    if batch_seconds <= fixed_seconds / 100:  # the host decides, or no times show it
        return text
    enough = (1.0 / _PAYS - 1.0) * fixed_seconds / batch_seconds / 2.0
    from_where = f"{enough:,.1f} times that batch" if enough > 1.0 else "there"
    return (
        f"{text}; the last shape adds {format_seconds(batch_seconds)}. From "
        f"{from_where} on, a batch twice as large trains less than {_PAYS:.0%} more a "
        f"second"
    )


def _shapes(records: Sequence[StepRecord], width: int) -> list[str]:
    """Return a table of the last record of each shape, the largest growth first."""
    shapes = shapes_of(records)
    last = dict(zip(shapes, records, strict=True))
    by_growth = sorted(last, key=lambda s: -(last[s].observed_growth_bytes or 0))
    names = {tuple(name for name, _ in shape) for shape in last}
    is_alike = len(names) == 1
    titles = "shape", "steps", "phase", "recomputed", "predicted", "observed"
    rows = [titles]
    steps = Counter(shapes)
    for shape in by_growth[:_MOST_SHAPES]:
        record = last[shape]
        rows.append(
            (
                sizes_text(shape) if is_alike else shape_text(shape),
                str(steps[shape]),
                record.phase,
                f"{record.n_recomputed}/{len(record.actions)}",
                _bytes_or_dash(record.predicted_peak_bytes),
                _bytes_or_dash(record.observed_peak_bytes),
            )
        )
    if len(rows) == 1:
        return []
    more = "".join(_hidden(len(last), _MOST_SHAPES, "shapes"))
    named_after = " × ".join(names.pop()) if is_alike else ""
    of = f" ({named_after})" if named_after else ""
    title = wrapped(f"Peaks by shape{of}, the largest growth first", width)
    return [*title, *table(rows), *wrapped(more, width)]


def _reasons(records: Sequence[StepRecord], width: int) -> list[str]:
    found = [r.reason for r in records if r.reason and r.phase != "collect"]
    reasons = Counter(map(kind_of, found))
    last = {kind_of(reason): reason for reason in found}
    items = [f"{n} × {last[kind]}" for kind, n in reasons.most_common(_MOST_REASONS)]
    items += _hidden(len(reasons), _MOST_REASONS, "reasons")
    return _listed("Unusual steps", items, width)


def explain(
    problem: PlanningProblem,
    laid_out: Timeline,
    *,
    shape: Mapping[str, int],
    why: str,
    by_rows: bool,
    seconds: tuple[float, float, float] | None,
    first_seconds: float,
    width: int,
) -> str:
    """Return a plan as text: its layer calls, and the segment with the peak.

    Args:
        problem: The step, at exact sizes.
        laid_out: The timeline of the step under the plan.
        shape: Its sizes by name.
        why: How the plan was made.
        by_rows: Whether mimose may compute the loss by rows.
        seconds: Of the step, its fixed part, and what the plan adds; None if not known.
        first_seconds: What the first step at a shape takes beyond.
        width: Characters in a line.
    """
    names = laid_out.segments
    peaks = dict(zip(names, laid_out.peak_bytes_by_segment.tolist(), strict=True))
    titles = "call", "action", "holds", "could free", "GFLOP", "peak fwd", "peak bwd"
    rows = [titles]
    for index, call in enumerate(problem.calls):
        action = int(laid_out.choice[index])
        held = problem.held_bytes[index]
        cost = problem.cost[index, action] / 1e9
        rows.append(
            (
                call,
                problem.actions[action],
                format_bytes(held[action]),
                format_bytes(held[0] - held.min()),
                f"{cost:.3f}",
                format_bytes(peaks[f"forward of {call}"]),
                format_bytes(peaks[f"backward of {call}"]),
            )
        )
    takes: list[str] = []
    if seconds is not None:
        whole, fixed, extra = map(format_seconds, seconds)
        of_it = f"{fixed} of it do not depend on the batch, and the plan adds {extra}"
        takes = [f"takes {whole}: {of_it}"]
        if first_seconds:
            takes.append(
                f"the first time at a shape {format_seconds(first_seconds)} more"
            )
    holders = "; ".join(f"{k} {format_bytes(v)}" for k, v in laid_out.holders().items())
    lines = [
        f"starts at {format_bytes(problem.start_bytes)}, peaks at "
        f"{format_bytes(laid_out.peak_bytes)}, budget "
        f"{format_bytes(problem.budget_bytes)}",
        *takes,
        f"peak in: {', '.join(laid_out.binding_segments)}",
        f"held there: {holders}",
        *_head_advice(laid_out, by_rows=by_rows),
    ]
    head = _listed(f"Shape {shape_text(tuple(shape.items()))}: {why}", lines, width)
    return "\n".join([*head, "", *table(rows)])


def _head_advice(laid_out: Timeline, *, by_rows: bool) -> Iterator[str]:
    """Yield advice if the head has the peak."""
    if "head" not in laid_out.binding_segments:
        return
    peaks, at = laid_out.peak_bytes_by_segment, laid_out.segments.index("head")
    freed = format_bytes(peaks[at] - np.delete(peaks, at).max())
    yield (
        f"the head (in a language model the logits, their loss and its gradients) has "
        f"the peak. A loss that never makes all logits (torch's linear_cross_entropy, "
        f"Liger's fused one) would free up to {freed}, but rounds differently"
    )
    if not by_rows:
        yield (
            "mimose.cross_entropy gives the same loss, bit for bit, in less memory; "
            "transformers' own losses use it by themselves if the budget needs it"
        )


def _bytes_or_dash(n_bytes: float | None) -> str:
    return "–" if n_bytes is None else format_bytes(n_bytes)
