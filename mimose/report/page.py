"""The page of a run: figures and tables in one HTML file, from its records.

``page.html`` beside this file draws in the browser and loads nothing. This module
chooses what it draws, and puts it into the page as JSON: a few hundred marks a figure
and a few hundred rows a table, whatever the number of steps. Steps of one phase at the
same place share a mark: the median, with a bar from the lowest to the highest value.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.budget import format_bytes
from mimose.exceptions import MimoseError
from mimose.records import PHASES, StepRecord, kind_of
from mimose.report.headline import (
    budget_range,
    counted,
    figures,
    format_budgets,
    format_flops,
    format_seconds,
    headline,
    verdict,
)
from mimose.report.shapes import (
    Shape,
    formula,
    n_elements,
    shape_text,
    shapes_of,
    sizes_text,
    split_runs,
)

_Json: TypeAlias = dict[str, Any]
_Values: TypeAlias = NDArray[np.float64]
_Row: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a row or column of the map, and its cells."""

_MOST_SINGLE = 400
"""Up to this many steps each step has its own mark."""
_MOST_PLACES = 200
_MOST_RINGS = 200
_MOST_WORST = 10
_MOST_ROWS = 100
_MOST_COLUMNS = 120
_LONGEST_NAME = 28
_LONGEST_REASON = 120
_LEAST_WINDOW = 50


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
    peaks = steps.values(lambda record: record.highest_bytes)
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
        "size": "its elements" if steps.names is None else formula(steps.names),
        "isObserved": is_observed,
        "growth": _marks(steps, steps.elements, growth),
        "predictions": _marks(steps, steps.predicted, steps.errors),
        "layers": _layers(steps),
        "times": _times(steps),
        "peaks": _marks(steps, xs, peaks),
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

    def words(self, at: Sequence[int]) -> Iterator[str]:
        """Yield the lines of the tooltip of one step or several."""
        record, last = self.records[at[0]], self.records[at[-1]]
        shapes = {self.shapes[i] for i in at}
        shape = shape_text(*shapes) if len(shapes) == 1 else f"{len(shapes)} shapes"
        run = f"run {self.runs[at[0]]}, " if len(self.starts) > 1 else ""
        if len(at) > 1:
            yield f"{len(at):,} steps ({record.phase})"
            yield f"{run}{record.step:,} to {last.step:,}"
            yield shape
            return
        yield f"{run}step {record.step:,} ({record.phase})"
        yield shape
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
    """Return the marks of a figure: dots by phase and place, and rings around a few.

    Args:
        steps: The steps.
        xs: (n_steps,) Horizontal positions.
        ys: (n_steps,) Vertical positions; steps with NaN are left out.
    """
    known = np.flatnonzero(~np.isnan(xs + ys))
    places = known
    if len(known) > _MOST_SINGLE:
        values, places = np.unique(xs[known], return_inverse=True)
        if len(values) > _MOST_PLACES:
            edges = np.linspace(values[0], values[-1], _MOST_PLACES + 1)[1:-1]
            places = np.searchsorted(edges, xs[known], side="right")
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, place in zip(known.tolist(), places.tolist(), strict=True):
        groups[steps.records[i].phase, place].append(i)

    def mark(at: Sequence[int]) -> list[Any]:
        own, predicted = ys[at], steps.predicted[at]
        numbers = [np.median(xs[at]), np.median(own), own.min(), own.max()]
        numbers.append(np.nan if np.isnan(predicted).all() else np.nanmedian(predicted))
        return [*map(_short, numbers), "\n".join(steps.words(at))]

    def highest(of: Callable[[int], float], most: int) -> list[Any]:
        found = sorted((i for i in known.tolist() if of(i)), key=of, reverse=True)
        return [mark([i]) for i in found[:most]]

    records = steps.records
    is_planned = [record.phase == "plan" for record in records]
    errors = np.where(is_planned, np.abs(np.nan_to_num(steps.errors)), 0.0)
    return {
        **{
            p: [mark(at) for (own, _), at in groups.items() if own == p] for p in PHASES
        },
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
    at = np.linspace(0, len(values) - 1, min(len(values), _MOST_SINGLE)).round()
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
        "text": format_budgets(budget_range(own)),
        "course": _thinned(budgets) if len(set(budgets)) > 1 else [],
        "held": float(np.median([record.start_bytes for record in own])),
        "left": np.quantile(left, (0.01, 0.5, 0.99)).tolist(),
        "reserved": max(reserved, default=None),
        "areReserved": any(r.reserved_peak_bytes is not None for r in steps.records),
    }


def _times(steps: _Steps) -> list[Any]:
    """Return bars of seconds by phase, of plans, and of recomputed FLOPs."""
    seconds: list[tuple[str, float, str]] = []
    flops: list[tuple[str, float, str]] = []
    for phase in PHASES:
        own = [record for record in steps.records if record.phase == phase]
        if own:
            took = sum(record.seconds or 0.0 for record in own)
            redone = sum(record.recomputed_flops for record in own)
            words = f"{format_seconds(took)}, {counted(len(own), 'step')}"
            seconds.append((phase, took, words))
            flops.append((phase, redone, format_flops(redone)))
    spent = sum(record.plan_seconds for record in steps.records)
    seconds.append(("choosing plans", spent, format_seconds(spent)))
    return [("time in steps", seconds), ("recomputed", flops)]


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


# ------------------------------------------------------------------ the map of layers


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
    rows: list[_Row] = list(zip(_short_names(calls), cells, strict=True))
    if len(rows) > _MOST_ROWS // 2:
        rows = _alike(rows)
    return {
        "sizes": " × ".join(steps.names or ()),
        "actions": actions,
        "columns": [name for name, _ in drawn],
        "rows": _some(rows, _MOST_ROWS),
        "counts": [len(plans), len(columns), len(calls), len(rows)],
    }


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


def _some(rows: list[_Row], most: int) -> list[_Row]:
    """Return at most this many rows at even distances, the last one included."""
    n_drawn = min(len(rows), most)
    return [rows[(i + 1) * len(rows) // n_drawn - 1] for i in range(n_drawn)]


def _short_names(calls: Sequence[str]) -> list[str]:
    """Return short names: without call numbers if all are 0, and a shared prefix.

    The last part of the prefix stays, because it says what the numbers count.
    """
    if all(call.endswith("#0") for call in calls):
        calls = [call.removesuffix("#0") for call in calls]
    parts = [call.split(".") for call in calls]
    while len({tuple(p[:2]) for p in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [part[1:] for part in parts]
    half = _LONGEST_NAME // 2
    names = [".".join(part) for part in parts]
    return [n if len(n) <= 2 * half else f"{n[: half - 1]}…{n[-half:]}" for n in names]


# ------------------------------------------------------------------ tables


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
    severest = sorted(alike.items(), key=lambda item: (*item[0][:2], -len(item[1])))
    rows = []
    for at in sorted(at for _, at in severest[:_MOST_ROWS]):
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
