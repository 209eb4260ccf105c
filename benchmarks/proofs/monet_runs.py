"""The processes of `monet`: what actions cost, what plans hold, what they take.

Gradients are there before a step begins and are added to, so that what a step grows by
is what it holds for a while: activations and working memory.
"""

from __future__ import annotations

import collections
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from benchmarks.proofs.common import AMPLE_BYTES
from benchmarks.proofs.menu_times import Playback
from benchmarks.proofs.monet_cases import CASES, Case
from benchmarks.proofs.plangap import Recording
from mimose.bench.child import RunFailedError
from mimose.bench.step_meter import RunningStep, step_meter
from mimose.bench.zoo import moved
from mimose.measure.meters.prediction import PredictionMeter
from mimose.measure.tracker import StorageTracker
from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    Plan,
    Planner,
    PlanningProblem,
    lay_out,
)
from mimose.planners.actions import FINE_MENU
from mimose.session import Session, attach

Told: TypeAlias = dict[str, Any]

_BISECTIONS = 12
_PLAIN_STEPS = 5
_SHARES = (1 / 2, 1 / 3)
"""Of plain training's growth, that are planned for."""
_TRIES = 6
_MENU = FINE_MENU.names


def work(task: Mapping[str, Any]) -> Iterator[Told]:
    """Do one part: ``"costs"``, ``"bytes"`` or ``"times"``."""
    part = {"costs": _costs, "bytes": _bytes, "times": _times}[task["part"]]
    yield from part(task, CASES[task["model"]])


class _Trained:
    """A model with its batch, gradients there."""

    def __init__(self, case: Case, task: Mapping[str, Any]) -> None:
        self.device = torch.device(task["device"])
        torch.manual_seed(task["seed"])
        self.model: nn.Module = case.build().to(self.device)
        self.batch = moved(case.batch(task["seed"]), self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> float:
        """Train on the batch; return the processor's seconds."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        torch.manual_seed(0)
        gc.collect()
        began = time.process_time()
        self.loss = self.model(**self.batch).loss
        torch.autograd.backward(self.loss)
        return time.process_time() - began

    def growth_bytes(self) -> int:
        """Train on the batch; return what the step has grown by at its peak."""
        running = RunningStep(step_meter(self.device), self.device)
        self.step()
        return running.end().growth_bytes

    def attach(self, case: Case, planner: str | Planner) -> Session:
        """Attach a session with all exact actions."""
        return attach(
            self.model,
            AMPLE_BYTES,
            units=case.wanted,
            actions=_MENU,
            planner=planner,
            meter=None if self.device.type != "cpu" else PredictionMeter(self.device),
            refine=False,
        )


# ----------------------------------------------------------------- what actions cost


def _costs(task: Mapping[str, Any], case: Case) -> Iterator[Told]:
    """Learn on the processor what each call takes under each action, in seconds.

    Of a recomputation that is its forward's; a FLOP of any other takes as long.
    """
    trained = _Trained(case, task)
    trained.step()
    plain = median(trained.step() for _ in range(_PLAIN_STEPS))
    forwards = _forward_seconds(trained)
    with trained.attach(case, Recording(task["seed"])) as session:
        for _ in range(task["steps"]):
            trained.step()
        problem = session.planning_problem()
    again = np.array([forwards[event.partition("#")[0]] for event in problem.events])
    cost = problem.cost * (again.sum() / problem.cost[:, -1].sum())
    cost[:, -1] = again
    yield {
        "events": list(problem.events),
        "cost": cost.tolist(),
        "plain_step_seconds": plain,
    }


def _forward_seconds(trained: _Trained) -> Mapping[str, float]:
    """Return what each module's forward takes on the processor, by its name."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    began: dict[str, float] = {}
    handles = []
    for name, module in trained.model.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            began[name] = time.thread_time()

        def leave(*_: Any, name: str = name) -> None:
            times[name].append(time.thread_time() - began[name])

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    for _ in range(_PLAIN_STEPS):
        trained.step()
    for handle in handles:
        handle.remove()
    return {name: median(each) for name, each in times.items()}


# ----------------------------------------------------------------- what plans hold


def _bytes(task: Mapping[str, Any], case: Case) -> Iterator[Told]:
    """Learn bytes, make plans, and measure the growth of each that was made."""
    trained = _Trained(case, task)
    trained.step()
    plain = trained.growth_bytes()
    with StorageTracker() as tracker:
        trained.step()
    trained.loss = None
    yield {
        "plain_growth_bytes": plain,
        "plain_flops": tracker.flops,
        "parameter_bytes": sum(p.nbytes for p in trained.parameters),
    }
    problem = _learned(trained, case, task)
    playback = Playback()
    with trained.attach(case, playback) as session:

        def measured(plan: Told) -> Told:
            playback.actions = tuple(_NAMES[code] for code in plan["plan"])
            for _ in range(2):  # the first finds out how to rebuild
                growth = trained.growth_bytes()
            _check(session, playback)
            flops = session.records[-1].recomputed_flops
            return {**plan, "growth_bytes": growth, "recomputed_flops": flops}

        for share in _SHARES:
            for planner in (Optimal(), Marginal()):
                yield _within(problem, planner, plain, share, measured)
        for plan in _others(problem, plain, task["plain_step_seconds"]):
            yield measured(plan)


def _within(
    problem: PlanningProblem,
    planner: Planner,
    plain: int,
    share: float,
    measured: Callable[[Told], Told],
) -> Told:
    """Plan for a share, and for less where the step grew by more than predicted."""
    asked = share
    for _ in range(_TRIES):
        found = measured(_plan(problem, planner, plain, asked))
        over = found["growth_bytes"] / plain - share
        if over <= 0.0 or not found["is_reached"]:
            break
        asked -= over
    is_reached = found["growth_bytes"] <= share * plain
    return {**found, "target": f"{share:.3g}", "is_reached": is_reached}


_NAMES = {spec.code: spec.name for spec in FINE_MENU.specs}


def _learned(trained: _Trained, case: Case, task: Mapping[str, Any]) -> PlanningProblem:
    """Return the problem of the batch, with bytes as learned and seconds as told."""
    with trained.attach(case, "auto") as session:
        for _ in range(task["steps"]):
            trained.step()
        problem = session.planning_problem()
    if list(problem.events) != task["events"]:
        msg = f"other layers ran than on the processor: {problem.events}"
        raise RunFailedError(msg)
    return replace(
        problem,
        cost=np.array(task["cost"]),
        optimizer_state_bytes=0.0,
        step_excess_bytes=0.0,
    )


def _others(
    problem: PlanningProblem, plain: int, plain_seconds: float
) -> Iterator[Told]:
    """Yield the plan of 10% more time, and that of whole layers."""
    share = _cheap_share(problem, plain, 0.1 * plain_seconds)
    yield {**_plan(problem, Optimal(), plain, share), "target": "+10%"}
    last = len(problem.actions) - 1
    everything = np.full(len(problem.events), last, dtype=np.intp)
    laid = lay_out(problem, everything)
    yield {
        **_EMPTY,
        "target": "recompute all",
        "plan": FINE_MENU.codes([_MENU[-1]] * len(problem.events)),
        "predicted_growth_bytes": laid.peak_bytes - problem.start_bytes,
        "predicted_seconds": float(problem.cost[:, last].sum()),
    }


_EMPTY: Told = {
    "planner": "",
    "share": 0.0,
    "is_reached": True,
    "is_proved": False,
    "binding": "",
    "planner_seconds": 0.0,
}


def _plan(problem: PlanningProblem, planner: Planner, plain: int, share: float) -> Told:
    """Plan for a share of plain training's growth, or for the least there is."""
    asked = replace(problem, budget_bytes=problem.start_bytes + share * plain)
    is_reached = True
    try:
        plan, seconds = _timed(planner, asked)
    except InfeasibleBudgetError as error:
        is_reached = False
        least = replace(problem, budget_bytes=error.least_peak_bytes * (1 + 1e-12))
        plan, seconds = _timed(planner, least)
    return {
        "target": f"{share:.3g}",
        "planner": planner.name,
        "share": share,
        "is_reached": is_reached,
        "plan": FINE_MENU.codes(plan.actions),
        "is_proved": plan.optimal,
        "binding": " ".join(plan.binding_segments),
        "planner_seconds": seconds,
        "predicted_seconds": plan.extra_cost,
        "predicted_growth_bytes": plan.growth_bytes,
    }


def _timed(planner: Planner, problem: PlanningProblem) -> tuple[Plan, float]:
    times = []
    for _ in range(3):
        began = time.process_time()
        plan = planner.plan(problem)
        times.append(time.process_time() - began)
    return plan, min(times)


def _cheap_share(problem: PlanningProblem, plain: int, most_seconds: float) -> float:
    """Return the least share whose optimal plan adds no more seconds than these."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        asked = replace(problem, budget_bytes=problem.start_bytes + share * plain)
        try:
            is_cheap = Optimal().plan(asked).extra_cost <= most_seconds
        except InfeasibleBudgetError:
            is_cheap = False
        low, high = (low, share) if is_cheap else (share, high)
    return high


def _check(session: Session, playback: Playback) -> None:
    """Make sure that the last step ran as it was told.

    Raises:
        RunFailedError: A layer refused its action.
    """
    limits = session.state_dict()["cost_model"]["limits"]
    if limits or tuple(session.records[-1].actions) != playback.actions:
        msg = f"the plan was run otherwise: layers may run under {limits}"
        raise RunFailedError(msg)


# ----------------------------------------------------------------- what plans take


def _times(task: Mapping[str, Any], case: Case) -> Iterator[Told]:
    """Time the bare model and plans by turns; compare all results."""
    bare, planned = (_Trained(case, task) for _ in range(2))
    playback = Playback()
    plans: Sequence[str] = task["plans"]
    with planned.attach(case, playback) as session:

        def run(plan: str) -> float:
            if not plan:
                return bare.step()
            playback.actions = tuple(_NAMES[code] for code in plan)
            seconds = planned.step()
            _check(session, playback)
            return seconds

        for plan in ("", *plans, *plans):
            run(plan)  # finds out how to rebuild, and maps its pages
        order = ["", *plans]
        for number in range(task["rounds"]):
            random.Random(number).shuffle(order)
            for plan in order:
                seconds = run(plan)
                is_exact = plan == "" or _are_equal(bare, planned)
                told = {"round": number, "plan": plan, "seconds": seconds}
                yield {**told, "is_exact": is_exact}


def _are_equal(bare: _Trained, planned: _Trained) -> bool:
    pairs = zip(bare.parameters, planned.parameters, strict=True)
    return torch.equal(bare.loss.detach(), planned.loss.detach()) and all(
        one.grad is not None
        and two.grad is not None
        and torch.equal(one.grad, two.grad)
        for one, two in pairs
    )
