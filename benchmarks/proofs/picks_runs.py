"""The process of `picks`: learns under random plans, plans all cells, runs some."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.digits import workload_named
from benchmarks.proofs.common import AMPLE_BYTES
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.menu_times import Playback
from benchmarks.proofs.models import argument_sizes
from benchmarks.proofs.picks import BARE, PLANNED, RAN
from benchmarks.proofs.picks_menus import MENUS, Anything, budget_at, restricted
from mimose.bench.advise.foretold import flop_seconds
from mimose.bench.grid.strategies import ALL_MENU, EVERYTHING
from mimose.bench.grid.workloads import Workload
from mimose.bench.zoo import Batch
from mimose.planners import Marginal, Planner, PlanningProblem
from mimose.session import Session, attach

_GIB = 2**30
_ARMS = ("fine", "all")
"""Menus that plans are run of."""
_NOT_RUN = {"part": PLANNED, "round": -1, "growth_bytes": None, "step_seconds": None}


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Learn, then plan every cell, then run plans of two menus."""
    cells = _Cells(task)
    problems = cells.learned()
    for shape, problem in zip(task["shapes"], problems, strict=True):
        for share in task["shares"]:
            for menu, names in MENUS.items():
                yield {
                    **cells.place(shape, share, menu),
                    **_NOT_RUN,
                    **_planned(problem, share, names),
                }
    for share in task["run_shares"]:
        yield from cells.run(share, problems)


class _Cells:
    """A workload, at some shapes."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._workload: Workload = workload_named(task["workload"])
        self._shapes: Sequence[Mapping[str, int]] = task["shapes"]

    def place(self, shape: Mapping[str, int], share: float, menu: str) -> Any:
        """Return the columns that say which cell a row is of."""
        return {
            "workload": self._task["workload"],
            "scale": self._task["scale"],
            "menu": menu,
            "sizes": json.dumps(shape),
            "budget_share": share,
        }

    def learned(self) -> list[PlanningProblem]:
        """Return what a planner is given for each shape when all actions are known."""
        loop, planner = self._loop(), Anything(self._task["seed"])
        with self._attached(loop, planner) as session:
            n_passes = 0
            while self._shows_more(loop, session) and n_passes < self._task["learn"]:
                n_passes += 1
            planner.is_random = True
            for _ in range(self._task["timed"]):
                for shape in self._shapes:
                    loop.step(self._batch(shape))
            problems = [
                session.planning_problem(argument_sizes(self._batch(shape)))
                for shape in self._shapes
            ]
            rate = flop_seconds(session)
        return [replace(each, cost=rate * each.cost) for each in problems]

    def _shows_more(self, loop: Loop, session: Session) -> bool:
        """Run every shape once; return whether an action was still to be tried."""
        shows = False
        for shape in self._shapes:
            loop.step(self._batch(shape))
            record = session.records[-1]
            shows |= record.phase != "plan" or record.predicted_growth_bytes is None
        return shows

    def run(self, share: float, problems: Sequence[PlanningProblem]) -> Iterator[Any]:
        """Train on each shape bare and under the plans of two menus, by turns."""
        bare, loop, planner = self._loop(), self._loop(), Playback()
        with self._attached(loop, planner) as session:
            for shape, problem in zip(self._shapes, problems, strict=True):
                batch = self._batch(shape)
                told = {arm: _planned(problem, share, MENUS[arm]) for arm in _ARMS}
                told[BARE] = dict.fromkeys(told["all"]) | _NO_PLAN
                chosen = {arm: _actions(each["plan"]) for arm, each in told.items()}
                order = [BARE, *_ARMS]
                for number in range(-1, self._task["rounds"]):
                    order = [*order[1:], order[0]]
                    for arm in order:
                        planner.actions = chosen[arm]
                        seconds = _step(bare if arm == BARE else loop, batch)
                        growth = session.records[-1].observed_growth_bytes
                        yield {
                            **self.place(shape, share, arm),
                            **told[arm],
                            "part": RAN,
                            "round": number,
                            "growth_bytes": None if arm == BARE else growth,
                            "step_seconds": seconds,
                        }

    def _loop(self) -> Loop:
        torch.manual_seed(self._task["seed"])
        model = self._workload.build(self._task["scale"]).to(self._task["device"])
        loop = Loop(model)
        loop.warm_up(self._batch(self._shapes[0]))
        return loop

    def _attached(self, loop: Loop, planner: Planner) -> Session:
        return attach(
            loop.model,
            AMPLE_BYTES,
            units=self._workload.units,
            actions=EVERYTHING,
            planner=planner,
            cache_size=1,  # so that a shape that comes again gets a plan of its own
            refine=False,
            meter=loop.meter,
        )

    def _batch(self, shape: Mapping[str, int]) -> Batch:
        generator = torch.Generator().manual_seed(self._task["seed"])
        return self._workload.batch(shape, self._task["scale"], generator)


_NO_PLAN = {"plan": "", "binds": "", "prices": "", "is_proved": False}


def _actions(plan: str) -> tuple[str, ...]:
    names = {spec.code: spec.name for spec in ALL_MENU.specs}
    return tuple(names[code] for code in plan)


def _step(loop: Loop, batch: Batch) -> float:
    """Run a step; return the process's seconds."""
    gc.collect()
    torch.manual_seed(0)
    began = time.process_time()
    loop.step(batch)
    return time.process_time() - began


def _planned(
    problem: PlanningProblem, share: float, names: Sequence[str]
) -> dict[str, Any]:
    """Plan a cell; tell the plan and why it is so."""
    budget = budget_at(problem, share)
    part = restricted(replace(problem, budget_bytes=budget), names)
    plan = Marginal().plan(part)
    return {
        "plan": ALL_MENU.codes(plan.actions),
        "budget_bytes": budget - problem.start_bytes,
        "predicted_growth_bytes": plan.growth_bytes,
        "predicted_seconds": plan.extra_cost,
        "is_proved": plan.optimal,
        "binds": plan.binding_segments[0],
        "prices": json.dumps(_prices(part)),
    }


def _prices(problem: PlanningProblem) -> dict[str, float]:
    """Return, by action, the median over layers of seconds for a GiB less held.

    Where the event before has not saved what it hands on, an action that lets its
    input go frees that as well.
    """
    freed = problem.held_bytes[:, :1] - problem.held_bytes
    freed = freed + problem.releases_input * problem.input_bytes[:, None]
    seconds = problem.cost - problem.cost[:, :1]
    counts = problem.allowed & problem.allowed[:, :1] & (freed > 0)
    return {
        name: float(np.median(seconds[rows, i] / freed[rows, i])) * _GIB
        for i, name in enumerate(problem.actions)
        if (rows := counts[:, i]).any()
    }
