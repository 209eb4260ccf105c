"""The interface of the planners: a problem, a plan, the protocol, the error.

PlanningProblem        one step's memory and costs, for one shape
Plan                   one action for each layer call
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
    """The memory and the costs of one training step, for one shape.

    The step ends with the backward, because no plan changes what the optimizer step
    takes.

    There are C layer calls, in forward order, and K actions. The first action is
    ``"keep"``; the last is the one that every layer supports. Sizes are bytes. All
    numbers must be finite, also those of actions that are not allowed (which planners
    do not read); only the two budgets may be infinite. Arrays are not copied: do not
    write to them afterwards.

    Raises:
        ValueError: A field has the wrong shape; a value is not finite, or negative
            where it must not be; a name appears twice; a call has no allowed action; or
            no choice keeps the host budget.
    """

    calls: tuple[str, ...]
    """(C,) The names of the calls in forward order, such as ``"encoder.layer.3#0"``."""

    actions: tuple[str, ...]
    """(K,) The names of the actions."""

    allowed: BoolArray
    """(C, K) Whether the call may run under the action."""

    held_bytes: FloatArray
    """(C, K) The bytes that the call leaves alive from its exit until its backward.
    Negative if it moves more of its inputs to the host than it saves."""

    forward_transient_bytes: FloatArray
    """(C, K) The highest level in its forward, above the level at its entry."""

    backward_transient_bytes: FloatArray
    """(C, K) The highest level in its backward, above the level when its gradient
    arrives."""

    backward_retained_bytes: FloatArray
    """(C,) The signed change over its backward, without the release of `held_bytes`:
    what stays, such as gradients of weights. It is the same for all actions."""

    cost: FloatArray
    """(C, K) The cost that the action adds to the step, all in the same unit, such as
    FLOPs."""

    gap_bytes: FloatArray
    """(C + 1,) The signed change over what runs before each call; the last entry is the
    head, from the last call to the first gradient."""

    gap_transient_bytes: FloatArray
    """(C + 1,) The highest level in each gap, above the level at its start."""

    start_bytes: float
    """What is held when the forward of the model begins."""

    budget_bytes: float
    """The most that the device may hold at any moment of the step."""

    host_bytes: FloatArray
    """(C, K) The bytes of host memory that the action needs."""

    host_budget_bytes: float
    """The most host memory that all calls together may need."""

    lossy: frozenset[str] = frozenset()
    """The names of the actions that change gradients."""

    def __post_init__(self) -> None:
        """Check every field, so that the planners can rely on them."""
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
        """Return (C,) keep, or `least_choice` for calls that may not keep."""
        return np.where(self.allowed[:, 0], 0, self.least_choice())

    def cheapest_choice(self) -> IntArray:
        """Return (C,) the cheapest allowed action of each call."""
        choice: IntArray = np.where(self.allowed, self.cost, np.inf).argmin(axis=1)
        return choice

    def least_choice(self) -> IntArray:
        """Return (C,) for each call the last action that holds little and is safe.

        This is the last allowed action that is exact and uses no host memory; if there
        is none, the last exact one; if there is none, the last allowed one.
        """
        n_actions = len(self.actions)
        is_exact = np.array([name not in self.lossy for name in self.actions])
        rank = np.arange(n_actions) + n_actions * is_exact
        rank = rank + n_actions * (is_exact & (self.host_bytes == 0))
        choice: IntArray = np.where(self.allowed, rank, -1).argmax(axis=1)
        return choice

    def choice_of(self, names: Sequence[str]) -> IntArray:
        """Return (C,) the actions of these names, `least_choice` if one is not allowed.

        Args:
            names: (C,) The names of actions.
        """
        index = {name: i for i, name in enumerate(self.actions)}
        choice = np.array([index.get(name, -1) for name in names], dtype=np.intp)
        may = (choice >= 0) & self.allowed[np.arange(len(choice)), choice]
        return np.where(may, choice, self.least_choice())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One action for each layer call, with its peak and its cost."""

    actions: tuple[str, ...]
    """(C,) The action of each call, in forward order."""

    peak_bytes: float
    """The highest level of the step under these actions."""

    growth_bytes: float
    """The peak minus what is held when the step begins."""

    extra_cost: float
    """The sum of the costs of the actions, in the problem's unit."""

    binding_segments: tuple[str, ...]
    """The names of the segments that reach the peak, in the order of time."""

    planner: str
    """The name of the planner that made it."""

    optimal: bool
    """Whether it is proved that no cheaper choice keeps the budget."""


@runtime_checkable
class Planner(Protocol):
    """Makes a plan for a problem. `attach(planner=...)` takes any such object."""

    @property
    def name(self) -> str:
        """The name of the planner in plans and reports."""
        ...

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose one action for each layer call.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan for exactly the calls of the problem, in order. A planner that does
            not compute peaks may exceed the budget; ``peak_bytes`` then says so.

        Raises:
            InfeasibleBudgetError: The planner keeps budgets, and none of its plans
                keeps this one.
        """
        ...


class InfeasibleBudgetError(ValueError):
    """No choice of actions keeps the step within the budget.

    Attributes:
        budget_bytes: The budget.
        least_peak_bytes: The lowest peak that any plan reaches, in bytes.
        holders: What holds how many bytes at the moment of that peak. The values add up
            to ``least_peak_bytes``.
        advice: What to do; "" for the default advice.
    """

    def __init__(
        self,
        budget_bytes: float,
        least_peak_bytes: float,
        holders: Mapping[str, float],
        advice: str = "",
    ) -> None:
        """Build the message from the numbers.

        Args:
            budget_bytes: The budget.
            least_peak_bytes: The lowest peak that any plan reaches, in bytes.
            holders: Bytes held at that peak, by what holds them.
            advice: What to do; "" for the default advice.
        """
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes
        self.holders = dict(holders)
        self.advice = advice
        least, missing = least_peak_bytes, least_peak_bytes - budget_bytes
        parts = [
            f"No plan keeps the budget of {_in_words(budget_bytes)}: the lowest peak "
            f"that a plan can reach is {_in_words(least)}, which is "
            f"{_in_words(missing)} more."
        ]
        if holders:
            largest_first = sorted(holders.items(), key=lambda item: -item[1])
            listed = "; ".join(f"{k}: {_in_words(v)}" for k, v in largest_first)
            parts.append(f"Held at that peak: {listed}.")
        parts.append(
            advice
            or f"Raise the budget by {_in_words(missing)}, to {_in_words(least)} or "
            "more (a larger batch needs more), use a smaller batch or shorter inputs, "
            "or allow actions that hold less."
        )
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[type["InfeasibleBudgetError"], tuple[object, ...]]:
        """Pickle by the arguments, because the message is built from them."""
        numbers = self.budget_bytes, self.least_peak_bytes
        return type(self), (*numbers, self.holders, self.advice)


def _in_words(count: float) -> str:
    """Return a number of bytes as text: ``"1.50 GiB"``, ``"310.2 MiB"``."""
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if abs(count) >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} bytes"
