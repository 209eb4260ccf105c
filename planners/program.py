"""The exact planner's 0-1 program, and HiGHS to solve it."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from .base import FloatArray, IntArray, PlanningProblem
from .prefix import prefix_form

Entries: TypeAlias = tuple[FloatArray, IntArray, IntArray]
"""Values of a sparse table, their rows and their columns."""

# HiGHS stops at absolute tolerances of 1e-6, so the largest number of a kind (bytes
# held, cost) is put at this size.
_SCALE = 1000.0
# Of the solver's status codes the one that is no answer.
_TIME_LIMIT_REACHED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What the solver found, and whether it could prove it."""

    choice: IntArray | None
    proved: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """The rows of the 0-1 program.

    Its columns: x[e, a] in {0, 1}; held[e], what events 0 .. e hold; where nets depend
    on the action, left[e], what the backwards of events e .. E - 1 leave beyond their
    least; where neighbours may share, shared[e], whether event e would let its input go
    and the event before has saved it; and the peak. Bytes count from ``origin_bytes``
    and are divided by ``unit_bytes``.
    """

    allowed: FloatArray
    least_held: float
    """What held[e] cannot go below: zero, or, where events let go more than they hold,
    nothing."""
    rows: LinearConstraint
    n_columns: int
    origin_bytes: float
    unit_bytes: float

    def cheapest(
        self, cost: FloatArray, budget_bytes: float, time_limit_seconds: float
    ) -> Solution:
        """Minimise the cost, with the peak held down to the budget."""
        unit = float(np.abs(cost).max()) / _SCALE or 1.0
        objective = np.zeros(self.n_columns)
        objective[: cost.size] = cost.ravel() / unit
        peak = (budget_bytes - self.origin_bytes) / self.unit_bytes
        return self._solve(objective, peak, time_limit_seconds)

    def least_peak(self, time_limit_seconds: float) -> Solution:
        """Minimise the peak."""
        objective = np.zeros(self.n_columns)
        objective[-1] = 1.0
        return self._solve(objective, np.inf, time_limit_seconds)

    def _solve(
        self, objective: FloatArray, peak: float, time_limit_seconds: float
    ) -> Solution:
        n_choices = self.allowed.size
        integrality = np.zeros(self.n_columns, dtype=np.intp)
        integrality[:n_choices] = 1
        lowest, highest = np.zeros((2, self.n_columns))
        highest[:n_choices] = self.allowed.ravel()
        highest[n_choices:-1] = np.inf
        lowest[n_choices : n_choices + len(self.allowed)] = self.least_held
        lowest[-1], highest[-1] = -np.inf, peak
        result = milp(
            objective,
            constraints=self.rows,
            integrality=integrality,
            bounds=Bounds(lowest, highest),
            options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
        )
        proved = result.status != _TIME_LIMIT_REACHED
        if result.x is None:
            return Solution(choice=None, proved=proved)
        chosen = result.x[:n_choices].reshape(self.allowed.shape).argmax(axis=1)
        return Solution(choice=chosen, proved=proved)


class _Rows:
    """The rows of a sparse table with their limits, put together piece by piece.

    SciPy takes a millisecond to join several tables, and holds the interpreter's lock.

    Args:
        n_columns: Of all rows.
    """

    def __init__(self, n_columns: int) -> None:
        self._n_columns = n_columns
        self._n_rows = 0
        self._entries: list[Entries] = []
        self._limits: list[tuple[float, float, int]] = []

    def add(
        self, lowest: float, highest: float, *entries: Entries, n_rows: int
    ) -> None:
        """Add rows whose sums lie between two limits; entries count rows from 0."""
        for values, at_rows, at_columns in entries:
            self._entries.append((values, at_rows + self._n_rows, at_columns))
        self._limits.append((lowest, highest, n_rows))
        self._n_rows += n_rows

    def joined(self) -> LinearConstraint:
        """Return all rows, in the form in which the solver takes them."""
        parts = zip(*self._entries, strict=True)
        values, rows, columns = (np.concatenate(part) for part in parts)
        order = np.lexsort((rows, columns))
        per_column = np.bincount(columns, minlength=self._n_columns)
        starts = np.concatenate(([0], np.cumsum(per_column)))
        table = csc_array(
            (values[order], rows[order].astype(np.int32), starts.astype(np.int32)),
            shape=(self._n_rows, self._n_columns),
        )
        lowest, highest, counts = zip(*self._limits, strict=True)
        limits = (np.repeat(limit, counts) for limit in (lowest, highest))
        return LinearConstraint(table, *limits)


def build_program(problem: PlanningProblem, host_budget_bytes: float) -> Program:
    """Build the rows; arrays throughout, for this also runs beside training."""
    form = prefix_form(problem)
    n_events, n_actions = problem.allowed.shape
    n_choices = n_events * n_actions
    n_sums = n_events * (1 + form.has_extra + form.has_pairs)
    n_columns = n_choices + n_sums + 1
    origin = min(form.head_bytes, float(form.need_bytes.min()))
    if form.has_extra:
        origin = min(origin, form.step_bytes, float(form.forward_bytes.min()))
        origin = min(origin, float(form.backward_bytes.min()))
    unit = float(problem.held_bytes.max()) / _SCALE or 1.0

    choice, event = np.arange(n_choices), np.arange(n_events)
    of_event = event.repeat(n_actions)
    held = n_choices + event
    left = held + n_events
    shared = n_columns - 1 - n_events + event
    one, later = np.ones(n_events), event[1:]
    peak = np.full(n_events, n_columns - 1)

    rows = _Rows(n_columns)

    def within(need_bytes: FloatArray, *more: Entries) -> None:
        """Hold held[e - 1] + need[e] + more <= peak."""
        need = np.where(problem.allowed, need_bytes - origin, 0.0) / unit
        rows.add(
            -np.inf,
            0,
            (need.ravel(), of_event, choice),
            (one[1:], later, held[:-1]),
            *more,
            (-one, event, peak),
            n_rows=n_events,
        )

    def reaches(column: int, over_bytes: float) -> None:
        """Hold a column + over_bytes <= peak."""
        ends = np.array([column, n_columns - 1])
        row = np.array([1.0, -1.0]), np.zeros(2, dtype=np.intp), ends
        rows.add(-np.inf, (origin - over_bytes) / unit, row, n_rows=1)

    # Every event runs under exactly one action.
    rows.add(1, 1, (np.ones(n_choices), of_event, choice), n_rows=n_events)
    # held[e] = held[e - 1] + what event e holds.
    whole = form.shared_bytes.max(axis=1) / unit
    on_top = [(whole, event, shared)] if form.has_pairs else []
    rows.add(
        0,
        0,
        (form.held_bytes.ravel() / unit, of_event, choice),
        (one[1:], later, held[:-1]),
        *on_top,
        (-one, event, held),
        n_rows=n_events,
    )
    if form.has_pairs:
        # shared[e] >= whether event e shares + whether e - 1 has saved - 1.
        shares = (form.shared_bytes[1:] > 0).ravel().astype(np.float64)
        saves = form.saves_output[:-1].ravel().astype(np.float64)
        rows.add(
            -np.inf,
            1,
            (shares, of_event[:-n_actions], choice[n_actions:]),
            (saves, of_event[:-n_actions], choice[:-n_actions]),
            (-one[1:], event[:-1], shared[1:]),
            n_rows=n_events - 1,
        )
    if form.has_extra:
        # left[e] = left[e + 1] + what event e leaves beyond its least.
        rows.add(
            0,
            0,
            (form.extra_bytes.ravel() / unit, of_event, choice),
            (one[1:], event[:-1], left[1:]),
            (-one, event, left),
            n_rows=n_events,
        )
        within(form.forward_bytes)
        within(form.backward_bytes, (one[1:], event[:-1], left[1:]))
        reaches(int(left[0]), form.step_bytes)
    else:
        within(form.need_bytes)
    reaches(int(held[-1]), form.head_bytes)
    if np.count_nonzero(problem.host_bytes):
        # What the actions need of the host, together.
        unit_host = float(problem.host_bytes.max()) / _SCALE
        needed = problem.host_bytes.ravel() / unit_host
        host = needed, np.zeros(n_choices, dtype=np.intp), choice
        rows.add(-np.inf, host_budget_bytes / unit_host, host, n_rows=1)
    return Program(
        allowed=problem.allowed.astype(np.float64),
        least_held=0.0 if form.held_bytes.min() >= 0 else -np.inf,
        rows=rows.joined(),
        n_columns=n_columns,
        origin_bytes=origin,
        unit_bytes=unit,
    )
