"""The baselines: plans that do not look at the budget, or look at it once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from .base import Plan, Planner, PlanningProblem
from .choices import keep_choice, least_choice
from .marginal import Marginal
from .timeline import judge


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Keep everything, as if there were no planner."""

    name: ClassVar[str] = "none"

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position, without a problem."""
        del index
        return "keep"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Keep every event that may be kept.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        return judge(problem, keep_choice(problem), planner=self.name)


@dataclass(frozen=True, slots=True)
class Full:
    """Recompute everything, as most frameworks' checkpointing flag does."""

    name: ClassVar[str] = "full"

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position, without a problem."""
        del index
        return "recompute"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Recompute every event, or take the next exact action it may have.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        return judge(problem, least_choice(problem), planner=self.name)


@dataclass(frozen=True, slots=True)
class EveryK:
    """Recompute every k-th event, beginning with the first."""

    k: int
    """Distance from one recomputed event to the next."""

    def __post_init__(self) -> None:
        """Check the distance."""
        if self.k < 1:
            msg = f"k must be at least 1, got {self.k}"
            raise ValueError(msg)

    @property
    def name(self) -> str:
        """The name, such as ``"every-2"``."""
        return f"every-{self.k}"

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position, without a problem."""
        return "keep" if index % self.k else "recompute"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Recompute events 0, k, 2k and so on, and keep the others.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        choice = keep_choice(problem)
        choice[:: self.k] = least_choice(problem)[:: self.k]
        return judge(problem, choice, planner=self.name)


@dataclass(frozen=True, slots=True)
class Everywhere:
    """One action for every event, where it may run under it."""

    action: str
    """Its name."""

    @property
    def name(self) -> str:
        """The name, such as ``"lean everywhere"``."""
        return f"{self.action} everywhere"

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position, without a problem."""
        del index
        return self.action

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the action; where it is not allowed, the one that holds least.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        own = problem.actions.index(self.action)
        choice = np.where(problem.allowed[:, own], own, least_choice(problem))
        return judge(problem, choice, planner=self.name)


@dataclass(kw_only=True, slots=True)
class Static:
    """One plan for every shape, made for one of them: usually the longest.

    The first problem it is given should be that shape's; its plan is repeated ever
    after, event by event, and judged anew on each problem.
    """

    name: ClassVar[str] = "static"

    shape: Mapping[str, int]
    """Sizes by name, for whoever makes the first problem."""

    planner: Planner = field(default_factory=Marginal)
    """Who makes the one plan."""

    _actions: dict[str, str] | None = field(default=None, init=False, repr=False)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Repeat the actions of the first plan.

        Events the first problem did not have, and those that may no longer run under
        their action, are recomputed.

        Args:
            problem: The step to plan. Its budget is read the first time only.

        Returns:
            A plan that may be over the budget, but for the first.

        Raises:
            InfeasibleBudgetError: The inner planner's, the first time.
        """
        if self._actions is None:
            first = self.planner.plan(problem)
            self._actions = dict(zip(problem.events, first.actions, strict=True))
        index = {action: i for i, action in enumerate(problem.actions)}
        known = (
            index.get(self._actions.get(event, ""), -1) for event in problem.events
        )
        choice = np.fromiter(known, dtype=np.intp, count=len(problem.events))
        allowed = (choice >= 0) & problem.allowed[np.arange(len(choice)), choice]
        choice = np.where(allowed, choice, least_choice(problem))
        return judge(problem, choice, planner=self.name)
