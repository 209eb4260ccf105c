"""A planner that has every step run a given plan, so that plans can be compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mimose.bench.child import RunFailedError
from mimose.planners import Plan, PlanningProblem
from mimose.planners.actions import FINE_MENU
from mimose.planners.timeline import judge
from mimose.session import Session

_SETTLED, _MOST_STEPS = 2, 40
_NAMES = {spec.code: spec.name for spec in FINE_MENU.specs}


class Playback:
    """A planner that has every step run a given plan."""

    name = "playback"

    def __init__(self) -> None:
        self.actions: tuple[str, ...] = ()

    def tell(self, plan: str) -> None:
        """Take a plan: a letter for each layer call."""
        self.actions = tuple(_NAMES[code] for code in plan)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Judge the given plan."""
        choice = [problem.actions.index(action) for action in self.actions]
        return judge(problem, np.array(choice, dtype=np.intp), planner=self.name)

    def settle(self, session: Session, step: Callable[[], object]) -> None:
        """Step until the session has learned enough to run the plan, and runs it.

        Raises:
            RunFailedError: It does not.
        """
        n_settled = 0
        for _ in range(_MOST_STEPS):
            step()
            last = session.records[-1]
            is_planned = last.phase == "plan" and last.actions == self.actions
            n_settled = n_settled + 1 if is_planned else 0
            if n_settled == _SETTLED:
                return
        self.check(session)

    def check(self, session: Session) -> None:
        """Make sure that the last step ran under the given plan.

        Records have the action that a layer was given, though it refused it.

        Raises:
            RunFailedError: The session did something else.
        """
        limits = session.state_dict()["cost_model"]["limits"]
        if limits or tuple(session.records[-1].actions) != self.actions:
            plan = FINE_MENU.codes(self.actions)
            msg = f"the plan {plan!r} was run otherwise: layers may run under {limits}"
            raise RunFailedError(msg)
