"""What crosses into the planners and back: a problem, a plan, the protocol."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .actions import KEEP

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.intp]

_NON_NEGATIVE = frozenset(
    {
        "held_bytes",
        "forward_excess_bytes",
        "backward_excess_bytes",
        "gap_excess_bytes",
        "host_bytes",
        "transfer_seconds",
        "input_bytes",
        "start_bytes",
        "optimizer_state_bytes",
        "step_excess_bytes",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanningProblem:
    """One training step's memory and costs, for one shape of the batch.

    There are E events, in the order in which they run forward, and K actions, in the
    order of their `Menu`: ``"keep"`` is the first, and the last is what an event runs
    under where nothing is known of it. Sizes are bytes. Numbers must be finite, also
    where an action is not allowed (they are not read there); the two budgets alone
    may be infinite. Arrays are taken as they are, without a copy: neither the
    caller nor a planner writes to them afterwards.

    Raises:
        ValueError: A field has the wrong shape, a value that is not finite or is
            negative where it cannot be, a name appears twice, an event has no
            allowed action, or no choice keeps the host budget.
    """

    events: tuple[str, ...]
    """(E,) names in forward order, such as ``"encoder.layer.3#0"``."""

    actions: tuple[str, ...]
    """(K,) names of the actions, ``"keep"`` first, the plainest of those that hold
    little last."""

    allowed: BoolArray
    """(E, K) whether the event may run under the action."""

    held_bytes: FloatArray
    """(E, K) what the event leaves alive from its exit until its backward."""

    forward_excess_bytes: FloatArray
    """(E, K) highest level in its forward, over the level at its entry."""

    backward_excess_bytes: FloatArray
    """(E, K) highest level in its backward, over the level when its gradient came."""

    backward_net_bytes: FloatArray
    """(E, K) signed change over its backward, beyond the release of what it held; (E,)
    where it is the same under every action."""

    cost: FloatArray
    """(E, K) what the action adds to the step, in one unit for all: seconds, or FLOPs
    as long as no times are learned."""

    gap_bytes: FloatArray
    """(E + 1,) signed change over what runs before each event; the last: the head."""

    gap_excess_bytes: FloatArray
    """(E + 1,) highest level in each gap, over the level at its start."""

    start_bytes: float
    """Held when the root forward begins."""

    optimizer_state_bytes: float
    """Optimizer state still to come after this backward; 0 once it exists."""

    step_excess_bytes: float
    """Highest level in the optimizer step, beyond its state still to come."""

    budget_bytes: float
    """The most the device may hold at any moment of the step."""

    host_bytes: FloatArray
    """(E, K) bytes of host memory the action needs."""

    host_budget_bytes: float
    """The most host memory all events together may need."""

    transfer_seconds: FloatArray = field(default_factory=lambda: np.zeros(0))
    """(E, K) of copies to the host and back that the action needs. What of it delays
    the step is part of the cost already. All zeros where it is left out."""

    lossy: frozenset[str] = frozenset()
    """Names of the actions that change gradients."""

    input_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))
    """(E,) of what the event before hands to the event, as counted in what that one
    holds: what goes, at the event's exit, where the event lets it go and the one before
    has not saved it. All zeros where it is left out. See `Note: [Boundaries]` in
    ``timeline.py``."""

    releases_input: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(E, K) whether the event lets its input go under the action, to bring it back
    in its backward. All false where it is left out."""

    saves_output: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(E, K) whether the event itself saves, under the action, what it hands on. All
    false where it is left out."""

    def __post_init__(self) -> None:
        """Check every field once, so that the planners can trust them."""
        n_events, n_actions = len(self.events), len(self.actions)
        table, row, gaps = (n_events, n_actions), (n_events,), (n_events + 1,)
        self._check_names()
        self._check_array("allowed", table, np.bool_)
        self._check_array("held_bytes", table)
        self._check_array("forward_excess_bytes", table)
        self._check_array("backward_excess_bytes", table)
        self._fill("backward_net_bytes", row, table)
        self._check_array("backward_net_bytes", table)
        self._check_array("cost", table)
        self._check_array("gap_bytes", gaps)
        self._check_array("gap_excess_bytes", gaps)
        self._check_array("host_bytes", table)
        self._fill("transfer_seconds", (0,), table)
        self._check_array("transfer_seconds", table)
        self._fill("input_bytes", (0,), row)
        self._check_array("input_bytes", row)
        for name in ("releases_input", "saves_output"):
            self._fill_false(name, table)
            self._check_array(name, table, np.bool_)
        self._check_number("start_bytes")
        self._check_number("optimizer_state_bytes")
        self._check_number("step_excess_bytes")
        self._check_budget("budget_bytes")
        self._check_budget("host_budget_bytes")
        self._check_choices()

    def _fill(self, field: str, shape: tuple[int, ...], table: tuple[int, ...]) -> None:
        """Make a table of what was given for every action, or not at all."""
        array = np.asarray(getattr(self, field), dtype=np.float64)
        if array.shape == shape:
            column = array[:, None] if array.size else np.zeros(1)
            object.__setattr__(self, field, np.broadcast_to(column, table))

    def _fill_false(self, field: str, table: tuple[int, int]) -> None:
        if not np.asarray(getattr(self, field)).size:
            object.__setattr__(self, field, np.zeros(table, np.bool_))

    def _check_names(self) -> None:
        if not self.actions or self.actions[0] != KEEP.name:
            msg = f"actions must begin with {KEEP.name!r}, got {self.actions!r}"
            raise ValueError(msg)
        for what, names in (("actions", self.actions), ("events", self.events)):
            if len(set(names)) != len(names):
                twice = sorted({name for name in names if names.count(name) > 1})
                msg = f"{what} must be distinct, got {twice!r} more than once"
                raise ValueError(msg)

    def _check_array(
        self, field: str, shape: tuple[int, ...], dtype: type[np.generic] = np.float64
    ) -> None:
        array = np.asarray(getattr(self, field), dtype=dtype)
        if array.shape != shape:
            msg = f"{field} must have shape {shape}, got {array.shape}"
            raise ValueError(msg)
        object.__setattr__(self, field, array)
        if dtype is np.bool_ or array.size == 0:
            return
        # A sum is finite only if every term is, and costs a third of isfinite.all.
        if not math.isfinite(np.add.reduce(array, axis=None)):
            bad = array[~np.isfinite(array)]
            msg = f"{field} must be finite, got {bad[:1].tolist() or 'an overflow'}"
            raise ValueError(msg)
        if field in _NON_NEGATIVE and np.minimum.reduce(array, axis=None) < 0:
            msg = f"{field} must not be negative, got {float(array.min())}"
            raise ValueError(msg)

    def _check_number(self, field: str) -> None:
        value = float(getattr(self, field))
        if not math.isfinite(value) or value < 0:
            msg = f"{field} must be finite and not negative, got {value}"
            raise ValueError(msg)
        object.__setattr__(self, field, value)

    def _check_budget(self, field: str) -> None:
        value = float(getattr(self, field))
        if math.isnan(value) or value < 0:
            msg = f"{field} must be a number that is not negative, got {value}"
            raise ValueError(msg)
        object.__setattr__(self, field, value)

    def _check_choices(self) -> None:
        if not np.logical_or.reduce(self.allowed, axis=1).all():
            stuck = self.events[int(np.argmin(self.allowed.any(axis=1)))]
            msg = f"allowed must leave every event an action, got none for {stuck!r}"
            raise ValueError(msg)
        if not np.count_nonzero(self.host_bytes):
            return
        least = np.where(self.allowed, self.host_bytes, np.inf).min(axis=1).sum()
        if least > self.host_budget_bytes:
            msg = (
                f"host_budget_bytes must be at least {least}, what the allowed "
                f"actions need, got {self.host_budget_bytes}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One action for each event, and what the timeline says of it."""

    actions: tuple[str, ...]
    """(E,) the action of each event, in forward order."""

    peak_bytes: float
    """The highest level of the step under these actions."""

    growth_bytes: float
    """The peak over what was held when the step began."""

    extra_cost: float
    """The actions' costs, added up, in the problem's unit."""

    binding_segments: tuple[str, ...]
    """Names of the segments that reach the peak, in the order of time."""

    planner: str
    """Name of the planner that made it."""

    optimal: bool
    """Whether no cheaper choice keeps the budget, proved and not only believed."""


@runtime_checkable
class Planner(Protocol):
    """What makes a plan out of a problem."""

    @property
    def name(self) -> str:
        """The name under which plans and reports show this planner."""
        ...

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose one action for each event.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan that covers exactly the problem's events, in order. Planners
            that know no peak may exceed the budget; ``peak_bytes`` then says so.

        Raises:
            InfeasibleBudgetError: The planner keeps budgets and none of its plans
                keeps this one.
        """
        ...


@runtime_checkable
class FixedPlanner(Planner, Protocol):
    """A planner that reads no problem: no step has to be measured for its plans."""

    def action_at(self, index: int) -> str:
        """Return the action of an event.

        Args:
            index: The event's position in the forward.
        """
        ...


@runtime_checkable
class OneShapePlanner(Planner, Protocol):
    """A planner whose only plan is for the first problem that it is given."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Sizes by name, of the step that this problem should be of."""
        ...
