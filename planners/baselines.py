"""The baselines: plans that do not look at the budget, or look at it once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from .problem import Plan, Planner, PlanningProblem
from .search import Search
from .timeline import judge


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


@dataclass(frozen=True, slots=True)
class Pattern:
    """Actions that repeat along the events, whatever the problem is."""

    name: str
    """The name under which plans and reports show it."""

    actions: tuple[str, ...]
    """What the first events run under; then it begins again."""

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position, without a problem."""
        return self.actions[index % len(self.actions)]

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the actions; where one is not allowed, the one that holds least.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        names = [self.action_at(index) for index in range(len(problem.events))]
        return judge(problem, problem.choice_of(names), planner=self.name)


def every_k(k: int) -> Pattern:
    """Recompute every k-th event, beginning with the first.

    Args:
        k: Distance from one recomputed event to the next.
    """
    if k < 1:
        msg = f"k must be at least 1, got {k}"
        raise ValueError(msg)
    return Pattern(f"every-{k}", ("recompute", *("keep",) * (k - 1)))


def everywhere(action: str) -> Pattern:
    """Take one action for every event that may run under it.

    Args:
        action: Its name.
    """
    return Pattern(f"{action} everywhere", (action,))


@dataclass(kw_only=True, slots=True)
class Static:
    """One plan for every shape, made for one of them: usually the longest.

    The first problem it is given should be that shape's; its plan is repeated ever
    after, event by event, and judged anew on each problem.
    """

    name: ClassVar[str] = "static"

    shape: Mapping[str, int]
    """Sizes by name, for whoever makes the first problem."""

    planner: Planner = field(default_factory=Search)
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
        names = [self._actions.get(event, "") for event in problem.events]
        return judge(problem, problem.choice_of(names), planner=self.name)
