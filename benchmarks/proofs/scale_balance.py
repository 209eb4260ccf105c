"""Steps of many ranks, each of which trains a batch of another length; no torch.

All ranks wait for the slowest. A batch's seconds are those of plain training, three
forwards, and what its plan recomputes. Bytes and seconds of a layer are those of
`benchmarks.problems` at a reference length: bytes grow with the length, seconds as
products of matrices and attention do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems import with_budget
from mimose.planners import Marginal, PlanningProblem

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]
Deal: TypeAlias = Callable[[_Floats], _Floats]
"""Takes seconds (window, ranks, batches a step) and returns them dealt out anew."""

_FORWARDS_A_STEP = 3.0
"""Of plain training, whose backward takes as long as two forwards."""
_WIDTH = 1024
"""Of the model: with it attention's part of a forward grows."""
_MULTIPLE = 8
"""Lengths are rounded up to it, as collators pad."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a batch of each length takes, by its length over `_MULTIPLE`."""

    plain: _Floats
    """(L,) seconds of a step that keeps everything."""
    actions: _Ints
    """(L, E) the plan's."""
    menu: _Floats
    """(L, E, K) seconds that each action adds."""

    @property
    def planned(self) -> _Floats:
        """(L,) seconds of a step under the length's own plan."""
        events = np.arange(self.actions.shape[1])
        lengths = np.arange(len(self.plain))[:, None]
        added: _Floats = self.menu[lengths, events, self.actions].sum(axis=1)
        return self.plain + added


def at_length(problem: PlanningProblem, ratio: float) -> PlanningProblem:
    """Return a problem for batches so many times as long; weights stay as they are."""
    attention = problem_length() * (ratio - 1.0) / (6 * _WIDTH + problem_length())
    return replace(
        problem,
        held_bytes=problem.held_bytes * ratio,
        forward_excess_bytes=problem.forward_excess_bytes * ratio,
        backward_excess_bytes=problem.backward_excess_bytes * ratio,
        gap_bytes=problem.gap_bytes * ratio,
        gap_excess_bytes=problem.gap_excess_bytes * ratio,
        cost=problem.cost * ratio * (1.0 + attention),
    )


def problem_length() -> int:
    """Return the length that problems are drawn for, and the longest that comes."""
    return 512


def make_costs(problem: PlanningProblem, share: float) -> Costs:
    """Plan every length, within a budget between the longest's least peak and most.

    Args:
        problem: At `problem_length`.
        share: Of the way between the two, for the budget.
    """
    budget = with_budget(problem, share).budget_bytes
    n_lengths = problem_length() // _MULTIPLE
    plain, actions, menu = [], [], []
    for index in range(n_lengths + 1):
        scaled = at_length(problem, max(1, index) / n_lengths)
        plan = Marginal().plan(replace(scaled, budget_bytes=budget))
        plain.append(_FORWARDS_A_STEP * float(scaled.cost[:, -1].sum()))
        actions.append([scaled.actions.index(action) for action in plan.actions])
        menu.append(scaled.cost)
    return Costs(np.array(plain), np.array(actions), np.array(menu))


def rounded(lengths: _Ints) -> _Ints:
    """Return where in `Costs` lengths are: rounded up."""
    return -(-lengths // _MULTIPLE)


def agreed(costs: Costs, lengths: _Ints) -> _Floats:
    """Return seconds (S, R) where all ranks of a step run the safest of their actions.

    Args:
        costs: By length.
        lengths: (S, R) places in them.
    """
    events = np.arange(costs.actions.shape[1])
    found = []
    for step in lengths:
        actions = costs.actions[step].max(axis=0)
        found.append(costs.plain[step] + costs.menu[step][:, events, actions].sum(1))
    return np.array(found)


def static(costs: Costs, lengths: _Ints) -> _Floats:
    """Return seconds (S, R) under one plan for the longest length there is."""
    events = np.arange(costs.actions.shape[1])
    added = costs.menu[:, events, costs.actions[-1]].sum(axis=1)
    found: _Floats = (costs.plain + added)[lengths]
    return found


def as_they_come(seconds: _Floats) -> _Floats:
    """Leave batches where they are."""
    return seconds


def sorted_within(window: int) -> Deal:
    """Return what gives the ranks of a step batches of like length.

    Args:
        window: So many steps' batches are sorted, and dealt out again.
    """

    def deal(seconds: _Floats) -> _Floats:
        n_steps = len(seconds) // window * window
        whole = seconds[:n_steps].reshape(-1, window * seconds[0].size)
        return np.sort(whole, axis=1).reshape(n_steps, *seconds.shape[1:])

    return deal


def longest_first(seconds: _Floats, by: _Floats) -> _Floats:
    """Deal each step's batches out anew: the next longest to whoever has least so far.

    Args:
        seconds: (S, R, A) of each batch.
        by: (S, R, A) what is taken for its length.

    Returns:
        (S, R) of each rank's batches together. A rank gets A batches at the most.
    """
    n_steps, n_ranks, n_each = seconds.shape
    totals = np.zeros((n_steps, n_ranks))
    for step in range(n_steps):
        own, length = seconds[step].ravel(), by[step].ravel()
        free = [(0.0, rank, 0) for rank in range(n_ranks)]
        for index in np.argsort(-length, kind="stable").tolist():
            load, rank, count = heapq.heappop(free)
            totals[step, rank] += own[index]
            if count + 1 < n_each:
                entry = (load + float(length[index]), rank, count + 1)
                heapq.heappush(free, entry)
    return totals


def step_seconds(by_rank: _Floats) -> float:
    """Return what a step takes on average: (S, R), the slowest rank decides."""
    return float(by_rank.max(axis=1).mean())


def policies(
    costs: Costs, lengths: _Ints, windows: tuple[int, ...]
) -> Mapping[str, float]:
    """Return what a step takes, one batch a rank, by how it is planned and dealt.

    Args:
        costs: By length.
        lengths: (S, R) places in them.
        windows: Of how many steps batches are sorted.
    """
    own = costs.planned[lengths]
    found = {
        "ample memory": step_seconds(costs.plain[lengths]),
        "one static plan": step_seconds(static(costs, lengths)),
        "agreed": step_seconds(agreed(costs, lengths)),
        "by rank": step_seconds(own),
    }
    for window in windows:
        dealt = sorted_within(window)(own)
        found[f"by rank, sorted over {window}"] = step_seconds(dealt)
    return found


def accumulated(costs: Costs, lengths: _Ints) -> Mapping[str, float]:
    """Return what a step of several batches a rank takes, by how they are dealt.

    Args:
        costs: By length.
        lengths: (S, R, A) places in them.
    """
    own = costs.planned[lengths]
    return {
        "as they come": step_seconds(own.sum(axis=2)),
        "by length": step_seconds(longest_first(own, lengths.astype(np.float64))),
        "by predicted time": step_seconds(longest_first(own, own)),
    }
