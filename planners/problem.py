"""What crosses into the planners and back: a problem, a plan, the error, the protocol.

PlanningProblem        one step's memory and costs, for one shape
Plan                   one action for each call
InfeasibleBudgetError  (ValueError) no plan keeps the budget
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .actions import KEEP

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.intp]

_TABLES = (
    "held_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "cost",
    "host_bytes",
)
_SIGNED = {"held_bytes", "backward_retained_bytes", "cost", "gap_bytes"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanningProblem:
    """One training step's memory and costs, for one shape of the batch.

    It ends with the backward: no plan changes what an optimizer's step takes.

    There are C calls, in the order in which they run forward, and K actions, in the
    order of their `Menu`: ``"keep"`` is the first, and the last is what a call runs
    under where nothing is known of it. Sizes are bytes. Numbers must be finite, also
    where an action is not allowed (they are not read there); the two budgets alone
    may be infinite. Arrays are taken as they are, without a copy: neither the
    caller nor a planner writes to them afterwards.

    Raises:
        ValueError: A field has the wrong shape, a value that is not finite or is
            negative where it cannot be, a name appears twice, a call has no
            allowed action, or no choice keeps the host budget.
    """

    calls: tuple[str, ...]
    """(C,) names in forward order, such as ``"encoder.layer.3#0"``."""

    actions: tuple[str, ...]
    """(K,) names of the actions, ``"keep"`` first, the plainest of those that hold
    little last."""

    allowed: BoolArray
    """(C, K) whether the call may run under the action."""

    held_bytes: FloatArray
    """(C, K) what the call leaves alive from its exit until its backward. Negative
    where it moves more of its inputs to the host than it saves."""

    forward_transient_bytes: FloatArray
    """(C, K) highest level in its forward, over the level at its entry."""

    backward_transient_bytes: FloatArray
    """(C, K) highest level in its backward, over the level when its gradient came."""

    backward_retained_bytes: FloatArray
    """(C,) signed change over its backward, beyond the release of what it held: what
    lasts, such as gradients of weights. No action changes it."""

    cost: FloatArray
    """(C, K) what the action adds to the step, in one unit for all: seconds, or FLOPs
    as long as no times are learned."""

    gap_bytes: FloatArray
    """(C + 1,) signed change over what runs before each call; the last: the head."""

    gap_transient_bytes: FloatArray
    """(C + 1,) highest level in each gap, over the level at its start."""

    start_bytes: float
    """Held when the root forward begins."""

    budget_bytes: float
    """The most the device may hold at any moment of the step."""

    host_bytes: FloatArray
    """(C, K) bytes of host memory the action needs."""

    host_budget_bytes: float
    """The most host memory all calls together may need."""

    lossy: frozenset[str] = frozenset()
    """Names of the actions that change gradients."""

    def __post_init__(self) -> None:
        """Check every field once, so that the planners can trust them."""
        self._check_names()
        n_calls, n_actions = len(self.calls), len(self.actions)
        self._check_array("allowed", (n_calls, n_actions), np.bool_)
        for name in _TABLES:
            self._check_array(name, (n_calls, n_actions))
        self._check_array("backward_retained_bytes", (n_calls,))
        self._check_array("gap_bytes", (n_calls + 1,))
        self._check_array("gap_transient_bytes", (n_calls + 1,))
        self._check_number("start_bytes", most=np.finfo(np.float64).max)
        for name in ("budget_bytes", "host_budget_bytes"):
            self._check_number(name, most=math.inf)
        self._check_choices()

    def _check_names(self) -> None:
        if not self.actions or self.actions[0] != KEEP.name:
            msg = f"actions must begin with {KEEP.name!r}, got {self.actions!r}"
            raise ValueError(msg)
        for what, names in (("actions", self.actions), ("calls", self.calls)):
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
        if not np.isfinite(array).all():
            bad = array[~np.isfinite(array)]
            msg = f"{field} must be finite, got {float(bad[0])}"
            raise ValueError(msg)
        if field not in _SIGNED and array.min() < 0:
            msg = f"{field} must not be negative, got {float(array.min())}"
            raise ValueError(msg)

    def _check_number(self, field: str, most: float) -> None:
        value = float(getattr(self, field))
        if not 0 <= value <= most:
            finite = "" if math.isinf(most) else "finite and "
            msg = f"{field} must be {finite}not negative, got {value}"
            raise ValueError(msg)
        object.__setattr__(self, field, value)

    def _check_choices(self) -> None:
        if not self.allowed.any(axis=1).all():
            stuck = self.calls[int(np.argmin(self.allowed.any(axis=1)))]
            msg = f"allowed must leave every call an action, got none for {stuck!r}"
            raise ValueError(msg)
        least = np.where(self.allowed, self.host_bytes, np.inf).min(axis=1).sum()
        if least > self.host_budget_bytes:
            msg = (
                f"host_budget_bytes must be at least {least}, what the allowed "
                f"actions need, got {self.host_budget_bytes}"
            )
            raise ValueError(msg)

    # ------------------------------------------- choices of actions without a search

    def keep_choice(self) -> IntArray:
        """Return (C,) the first action, that keeps; where it may not be, the least."""
        return np.where(self.allowed[:, 0], 0, self.least_choice())

    def cheapest_choice(self) -> IntArray:
        """Return (C,) the allowed actions that cost least."""
        choice: IntArray = np.where(self.allowed, self.cost, np.inf).argmin(axis=1)
        return choice

    def least_choice(self) -> IntArray:
        """Return (C,) the last actions, or what comes nearest to them.

        That is the last that is allowed, is exact and needs nothing of the host; else
        the last that is exact; else the last that is allowed.
        """
        n_actions = len(self.actions)
        is_exact = np.array([name not in self.lossy for name in self.actions])
        rank = np.arange(n_actions) + n_actions * is_exact
        rank = rank + n_actions * (is_exact & (self.host_bytes == 0))
        choice: IntArray = np.where(self.allowed, rank, -1).argmax(axis=1)
        return choice

    def choice_of(self, names: Sequence[str]) -> IntArray:
        """Return (C,) the actions of these names; where one is not allowed, the least.

        Args:
            names: (C,) of actions.
        """
        index = {name: i for i, name in enumerate(self.actions)}
        choice = np.array([index.get(name, -1) for name in names], dtype=np.intp)
        may = (choice >= 0) & self.allowed[np.arange(len(choice)), choice]
        return np.where(may, choice, self.least_choice())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One action for each call, and what the timeline says of it."""

    actions: tuple[str, ...]
    """(C,) the action of each call, in forward order."""

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
        """Choose one action for each call.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan that covers exactly the problem's calls, in order. Planners
            that know no peak may exceed the budget; ``peak_bytes`` then says so.

        Raises:
            InfeasibleBudgetError: The planner keeps budgets and none of its plans
                keeps this one.
        """
        ...


class InfeasibleBudgetError(ValueError):
    """No choice of actions keeps the step within the budget.

    Attributes:
        budget_bytes: The budget that was asked for.
        least_peak_bytes: The lowest peak that any plan reaches.
        holders: What holds how many bytes at the moment of that lowest peak; the
            values add up to ``least_peak_bytes``.
        advice: What to do about it; "" for what follows from the numbers.
    """

    def __init__(
        self,
        budget_bytes: float,
        least_peak_bytes: float,
        holders: Mapping[str, float],
        advice: str = "",
    ) -> None:
        """Build the message out of the numbers.

        Args:
            budget_bytes: The budget that was asked for.
            least_peak_bytes: The lowest peak that any plan reaches.
            holders: Bytes held at that peak, by what holds them.
            advice: What to do; "" for what follows from the numbers.
        """
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes
        self.holders = dict(holders)
        self.advice = advice
        least, missing = least_peak_bytes, least_peak_bytes - budget_bytes
        parts = [
            f"No plan keeps the budget of {_in_words(budget_bytes)}: the lowest "
            f"reachable peak is {_in_words(least)}, {_in_words(missing)} more."
        ]
        if holders:
            largest_first = sorted(holders.items(), key=lambda item: -item[1])
            listed = "; ".join(f"{k}: {_in_words(v)}" for k, v in largest_first)
            parts.append(f"Held at that peak: {listed}.")
        parts.append(
            advice
            or f"Raise the budget to at least {_in_words(least)} (a larger batch needs "
            "more), use a smaller batch or shorter inputs, or allow actions that hold "
            "less."
        )
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[type["InfeasibleBudgetError"], tuple[object, ...]]:
        """Pickle by the arguments, for the message is built from them."""
        numbers = self.budget_bytes, self.least_peak_bytes
        return type(self), (*numbers, self.holders, self.advice)


def _in_words(count: float) -> str:
    """Write a number of bytes as people read it: ``"1.50 GiB"``, ``"310.2 MiB"``."""
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if abs(count) >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} bytes"
