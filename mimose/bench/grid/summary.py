"""What the rows of a grid come to: a summary for each workload, budget and strategy."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.bench.grid.menu import ALL_MENU
from mimose.bench.grid.rows import GridRow

_CHOOSES = "mimose-all"
"""The strategy that chooses among all actions."""
_RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)
_LEAST_TURNS = 5
"""Fewer say nothing of how much they differ."""
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
    failed_at: str
    """In which step that was, and the batch's sizes; empty if it did not begin."""
    steps: int
    relative_to: str
    """The strategy whose time is 1: plain training, or ``full`` where that failed."""
    seconds_ratio: float | None
    """Time ÷ that of the same steps under the other."""
    seconds_low: float | None
    """Lower end of the ratio's 95% interval, by resampling turns; None where there are
    fewer than five."""
    seconds_high: float | None
    total_ratio: float | None
    """The same with the warm-up's steps."""
    recomputed_flops: int | None
    """None where they cannot be counted."""
    warm_up_flops: int | None
    """Recomputed in the warm-up's steps."""
    largest_growth_bytes: int
    largest_reserved_bytes: int
    """What an allocator took from its device; on a CPU the peak."""
    host_bytes: int | None
    """The most pinned memory of the host; None where it is not told."""
    steps_over: int
    """Steps, the warm-up's included, that grew beyond the headroom."""
    needed: int
    """Measured steps in which plain training grew beyond the headroom."""
    use_p50: float | None
    """Median of growth ÷ headroom over those."""
    error_p50: float | None
    """Median of |growth − predicted| ÷ growth over planned steps."""
    error_p99: float | None
    """The 99th percentile; of fewer than 100 planned steps, the largest."""
    learning_steps: int
    """Steps that measured, made a first careful plan, or had nothing to plan with."""
    hit_seconds: float | None
    """Median time to find a plan that was made before."""
    miss_seconds: float | None
    """Median time to make one."""
    loss_is_equal: bool | None
    """Whether every loss is the other's to the last bit; None without steps."""
    turns: tuple[tuple[int, float], ...]
    """Measured steps and their seconds, turn by turn."""
    action_shares: tuple[tuple[str, float], ...]
    """By action, what share of the layers' calls had it, in planned steps behind the
    warm-up; empty where no plan is told."""

    @property
    def keeps_budget(self) -> bool:
        """Whether it ran to its end and never went over."""
        return not self.problem and self.steps_over == 0


def summarise(rows: Iterable[GridRow]) -> list[CellSummary]:
    """Sum up, by workload, then budget, then strategy in the order of the rows.

    Steps under a hard limit are left out.
    """
    by_workload: dict[str, list[GridRow]] = {}
    for row in rows:
        if not row.is_limited:
            by_workload.setdefault(row.workload, []).append(row)
    return [cell for own in by_workload.values() for cell in _workload(own)]


def _workload(rows: Sequence[GridRow]) -> list[CellSummary]:
    cells: dict[tuple[str, float | None], list[GridRow]] = {}
    budgets: dict[float, int] = {}
    for row in rows:
        cells.setdefault((row.strategy, row.budget_share), []).append(row)
        if row.budget_share is not None and row.headroom_bytes is not None:
            budgets[row.budget_share] = row.headroom_bytes
    base = _base(cells)
    other, plain = (
        {row.step: row for row in cells.get((who, None), []) if not row.problem}
        for who in (base, "none")
    )
    return [
        _cell(name, share, headroom, own, base, other, plain)
        for share, headroom in sorted(budgets.items())
        for (name, own_share), own in cells.items()
        if own_share in (None, share)
    ]


def _base(cells: Mapping[tuple[str, float | None], Sequence[GridRow]]) -> str:
    """Return whom the others are compared with: who keeps everything, if it can."""
    plain, full = (cells.get((name, None), []) for name in ("none", "full"))
    fails = any(row.problem for row in plain)
    return "full" if fails and full and not any(r.problem for r in full) else "none"


def _cell(
    name: str,
    share: float,
    headroom: int,
    rows: Sequence[GridRow],
    base: str,
    base_rows: Mapping[int, GridRow],
    plain: Mapping[int, GridRow],
) -> CellSummary:
    ran = [row for row in rows if not row.problem]
    failed = next((row for row in rows if row.problem), None)
    pairs = [(row, base_rows[row.step]) for row in ran if row.step in base_rows]
    measured = [(row, other) for row, other in pairs if row.is_measured]
    mine = _turns(row for row, _ in measured)
    ratio = _paired((mine, _turns(other for _, other in measured)))
    needs = {step for step, row in plain.items() if row.growth_bytes > headroom}
    needing = [row for row in ran if row.is_measured and row.step in needs]
    planned = [row for row in ran if row.phase == "plan"]
    errors = _errors(planned)
    return CellSummary(
        workload=rows[0].workload,
        strategy=name,
        budget_share=share,
        headroom_bytes=headroom,
        problem=failed.problem if failed else "",
        failed_at=_place(failed),
        steps=len(measured),
        relative_to=base,
        seconds_ratio=ratio.value,
        seconds_low=ratio.low,
        seconds_high=ratio.high,
        total_ratio=_ratio(pairs),
        recomputed_flops=_flops(row for row, _ in measured),
        warm_up_flops=_flops(row for row in ran if not row.is_measured),
        largest_growth_bytes=max((row.growth_bytes for row in ran), default=0),
        largest_reserved_bytes=max((row.reserved_bytes for row in ran), default=0),
        host_bytes=max(
            (row.host_bytes for row in ran if row.host_bytes is not None), default=None
        ),
        steps_over=sum(row.growth_bytes > headroom for row in ran),
        needed=len(needing),
        use_p50=_median(row.growth_bytes / headroom for row in needing),
        error_p50=_median(errors),
        error_p99=errors[min(len(errors) - 1, int(0.99 * len(errors)))]
        if errors
        else None,
        learning_steps=sum(row.phase not in ("", "plan") for row in ran),
        hit_seconds=_median(row.plan_seconds for row in planned if row.cache_hit),
        miss_seconds=_median(row.plan_seconds for row in planned if not row.cache_hit),
        loss_is_equal=all(row.loss == other.loss for row, other in pairs)
        if pairs
        else None,
        turns=mine,
        action_shares=_action_shares(row for row in planned if row.is_measured),
    )


def _action_shares(rows: Iterable[GridRow]) -> tuple[tuple[str, float], ...]:
    counts = Counter(itertools.chain.from_iterable(row.plan for row in rows))
    return tuple(
        (spec.name, counts[spec.code] / counts.total())
        for spec in ALL_MENU.specs
        if counts[spec.code]
    )


def picked(summaries: Iterable[CellSummary]) -> list[CellSummary]:
    """Return the cells in which all actions could be chosen, and were."""
    return [s for s in summaries if s.strategy == _CHOOSES and s.action_shares]


def _place(failed: GridRow | None) -> str:
    if failed is None or failed.step < 0:
        return ""
    sizes = ", ".join(f"{name} {size}" for name, size in failed.shape.items())
    return f"step {failed.step}, {sizes}"


def _errors(planned: Iterable[GridRow]) -> list[float]:
    """Return how far off predictions were, as a share of growth, the least first."""
    growths = (
        (row.peak_bytes - row.start_bytes, row.predicted_growth_bytes)
        for row in planned
    )
    return sorted(
        abs(growth - predicted) / growth
        for growth, predicted in growths
        if predicted is not None and growth > 0
    )


def _ratio(pairs: Sequence[tuple[GridRow, GridRow]]) -> float | None:
    below = sum(other.seconds for _, other in pairs)
    return sum(row.seconds for row, _ in pairs) / below if below else None


# ------------------------------------------------------------------ turns


class Ratio(NamedTuple):
    """A ratio of times, and the ends of its 95% interval."""

    value: float | None
    low: float | None
    high: float | None


def _turns(rows: Iterable[GridRow]) -> tuple[tuple[int, float], ...]:
    """Return steps and seconds of each turn."""
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        n_steps, seconds = found.get(row.step // TURN, (0, 0.0))
        found[row.step // TURN] = n_steps + 1, seconds + row.seconds
    return tuple(found.values())


def _paired(
    *cells: tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]],
) -> Ratio:
    """Return the geometric mean over cells of one's time ÷ another's.

    The interval is by the bootstrap. Turns are resampled, both strategies' together,
    not steps: what disturbs a step disturbs those beside it.

    Args:
        cells: In each, the turns of the one and of the other. Turns that only one of
            them went to the end of are left out.
    """
    logs, n_turns = [], []
    for mine, theirs in cells:
        both = [
            (a, b)
            for (n, a), (m, b) in zip(mine, theirs, strict=False)
            if n == m and a > 0.0 and b > 0.0
        ]
        if not both:
            continue
        seconds = np.array(both)
        sums = seconds[_resampled(len(both))].sum(axis=1)
        logs.append(np.log(sums[:, 0] / sums[:, 1]))
        n_turns.append(len(both))
    if not logs:
        return Ratio(None, None, None)
    means = np.exp(np.mean(logs, axis=0))
    if min(n_turns) < _LEAST_TURNS:
        return Ratio(float(means[0]), None, None)
    low, high = np.percentile(means[1:], _PERCENTILES)
    return Ratio(float(means[0]), float(low), float(high))


@functools.cache
def _resampled(n_turns: int) -> NDArray[np.int_]:
    """Return (1 + resamples, n_turns) turns: as they were, then drawn at random."""
    drawn = np.random.default_rng(0).integers(n_turns, size=(_RESAMPLES, n_turns))
    return np.vstack((np.arange(n_turns), drawn))


def paired_ratio(one: CellSummary, other: CellSummary) -> Ratio:
    """Return the time of one strategy ÷ another's on the same batches."""
    return _paired((one.turns, other.turns))


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
    seconds: Ratio
    """Geometric mean of mimose's time ÷ the other's."""
    flops_ratio: float | None
    """mimose's recomputed FLOPs ÷ the other's, summed over the cells; None where they
    are not known, or the other recomputes nothing."""


def compare(summaries: Sequence[CellSummary], other: str) -> Comparison | None:
    """Compare with another strategy; None where there is no cell to compare in."""
    found = {(s.workload, s.budget_share, s.strategy): s for s in summaries}
    pairs = [
        (mine, found[workload, share, other])
        for (workload, share, name), mine in found.items()
        if name == "mimose" and (workload, share, other) in found
    ]
    kept = [both for both in pairs if all(c.keeps_budget and c.turns for c in both)]
    seconds = _paired(*((a.turns, b.turns) for a, b in kept))
    if seconds.value is None:
        return None
    mine, theirs = (_sum(cell[i].recomputed_flops for cell in kept) for i in (0, 1))
    flops_ratio = mine / theirs if mine is not None and theirs else None
    return Comparison(other, len(kept), seconds, flops_ratio)


def _sum(counts: Iterable[int | None]) -> int | None:
    found = list(counts)
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


class Rankings(NamedTuple):
    """How two runs of a grid rank the strategies by their time."""

    pairs: int
    """Pairs of strategies in one cell of which one is the faster in the first run."""
    swapped: list[tuple[str, float, str, str]]
    """Those of which the other is the faster in the second run: workload, budget, the
    first run's faster one, the other."""


def rank(first: Sequence[CellSummary], second: Sequence[CellSummary]) -> Rankings:
    """Compare how two runs of a grid rank the strategies.

    Only those that keep the budget in both are ranked. Two are as good as each other
    where the interval of the ratio of their times, in either run, has 1 in it.
    """
    again = {(s.workload, s.budget_share, s.strategy): s for s in second}
    pairs, found = 0, []
    for a, b in itertools.permutations(first, 2):
        place = a.workload, a.budget_share
        if place != (b.workload, b.budget_share) or not _is_faster(a, b):
            continue
        other_a, other_b = (again.get((*place, s.strategy)) for s in (a, b))
        if other_a is None or other_b is None:
            continue
        if not (other_a.keeps_budget and other_b.keeps_budget):
            continue
        pairs += 1
        if _is_faster(other_b, other_a):
            found.append((*place, a.strategy, b.strategy))
    return Rankings(pairs, found)


def _is_faster(one: CellSummary, other: CellSummary) -> bool:
    """Whether both keep the budget, and one takes less time than the other."""
    if not (one.keeps_budget and other.keeps_budget):
        return False
    high = paired_ratio(one, other).high
    return high is not None and high < 1.0
