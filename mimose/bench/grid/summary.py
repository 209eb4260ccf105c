"""What the rows of a grid come to: a summary for each workload, budget and strategy."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.bench.grid.rows import GridRow

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)
TURN = 4
"""Steps that a strategy takes before it is the next one's turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSummary:
    """One strategy at one budget on one workload, over its measured steps.

    A strategy that knows no budget is judged at each of them.
    """

    workload: str
    strategy: str
    budget_share: float
    headroom_bytes: int
    """The budget less what is held when training begins."""
    problem: str
    """Why it did not run, or not to its end."""
    steps: int
    seconds_ratio: float | None
    """Time of the same steps in plain training is 1."""
    seconds_low: float | None
    """Lower end of the ratio's 95% interval, by resampling turns."""
    seconds_high: float | None
    total_ratio: float | None
    """The same with the warm-up's steps."""
    recomputed_flops: int | None
    """None where they cannot be counted."""
    warm_up_flops: int | None
    """Recomputed in the warm-up's steps."""
    largest_growth_bytes: int
    steps_over: int
    """Steps, the warm-up's included, that grew beyond the headroom."""
    needed: int
    """Measured steps that plain training cannot take within the budget."""
    use_p50: float | None
    """Median of growth ÷ headroom over those."""
    error_p50: float | None
    """Median of |growth − predicted| ÷ growth over planned steps."""
    error_p99: float | None
    learning_steps: int
    """Steps that measured, or made a first careful plan."""
    hit_seconds: float | None
    """Median time to find a plan that was made before."""
    miss_seconds: float | None
    """Median time to make one."""
    loss_is_equal: bool | None
    """Whether every loss is plain training's to the last bit; None without steps."""

    @property
    def keeps_budget(self) -> bool:
        """Whether it ran to its end and never went over."""
        return not self.problem and self.steps_over == 0


def summarise(rows: Iterable[GridRow]) -> list[CellSummary]:
    """Sum up, by workload, then budget, then strategy in the order of the rows."""
    by_workload: dict[str, list[GridRow]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    return [cell for own in by_workload.values() for cell in _workload(own)]


def _workload(rows: Sequence[GridRow]) -> list[CellSummary]:
    cells: dict[tuple[str, float | None], list[GridRow]] = {}
    budgets: dict[float, int] = {}
    for row in rows:
        cells.setdefault((row.strategy, row.budget_share), []).append(row)
        if row.budget_share is not None and row.headroom_bytes is not None:
            budgets[row.budget_share] = row.headroom_bytes
    plain = {row.step: row for row in cells.get(("none", None), []) if not row.problem}
    return [
        _cell(name, share, headroom, own, plain)
        for share, headroom in sorted(budgets.items())
        for (name, own_share), own in cells.items()
        if own_share in (None, share)
    ]


def _cell(
    name: str,
    share: float,
    headroom: int,
    rows: Sequence[GridRow],
    plain: Mapping[int, GridRow],
) -> CellSummary:
    ran = [row for row in rows if not row.problem]
    pairs = [(row, plain[row.step]) for row in ran if row.step in plain]
    measured = [(row, other) for row, other in pairs if row.is_measured]
    ratio, low, high = _interval(measured)
    needing = [row for row, other in measured if other.growth_bytes > headroom]
    planned = [row for row in ran if row.phase == "plan"]
    errors = sorted(
        abs(row.peak_bytes - row.start_bytes - row.predicted_growth_bytes)
        / (row.peak_bytes - row.start_bytes)
        for row in planned
        if row.predicted_growth_bytes is not None
    )
    return CellSummary(
        workload=rows[0].workload,
        strategy=name,
        budget_share=share,
        headroom_bytes=headroom,
        problem=next((row.problem for row in rows if row.problem), ""),
        steps=len(measured),
        seconds_ratio=ratio,
        seconds_low=low,
        seconds_high=high,
        total_ratio=_ratio(pairs),
        recomputed_flops=_flops(row for row, _ in measured),
        warm_up_flops=_flops(row for row in ran if not row.is_measured),
        largest_growth_bytes=max((row.growth_bytes for row in ran), default=0),
        steps_over=sum(row.growth_bytes > headroom for row in ran),
        needed=len(needing),
        use_p50=_median(row.growth_bytes / headroom for row in needing),
        error_p50=_median(errors),
        error_p99=errors[min(len(errors) - 1, int(0.99 * len(errors)))]
        if errors
        else None,
        learning_steps=sum(row.phase in ("collect", "step_down") for row in ran),
        hit_seconds=_median(row.plan_seconds for row in planned if row.cache_hit),
        miss_seconds=_median(row.plan_seconds for row in planned if not row.cache_hit),
        loss_is_equal=all(row.loss == other.loss for row, other in pairs)
        if pairs
        else None,
    )


def _ratio(pairs: Sequence[tuple[GridRow, GridRow]]) -> float | None:
    below = sum(other.seconds for _, other in pairs)
    return sum(row.seconds for row, _ in pairs) / below if below else None


def _interval(
    pairs: Sequence[tuple[GridRow, GridRow]],
) -> tuple[float | None, float | None, float | None]:
    """Return a ratio of times and the ends of its 95% interval, by the bootstrap.

    Turns are resampled, not steps: what disturbs a step disturbs those beside it.
    """
    if not pairs:
        return None, None, None
    turns: dict[int, tuple[float, float]] = {}
    for row, other in pairs:
        mine, theirs = turns.get(row.step // TURN, (0.0, 0.0))
        turns[row.step // TURN] = mine + row.seconds, theirs + other.seconds
    seconds = np.array(list(turns.values()))
    n_turns = len(seconds)
    chosen = np.random.default_rng(0).integers(n_turns, size=(_RESAMPLES, n_turns))
    sums = seconds[chosen].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], _INTERVAL)
    return _ratio(pairs), float(low), float(high)


def _flops(rows: Iterable[GridRow]) -> int | None:
    counts = [row.recomputed_flops for row in rows]
    return _sum(counts) if counts else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """mimose against another strategy, over the cells in which both keep the budget."""

    other: str
    cells: int
    seconds_ratio: float
    """Geometric mean of mimose's time ÷ the other's."""
    flops_ratio: float | None
    """mimose's recomputed FLOPs ÷ the other's, summed over the cells; None where they
    are not known, or the other recomputes nothing."""


def compare(summaries: Sequence[CellSummary], other: str) -> Comparison | None:
    """Compare with another strategy; None where there is no cell to compare in.

    Args:
        summaries: Of a grid.
        other: Its name.
    """
    found = {(s.workload, s.budget_share, s.strategy): s for s in summaries}
    pairs = [
        (mine, found[workload, share, other])
        for (workload, share, name), mine in found.items()
        if name == "mimose" and (workload, share, other) in found
    ]
    kept = [(a, b) for a, b in pairs if a.keeps_budget and b.keeps_budget]
    ratios = [
        a.seconds_ratio / b.seconds_ratio
        for a, b in kept
        if a.seconds_ratio and b.seconds_ratio
    ]
    if not ratios:
        return None
    mine, theirs = (_sum(cell[i].recomputed_flops for cell in kept) for i in (0, 1))
    flops_ratio = mine / theirs if mine is not None and theirs else None
    return Comparison(other, len(kept), statistics.geometric_mean(ratios), flops_ratio)


def _sum(counts: Iterable[int | None]) -> int | None:
    found = list(counts)
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def swapped(
    first: Sequence[CellSummary], second: Sequence[CellSummary]
) -> list[tuple[str, float, str, str]]:
    """Return which strategies two runs of a grid rank differently by their time.

    Only those that keep the budget in both are ranked, and two whose intervals overlap
    in either run are as good as each other.

    Args:
        first: A grid's summaries.
        second: Another run's.

    Returns:
        (workload, budget, the faster one in the first run, the other).
    """
    again = {(s.workload, s.budget_share, s.strategy): s for s in second}
    found = []
    for a, b in itertools.permutations(first, 2):
        place = a.workload, a.budget_share
        if place != (b.workload, b.budget_share):
            continue
        other_a, other_b = (again.get((*place, s.strategy)) for s in (a, b))
        if other_a is None or other_b is None:
            continue
        if _is_faster(a, b) and _is_faster(other_b, other_a):
            found.append((*place, a.strategy, b.strategy))
    return found


def _is_faster(one: CellSummary, other: CellSummary) -> bool:
    """Whether both keep the budget, and the intervals do not overlap."""
    if not (one.keeps_budget and other.keeps_budget):
        return False
    if one.seconds_high is None or other.seconds_low is None:
        return False
    return one.seconds_high < other.seconds_low
