"""The timeline: the level of memory through one training step. It alone judges peaks.

A step is a row of segments: for each layer call the gap before it and its forward, then
the head (from the last exit to the first gradient), then the backwards of the calls in
reverse order. A segment changes the level by its retained bytes, and in between rises
above the level at its start by its transient peak. So the peak of the step is the
highest ``level at start + transient peak``, or the level at the end of a segment if
that is higher.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .problem import FloatArray, IntArray, Plan, PlanningProblem

_Number = TypeVar("_Number", bound=np.generic)

# Segments within this share of the peak count as binding: equal sums of bytes, added in
# another order, differ in the last digits.
_TIE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The level of memory through one step under one plan.

    There are S = 3 C + 1 segments for C layer calls, in the order of time.
    """

    problem: PlanningProblem
    """The step."""

    choice: IntArray
    """(C,) The index of each call's action."""

    level_bytes: FloatArray
    """(S,) What is held when each segment begins."""

    peak_bytes_by_segment: FloatArray
    """(S,) The highest level in each segment."""

    @property
    def peak_bytes(self) -> float:
        """The highest level of the step."""
        return float(self.peak_bytes_by_segment.max())

    @property
    def segments(self) -> tuple[str, ...]:
        """(S,) Their names, in order, such as ``"forward of encoder.layer.3#0"``."""
        calls = self.problem.calls
        forwards = [f"{s} {c}" for c in calls for s in ("gap before", "forward of")]
        return (*forwards, "head", *(f"backward of {c}" for c in reversed(calls)))

    @property
    def binding_segments(self) -> tuple[str, ...]:
        """The names of the segments that reach the peak, in the order of time."""
        peaks = self.peak_bytes_by_segment
        is_binding = (peaks >= peaks.max() * (1 - _TIE)).tolist()
        return tuple(compress(self.segments, is_binding))

    def holders(self) -> Mapping[str, float]:
        """Return what holds how many bytes at the first moment of the peak.

        Returns:
            The bytes by what holds them, without zeros. They add up to the peak.
        """
        problem, n_calls = self.problem, len(self.problem.calls)
        at = int(self.peak_bytes_by_segment.argmax())
        level = float(self.level_bytes[at])
        transient = float(self.peak_bytes_by_segment[at]) - level
        # Calls 0 .. alive - 1 have left their forward and not finished their backward.
        alive = at // 2 if at <= 2 * n_calls else 3 * n_calls + 1 - at
        activations = float(_chosen(problem.held_bytes, self.choice)[:alive].sum())
        parts = {
            "held at start (parameters, gradients, optimizer state, other)": (
                problem.start_bytes
            ),
            "activations held": activations,
            "new gradients and tensors between the layer calls": (
                level - problem.start_bytes - activations
            ),
            f"working memory of {self.segments[at]}": transient,
        }
        return {name: count for name, count in parts.items() if count}


def lay_out(problem: PlanningProblem, choice: IntArray) -> Timeline:
    """Return the timeline of a step under one choice of actions.

    Args:
        problem: The step.
        choice: (C,) The index of each call's action.
    """
    return Timeline(problem, choice, *_levels_and_peaks(problem, choice))


def peak_bytes(problem: PlanningProblem, choice: IntArray) -> FloatArray:
    """Return the peak of a step under one choice of actions, or under many.

    Args:
        problem: The step.
        choice: (C,) or (N, C) The index of each call's action.

    Returns:
        () or (N,) The highest level of the step, in bytes.
    """
    _, peaks = _levels_and_peaks(problem, choice)
    highest: FloatArray = peaks.max(axis=-1)
    return highest


def host_bytes(problem: PlanningProblem, choice: IntArray) -> FloatArray:
    """Return the host memory of one choice of actions, or of many.

    Args:
        problem: The step.
        choice: (C,) or (N, C) The index of each call's action.

    Returns:
        () or (N,) The sum of the calls' host memory, in bytes.
    """
    needed: FloatArray = _chosen(problem.host_bytes, choice).sum(axis=-1)
    return needed


def fits(problem: PlanningProblem, choice: IntArray) -> bool:
    """Whether one choice of actions keeps both budgets.

    Args:
        problem: The step.
        choice: (C,) The index of each call's action.
    """
    if peak_bytes(problem, choice) > problem.budget_bytes:
        return False
    return bool(host_bytes(problem, choice) <= problem.host_budget_bytes)


def judge(
    problem: PlanningProblem, choice: IntArray, *, planner: str, optimal: bool = False
) -> Plan:
    """Return the plan of a choice of actions, with its peak and its cost.

    Args:
        problem: The step.
        choice: (C,) The index of each call's action.
        planner: The name of the planner that made the choice.
        optimal: Whether it is proved that no cheaper choice keeps the budget.
    """
    laid_out = lay_out(problem, choice)
    peak = laid_out.peak_bytes
    return Plan(
        actions=tuple(problem.actions[i] for i in choice.tolist()),
        peak_bytes=peak,
        growth_bytes=peak - problem.start_bytes,
        extra_cost=float(_chosen(problem.cost, choice).sum()),
        binding_segments=laid_out.binding_segments,
        planner=planner,
        optimal=optimal,
    )


def _chosen(table: NDArray[_Number], choice: IntArray) -> NDArray[_Number]:
    """Return the entries of a (C, K) table at a (..., C) choice."""
    picked: NDArray[_Number] = table[np.arange(len(table)), choice]
    return picked


def _levels_and_peaks(
    problem: PlanningProblem, choice: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return (..., S) the level at the start of each segment, and (..., S) its peak."""
    n_calls = len(problem.calls)
    held = _chosen(problem.held_bytes, choice)
    shape = (*choice.shape[:-1], 3 * n_calls + 1)
    retained, transient = np.empty(shape), np.empty(shape)
    gaps = slice(0, 2 * n_calls + 1, 2)
    forward = slice(1, 2 * n_calls, 2)
    backward = slice(2 * n_calls + 1, None)

    retained[..., gaps] = problem.gap_bytes
    retained[..., forward] = held
    retained[..., backward] = (problem.backward_retained_bytes - held)[..., ::-1]

    transient[..., gaps] = problem.gap_transient_bytes
    transient[..., forward] = _chosen(problem.forward_transient_bytes, choice)
    risen = _chosen(problem.backward_transient_bytes, choice)
    transient[..., backward] = risen[..., ::-1]

    levels = np.empty(shape)
    levels[..., 0] = problem.start_bytes
    np.cumsum(retained[..., :-1], axis=-1, out=levels[..., 1:])
    levels[..., 1:] += problem.start_bytes
    return levels, levels + np.maximum(transient, retained)
