"""The baselines: plans that do not look at the budget."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .problem import Plan, Planner, PlanningProblem
from .timeline import judge


@runtime_checkable
class FixedPlanner(Planner, Protocol):
    """A planner that reads no problem: no step has to be measured for its plans."""

    def action_at(self, index: int) -> str:
        """Return the action of a call.

        Args:
            index: The call's position in the forward.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pattern:
    """Actions that repeat along the calls, whatever the problem is."""

    name: str
    """The name under which plans and reports show it."""

    actions: tuple[str, ...]
    """What the first calls run under; then it begins again."""

    def action_at(self, index: int) -> str:
        """Return the action of a call, by its position, without a problem."""
        return self.actions[index % len(self.actions)]

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the actions; where one is not allowed, the one that holds least.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        names = [self.action_at(index) for index in range(len(problem.calls))]
        return judge(problem, problem.choice_of(names), planner=self.name)


def every_k(k: int) -> Pattern:
    """Recompute every k-th call, beginning with the first.

    Args:
        k: Distance from one recomputed call to the next.

    Raises:
        ValueError: `k` is less than 1.
    """
    if k < 1:
        msg = f"k must be at least 1, got {k}"
        raise ValueError(msg)
    return Pattern(f"every-{k}", ("recompute", *("keep",) * (k - 1)))


def everywhere(action: str) -> Pattern:
    """Take one action for every call that may run under it.

    Args:
        action: Its name.
    """
    return Pattern(f"{action} everywhere", (action,))
