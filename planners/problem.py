"""The interface of the planners: a problem, a plan, the protocol, the error.

PlanningProblem        one step's memory and costs, for one shape
Plan                   one action for each layer call
InfeasibleBudgetError  (ValueError) no plan keeps the budget
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .actions import KEEP

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.intp]

_SHAPES = {
    "allowed": "CK",
    "held_bytes": "CK",
    "forward_transient_bytes": "CK",
    "backward_transient_bytes": "CK",
    "cost": "CK",
    "host_bytes": "CK",
    "backward_retained_bytes": "C",
    "gap_bytes": "G",
    "gap_transient_bytes": "G",
}
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
        if self.actions[:1] != (KEEP.name,):
            msg = f"actions must begin with {KEEP.name!r}, got {self.actions!r}"
            raise ValueError(msg)
        n = len(self.calls)
        sizes: Mapping[str, tuple[int, ...]]
        sizes = {"C": (n,), "G": (n + 1,), "CK": (n, len(self.actions))}
        for name, kind in _SHAPES.items():
            dtype = np.bool_ if name == "allowed" else np.float64
            array: NDArray[Any] = np.asarray(getattr(self, name), dtype=dtype)
            object.__setattr__(self, name, array)
            low = -np.inf if name in _SIGNED else 0
            if array.shape != sizes[kind]:
                msg = f"{name} must have shape {sizes[kind]}, got {array.shape}"
                raise ValueError(msg)
            if not np.isfinite(array).all() or (array < low).any():
                bad = array[~(np.isfinite(array) & (array >= low))][0]
                msg = f"{name} must be finite, and not negative, got {bad}"
                raise ValueError(msg)
        if not self.allowed.any(axis=1).all():
            stuck = self.calls[int(np.argmin(self.allowed.any(axis=1)))]
            msg = f"allowed must leave every call an action, got none for {stuck!r}"
            raise ValueError(msg)

    # ------------------------------------------- choices of actions without a search

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
        least, more = least_peak_bytes, least_peak_bytes - budget_bytes
        missing = format_bytes(more) if more >= 2**17 else f"{math.ceil(more):,} bytes"
        parts = [
            f"No plan keeps the budget of {format_bytes(budget_bytes)}: the lowest "
            f"peak that a plan can reach is {format_bytes(least)}, which is "
            f"{missing} more."
        ]
        if holders:
            largest_first = sorted(holders.items(), key=lambda item: -item[1])
            listed = "; ".join(f"{k}: {format_bytes(v)}" for k, v in largest_first)
            parts.append(f"Held at that peak: {listed}.")
        parts.append(
            advice
            or f"Raise the budget by {missing}, to {format_bytes(least)} "
            "or more (a larger batch needs more), use a smaller batch or shorter "
            "inputs, or allow actions that hold less."
        )
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[type["InfeasibleBudgetError"], tuple[object, ...]]:
        """Pickle by the arguments, because the message is built from them."""
        numbers = self.budget_bytes, self.least_peak_bytes
        return type(self), (*numbers, self.holders, self.advice)


def format_bytes(n_bytes: float) -> str:
    """Return a number of bytes as text: in GiB from one GiB on, else in MiB.

    >>> format_bytes(1610612736), format_bytes(-52428800)
    ('1.50 GiB', '-50.0 MiB')
    """
    if abs(n_bytes) >= 2**30:
        return f"{n_bytes / 2**30:.2f} GiB"
    return f"{round(n_bytes / 2**20, 1) + 0.0:.1f} MiB"  # no minus before a 0
