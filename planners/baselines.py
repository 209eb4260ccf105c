"""Baselines: plans that do not depend on the budget."""

from dataclasses import dataclass

from .problem import Plan, PlanningProblem
from .timeline import judge


@dataclass(frozen=True, slots=True)
class Pattern:
    """A fixed pattern of actions that repeats along the layer calls."""

    name: str
    """The name of the planner in plans and reports."""

    actions: tuple[str, ...]
    """The actions of the first calls; after the last one the pattern repeats."""

    def action_at(self, index: int) -> str:
        """Return the name of the action of a layer call.

        Args:
            index: The call's position in the forward, from 0.
        """
        return self.actions[index % len(self.actions)]

    def plan(self, problem: PlanningProblem) -> Plan:
        """Apply the pattern; a call that does not allow its action holds little.

        Args:
            problem: The step to plan; its budget is not read.

        Returns:
            A plan that may be over the budget.
        """
        names = [self.action_at(index) for index in range(len(problem.calls))]
        return judge(problem, problem.choice_of(names), planner=self.name)


def every_k(k: int) -> Pattern:
    """Return the planner that recomputes every k-th layer call, and the first.

    Args:
        k: The distance from one recomputed call to the next, at least 1.
    """
    return Pattern(f"every-{k}", ("recompute", *("keep",) * (k - 1)))


def everywhere(action: str) -> Pattern:
    """Return the planner that chooses one action for every call that allows it.

    Args:
        action: The name of the action, such as ``"selective"``.
    """
    return Pattern(f"{action} everywhere", (action,))
