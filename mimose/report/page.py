"""A run in numbers, from its records, and its page: figures and tables in one file.

``page.html`` beside this file draws in the browser and loads nothing. This module
chooses what it draws, and puts it into the page as JSON: a few hundred marks a figure
and a few hundred rows a table, whatever the number of steps. A mark is a step: of each
phase some at even distances, and all that stand out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mimose.budget import format_bytes
from mimose.exceptions import MimoseError
from mimose.records import (
    PHASES,
    Shape,
    StepRecord,
    Totals,
    kind_of,
    n_elements,
    shape_text,
    shapes_of,
    sizes_text,
    split_runs,
    totals_of,
)

_Json: TypeAlias = dict[str, Any]
_Each = TypeVar("_Each")
_Values: TypeAlias = NDArray[np.float64]
_Row: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a row or column of the map, and its cells."""

_PHASE_WORDS = {
    "collect": "measuring",
    "step_down": "first plans",
    "plan": "planned",
    "fallback": "safest plan",
}
_MOST_MARKS = 400
"""The most marks of a phase, and the most points of a line."""
_MOST_RINGS = 200
_MOST_WORST = 10
_MOST_ROWS = 100
_MOST_COLUMNS = 120
_LONGEST_NAME = 28
_LONGEST_REASON = 120
_LEAST_WINDOW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline(Totals):
    """The main numbers of a run: the page's, and those of ``mimose report``."""

    runs: int
    """The number of runs to which the steps belong."""
    shapes: int
    """Distinct shapes of the batch."""
    budget_bytes: int
    """The budget at the end of the last run; `budget_range` is that run's, too."""
    peak_bytes: int | None
    """The highest observed peak; None if none was read."""
    budget_use: float | None
    """The highest observed peak as a share of its step's budget."""
    steps_read: int
    """Steps whose peak was read."""
    recompute_share: float
    """The share of all layer calls that was recomputed."""
    cache_hit_rate: float
    """The share of all steps whose plan came from the cache."""
    seconds: float
    """The sum over all steps, from the start of the forward to the end of the
    backward."""
    error_p50: float | None
    """The median of |observed − predicted| growth, as a share of the predicted growth,
    over the steps in phase `plan`; None without such steps."""
    error_p99: float | None


def headline(records: Sequence[StepRecord]) -> Headline:
    """Return the main numbers of one run or several.

    Args:
        records: Their records, at least one.
    """
    runs = split_runs(records)
    totals = replace(totals_of(records), budget_range=totals_of(runs[-1]).budget_range)
    peaks = [r.highest_bytes for r in records if r.highest_bytes is not None]
    uses = [r.budget_use for r in records if r.budget_use is not None]
    n_calls = sum(len(record.actions) for record in records)
    return Headline(
        **asdict(totals),
        **error_quantiles(records),
        runs=len(runs),
        shapes=len({shape for run in runs for shape in shapes_of(run)}),
        budget_bytes=records[-1].budget_bytes,
        peak_bytes=max(peaks, default=None),
        budget_use=max(uses, default=None),
        steps_read=len(peaks),
        recompute_share=sum(r.n_recomputed for r in records) / max(1, n_calls),
        cache_hit_rate=sum(record.cache_hit for record in records) / len(records),
        seconds=sum(record.seconds or 0.0 for record in records),
    )


def error_quantiles(records: Iterable[StepRecord]) -> dict[str, Any]:
    """Return the median and the 99th percentile of errors of predictions, by name."""
    errors = [
        abs(record.prediction_error)
        for record in records
        if record.phase == "plan" and record.prediction_error is not None
    ]
    found = np.quantile(errors, (0.5, 0.99)).tolist() if errors else (None, None)
    return dict(zip(("error_p50", "error_p99"), found, strict=True))


def format_budgets(of_steps: Iterable[int]) -> str:
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
            f"of the growth, median; 1 step in 100 by {numbers.error_p99:.2%} or more",
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
        f"{n:,} {_PHASE_WORDS[phase]}"
        for phase, n in sorted(numbers.phases.items(), key=lambda item: -item[1])
    )
    yield "steps by phase", most, ", ".join(others) or "all of them"


def format_flops(flops: float) -> str:
    """Return a number of FLOPs as text.

    >>> format_flops(3_120_000_000)
    '3.12 GFLOP'
    """
    return f"{flops / 1e9:,.2f} GFLOP"


def format_seconds(seconds: float) -> str:
    """Return a time as text.

    >>> format_seconds(0.0123), format_seconds(5400)
    ('12.3 ms', '5,400 s')
    """
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000.0 else f"{seconds:,.0f} s"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun as text.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def write_page(
    records: Sequence[StepRecord],
    path: str | PathLike[str],
    *,
    title: str = "A training run under mimose",
) -> None:
    """Write the page of a run: one HTML file that loads nothing.

    Args:
        records: The records of a run, as `mimose.records.read_records` returns them; or
            those of several runs, one after the other.
        path: The file to write.
        title: The title of the page.

    Raises:
        MimoseError: There are no records.
        OSError: The file cannot be written.
    """
    if not records:
        msg = "there are no records of steps, so there is no page to write"
        raise MimoseError(msg)
    numbers = headline(records)
    steps = _Steps(records)
    xs = np.arange(len(steps.records), dtype=float)
    window = max(_LEAST_WINDOW, len(steps.records) // 100)
    is_observed = not np.isnan(steps.growth).all()
    growth = steps.growth if is_observed else steps.predicted
    data = {
        "title": title,
        "verdict": verdict(numbers),
        "figures": list(figures(numbers)),
        "steps": numbers.steps,
        "stepsOver": numbers.steps_over,
        "starts": steps.starts,
        "budget": _budget(steps),
        "isObserved": is_observed,
        "growth": _marks(steps, steps.elements, growth),
        "predictions": _marks(steps, steps.predicted, steps.errors),
        "layers": _layers(steps),
        "peaks": _marks(steps, xs, steps.values(lambda r: r.highest_bytes)),
        "held": _thinned(steps.values(lambda record: record.start_bytes)),
        "errors": _marks(steps, xs, steps.errors),
        "window": window,
        "rates": _rates(steps, window),
        "shapes": _shapes(steps),
        "unusual": _unusual(steps),
    }
    # A "<" in a text could end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    page = template.replace("DATA", text.replace("<", "\\u003c"), 1)
    Path(path).write_text(page, encoding="utf-8")


class _Steps:
    """The records in order of run and step, with what follows from all of them."""

    def __init__(self, records: Sequence[StepRecord]) -> None:
        self.records: list[StepRecord] = []
        self.runs: list[int] = []
        self.shapes: list[Shape] = []
        self.starts: list[int] = []
        """The indices at which runs begin."""
        for number, run in enumerate(split_runs(records), start=1):
            run.sort(key=lambda record: record.step)
            self.starts.append(len(self.records))
            self.records += run
            self.runs += [number] * len(run)
            self.shapes += shapes_of(run)
        sizes = {shape: n_elements(shape) for shape in set(self.shapes)}
        self.by_size = sorted(sizes, key=lambda shape: (sizes[shape], shape))
        names = {tuple(name for name, _ in shape) for shape in sizes}
        self.names = names.pop() if len(names) == 1 else None
        """The names of the sizes that vary, if they are the same for all steps."""
        self.elements = np.array([sizes[shape] for shape in self.shapes], dtype=float)
        self.growth = self.values(lambda record: record.observed_growth_bytes)
        self.predicted = self.values(lambda record: record.predicted_growth_bytes)
        self.errors = 100 * self.values(lambda record: record.prediction_error)

    def values(self, of: Callable[[StepRecord], float | None]) -> _Values:
        """Return (n_steps,) a number of every step, NaN if it is not known."""
        found = (of(record) for record in self.records)
        return np.array([np.nan if x is None else x for x in found], dtype=float)

    def words(self, i: int) -> Iterator[str]:
        """Yield the lines of the tooltip of a step."""
        record = self.records[i]
        run = f"run {self.runs[i]}, " if len(self.starts) > 1 else ""
        yield f"{run}step {record.step:,} ({record.phase})"
        yield shape_text(self.shapes[i])
        for name in ("observed", "reserved", "predicted"):
            n_bytes = getattr(record, f"{name}_peak_bytes")
            if n_bytes is not None:
                yield f"{name} peak {format_bytes(n_bytes)}"
        yield f"{record.n_recomputed} of {len(record.actions)} layer calls recomputed"
        if record.retries:
            yield f"run again {record.retries} ×"
        if record.reason:
            yield record.reason[:_LONGEST_REASON]


def _marks(steps: _Steps, xs: _Values, ys: _Values) -> _Json:
    """Return the marks of a figure: dots by phase, and rings around a few.

    Args:
        steps: The steps.
        xs: (n_steps,) Horizontal positions.
        ys: (n_steps,) Vertical positions; steps with NaN are left out.
    """
    known: list[int] = np.flatnonzero(~np.isnan(xs + ys)).tolist()
    records = steps.records

    def mark(i: int) -> list[Any]:
        numbers = xs[i], ys[i], steps.predicted[i]
        return [*map(_short, numbers), "\n".join(steps.words(i))]

    def dots(phase: str) -> list[Any]:
        own = [i for i in known if records[i].phase == phase]
        return [mark(i) for i in _some(own, _MOST_MARKS)]

    def highest(of: Callable[[int], float], most: int) -> list[Any]:
        found = sorted((i for i in known if of(i)), key=of, reverse=True)
        return [mark(i) for i in found[:most]]

    is_planned = [record.phase == "plan" for record in records]
    errors = np.where(is_planned, np.abs(np.nan_to_num(steps.errors)), 0.0)
    return {
        **{phase: dots(phase) for phase in PHASES},
        "over": highest(
            lambda i: records[i].is_over and (records[i].budget_use or 0.0), _MOST_RINGS
        ),
        "again": highest(lambda i: records[i].retries, _MOST_RINGS),
        "worst": highest(lambda i: errors[i], _MOST_WORST),
    }


def _short(number: float) -> float | None:
    """Return a number with as many digits as a figure shows; None if it is NaN."""
    return None if not np.isfinite(number) else float(f"{number:.6g}")


def _thinned(values: _Values) -> list[list[float | None]]:
    """Return the points of a line: all steps, or a few hundred of them."""
    at = np.linspace(0, len(values) - 1, min(len(values), _MOST_MARKS)).round()
    return [[int(i), _short(values[int(i)])] for i in at]


def _budget(steps: _Steps) -> _Json:
    """Return the last run's budget, what it leaves for a step, and reserved bytes.

    What it leaves are the 1st, 50th and 99th percentile over the steps. A budget that
    moves has a line too.
    """
    own = steps.records[steps.starts[-1] :]
    left = [record.budget_bytes - record.start_bytes for record in own]
    reserved = [r.reserved_peak_bytes for r in own if r.reserved_peak_bytes is not None]
    budgets = steps.values(lambda record: record.budget_bytes)
    return {
        "bytes": own[-1].budget_bytes,
        "text": format_budgets(totals_of(own).budget_range),
        "course": _thinned(budgets) if len(set(budgets)) > 1 else [],
        "held": float(np.median([record.start_bytes for record in own])),
        "left": np.quantile(left, (0.01, 0.5, 0.99)).tolist(),
        "reserved": max(reserved, default=None),
        "areReserved": any(r.reserved_peak_bytes is not None for r in steps.records),
    }


def _rates(steps: _Steps, window: int) -> _Json:
    """Return moving averages of cache hits and of recomputed layer calls."""

    def recent(of: Callable[[StepRecord], float]) -> _Values:
        sums = np.concatenate([np.zeros(window), np.cumsum(steps.values(of))])
        found: _Values = sums[window:] - sums[:-window]
        return found

    calls = np.maximum(recent(lambda record: len(record.actions)), 1.0)
    share = recent(lambda record: record.n_recomputed) / calls
    hits = recent(lambda record: record.cache_hit) / recent(lambda _: 1.0)
    return {"hits": _thinned(100 * hits), "share": _thinned(100 * share)}


def _layers(steps: _Steps) -> _Json:
    """Return the last plan of each shape, by layer call, the smallest shape first."""
    last = dict(zip(steps.shapes, steps.records, strict=True))
    plans = [(shape, _plan(last[shape])) for shape in steps.by_size]
    plans = [(shape, plan) for shape, plan in plans if plan]
    found = sorted((plan for _, plan in plans), key=len, reverse=True)
    calls = [*dict.fromkeys(call for plan in found for call in plan)]
    actions = [*dict.fromkeys(action for plan in found for action in plan.values())]
    number = {action: i for i, action in enumerate(actions)} | {"": -1}
    write = shape_text if steps.names is None else sizes_text
    columns = _alike(
        (write(shape), tuple(number[plan.get(call, "")] for call in calls))
        for shape, plan in plans
    )
    drawn = _some(columns, _MOST_COLUMNS)
    cells = list(zip(*(column for _, column in drawn), strict=True))
    rows: list[_Row] = list(zip(map(_short_name, calls), cells, strict=True))
    if len(rows) > _MOST_ROWS // 2:
        rows = _alike(rows)
    return {
        "sizes": " × ".join(steps.names or ()),
        "actions": actions,
        "columns": [name for name, _ in drawn],
        "rows": _some(rows, _MOST_ROWS),
        "counts": [len(plans), len(columns), len(calls), len(rows)],
    }


def _short_name(call: str) -> str:
    """Return the end of a name, which has the number of its layer."""
    name = call.removesuffix("#0")
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _plan(record: StepRecord) -> dict[str, str]:
    """Return the actions by the names of layer calls, or by number without names.

    Recomputation in a measured step is shown as such, because it is not a plan.
    """
    names: Sequence[str] = record.events
    if len(names) != len(record.actions):
        names = [f"layer call {i}" for i in range(len(record.actions))]
    is_measured = record.phase == "collect"
    return {
        name: "measured" if is_measured and action == "recompute" else action
        for name, action in zip(names, record.actions, strict=True)
    }


def _alike(rows: Iterable[_Row]) -> list[_Row]:
    """Merge neighbors with the same cells, named by the first and the last."""
    merged = []
    for cells, group in groupby(rows, key=lambda row: row[1]):
        first, *others = (name for name, _ in group)
        merged.append((f"{first} … {others[-1]}" if others else first, cells))
    return merged


def _some(rows: list[_Each], most: int) -> list[_Each]:
    """Return at most this many items at even distances, the last one included."""
    n_drawn = min(len(rows), most)
    return [rows[(i + 1) * len(rows) // n_drawn - 1] for i in range(n_drawn)]


def _shapes(steps: _Steps) -> _Json:
    """Return a table of shapes, the largest first; neighbors may share a row."""
    of_shape: dict[Shape, list[StepRecord]] = defaultdict(list)
    for shape, record in zip(steps.shapes, steps.records, strict=True):
        of_shape[shape].append(record)

    def looks(shape: Shape) -> object:
        last = of_shape[shape][-1]
        plan = last.phase, last.n_recomputed, len(last.actions)
        return plan if len(of_shape) > _MOST_ROWS else shape

    rows = []
    for _, group in groupby(reversed(steps.by_size), looks):
        shapes = list(group)
        records = [record for shape in shapes for record in of_shape[shape]]
        highest = max(records, key=lambda record: record.budget_use or -1.0)
        times = [1e3 * r.seconds for r in records if r.seconds is not None]
        last = of_shape[shapes[0]][-1]
        rows.append(
            [
                *_sizes(steps, shapes),
                len(shapes),
                len(records),
                last.phase,
                [last.n_recomputed, len(last.actions)],
                last.predicted_peak_bytes,
                highest.highest_bytes,
                highest.budget_use,
                sum(r.recomputed_flops for r in records) / len(records) / 1e9,
                sum(times) / len(times) if times else None,
            ]
        )
    names = ["shape"] if steps.names is None else list(steps.names)
    counts = [len(of_shape), len(rows)]
    return {"sizes": names, "rows": rows[:_MOST_ROWS], "counts": counts}


def _sizes(steps: _Steps, shapes: Sequence[Shape]) -> Iterator[str | list[int]]:
    """Yield the sizes of shapes, each as a range."""
    if steps.names is None:
        yield " … ".join(dict.fromkeys(map(shape_text, (shapes[-1], shapes[0]))))
        return
    for sizes in zip(*([size for _, size in s] for s in shapes), strict=True):
        yield [min(sizes), max(sizes)]


def _unusual(steps: _Steps) -> _Json:
    """Return a table of unusual steps with reasons; similar steps share a row."""
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, record in enumerate(steps.records):
        has_reason = bool(record.reason) and record.phase != "collect"
        is_again = record.retries > 0
        if has_reason or is_again or record.is_over or record.phase == "fallback":
            kind = kind_of(record.reason)
            key = (not record.is_over, not is_again, steps.runs[i], record.phase, kind)
            alike[key].append(i)
    severest = sorted(alike, key=lambda key: (*key[:2], -len(alike[key])))
    rows = []
    for at in map(alike.__getitem__, severest[:_MOST_ROWS]):
        highest = max(at, key=lambda i: steps.records[i].highest_bytes or -1)
        record = steps.records[highest]
        over = "over the budget" if record.is_over else ""
        errors = [e for i in at if (e := steps.records[i].prediction_error) is not None]
        rows.append(
            [
                steps.runs[highest],
                len(at),
                steps.records[at[0]].step,
                steps.records[at[-1]].step,
                record.phase,
                "; ".join(filter(None, (over, record.reason))) or "no reason given",
                shape_text(steps.shapes[highest]),
                record.highest_bytes,
                record.budget_use,
                max(errors, key=abs, default=None),
                sum(steps.records[i].retries for i in at),
            ]
        )
    return {"rows": rows, "counts": [sum(map(len, alike.values())), len(alike)]}
