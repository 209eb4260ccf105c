"""Runs given plans by turns with the bare model: how long do they take?

One process has a bare model, and for each plan a model with a session that follows it.
All have the same weights, and no step changes them: each plan must give plain
training's loss and gradients, bit by bit. Seconds are CPU time of forward and backward.
Rounds are compared one by one, so that disturbances affect both. The heap must be kept
(`HEAP_IS_KEPT`), or mapping new pages would take most of the time.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.bench.child import RunFailedError
from mimose.planners import Plan, PlanningProblem
from mimose.planners.actions import FINE_MENU
from mimose.planners.timeline import judge
from mimose.session import Session

PLAIN = ""
"""Stands for no plan: the bare model."""
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


class Trained:
    """A model and what its last step gave; gradients are there before a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self, batch: Mapping[str, Any]) -> float:
        """Train on a batch; return the processor's seconds."""
        self.model.zero_grad(set_to_none=False)
        torch.manual_seed(0)
        gc.collect()
        began = time.process_time()
        self.loss: torch.Tensor | None = self.model(**batch).loss
        torch.autograd.backward(self.loss)
        return time.process_time() - began

    def results(self) -> list[torch.Tensor]:
        """Return the last step's loss and gradients."""
        found = [self.loss, *(parameter.grad for parameter in self.parameters)]
        return [each.detach() for each in found if each is not None]


def by_turns(
    bare: Trained,
    planned: Mapping[str, tuple[Trained, Session, Playback]],
    batch: Mapping[str, Any],
    n_rounds: int,
) -> Iterator[dict[str, Any]]:
    """Run a batch bare and under each plan, in rounds with a random order.

    Raises:
        RunFailedError: A layer refused its action, or a plan gave another loss or
            gradient than plain training.
    """
    order = [PLAIN, *planned]
    for number in range(-1, n_rounds):  # the first warms up
        for plan in order:
            if plan == PLAIN:
                seconds = bare.step(batch)
            else:
                own, session, playback = planned[plan]
                seconds = own.step(batch)
                playback.check(session)
                if not all(map(torch.equal, bare.results(), own.results())):
                    msg = f"the plan {plan!r} gave another loss or gradient"
                    raise RunFailedError(msg)
            if number >= 0:
                yield {"plan": plan, "round": number, "seconds": seconds}
        random.Random(number).shuffle(order)


def overhead(timed: Sequence[Mapping[str, Any]], plan: str) -> float:
    """Return what a plan takes over plain training, as a share.

    Args:
        timed: What `by_turns` yields of one batch.
        plan: One of those that ran.
    """
    plain = {each["round"]: each["seconds"] for each in timed if each["plan"] == PLAIN}
    own = [each for each in timed if each["plan"] == plan]
    ratio: float = median(each["seconds"] / plain[each["round"]] for each in own)
    return ratio - 1.0
