"""The process of `picks`: learns under random plans, plans all cells, runs some."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mimose.bench.grid.menu import ALL_MENU, EVERYTHING
from mimose.bench.grid.workload import Workload
from mimose.bench.grid.workloads import workload_named
from mimose.bench.proofs.common import AMPLE_BYTES
from mimose.bench.proofs.loop import Loop
from mimose.bench.proofs.models import argument_sizes
from mimose.bench.proofs.picks import BARE, PLANNED, RAN
from mimose.bench.proofs.picks_menus import (
    MENUS,
    Anything,
    AtShare,
    budget_at,
    restricted,
)
from mimose.bench.zoo import Batch
from mimose.planners import Marginal, Planner, PlanningProblem
from mimose.session import Session, attach

_GIB = 2**30
_ARMS = ("fine", "all")
"""Menus that plans are run of."""
_NOT_RUN = {"part": PLANNED, "round": -1, "extra_seconds": None, "step_seconds": None}


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Learn, then plan every cell, then run plans of two menus."""
    cells = _Cells(task)
    state, problems = cells.learned()
    for shape, problem in zip(task["shapes"], problems, strict=True):
        for share in task["shares"]:
            for menu, names in MENUS.items():
                yield {
                    **cells.place(shape, share, menu),
                    **_NOT_RUN,
                    **_planned(problem, share, names),
                }
    for share in task["run_shares"]:
        yield from cells.run(share, state)


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

    def learned(self) -> tuple[Mapping[str, Any], list[PlanningProblem]]:
        """Return what random plans teach, and what a planner is then given."""
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
            return session.state_dict(), problems

    def _shows_more(self, loop: Loop, session: Session) -> bool:
        """Run every shape once; return whether an action was still to be tried."""
        shows = False
        for shape in self._shapes:
            loop.step(self._batch(shape))
            record = session.records[-1]
            shows |= record.phase != "plan" or record.predicted_growth_bytes is None
        return shows

    def run(self, share: float, state: Mapping[str, Any]) -> Iterator[Any]:
        """Train under plans of two menus at a budget, and bare, on the same batches."""
        loops = {name: self._loop() for name in (BARE, *_ARMS)}
        sessions: dict[str, Session] = {}
        with contextlib.ExitStack() as stack:
            for menu in _ARMS:
                planner = AtShare(MENUS[menu], share)
                session = self._attached(loops[menu], planner)
                sessions[menu] = stack.enter_context(session)
                session.load_state_dict(state)
            order = list(loops)
            for number in range(self._task["rounds"]):
                for shape in self._shapes:
                    batch = self._batch(shape)
                    order = [*order[1:], order[0]]
                    for name in order:
                        told = _run(loops[name], batch, sessions.get(name))
                        place = self.place(shape, share, name)
                        yield {**place, "part": RAN, "round": number, **told}

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
            cost="seconds",
        )

    def _batch(self, shape: Mapping[str, int]) -> Batch:
        generator = torch.Generator().manual_seed(self._task["seed"])
        return self._workload.batch(shape, self._task["scale"], generator)


def _run(loop: Loop, batch: Batch, session: Session | None) -> dict[str, Any]:
    """Run a step; tell what it took, and what its record says."""
    gc.collect()
    torch.manual_seed(0)
    began = time.process_time()
    loop.step(batch)
    told: dict[str, Any] = {
        "step_seconds": time.process_time() - began,
        "growth_bytes": None,
        **dict.fromkeys(("plan", "binds", "prices"), ""),
        **dict.fromkeys(("budget_bytes", "predicted_growth_bytes")),
        **dict.fromkeys(("predicted_seconds", "extra_seconds")),
        "is_proved": False,
    }
    if session is None:
        return told
    record = session.records[-1]
    return {
        **told,
        "plan": ALL_MENU.codes(record.actions),
        "growth_bytes": record.observed_growth_bytes,
        "predicted_growth_bytes": record.predicted_growth_bytes,
        "predicted_seconds": record.predicted_extra_seconds,
        "extra_seconds": record.extra_seconds,
    }


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
        "growth_bytes": None,
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
