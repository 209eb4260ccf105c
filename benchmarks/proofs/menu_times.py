"""The times of `menu`: plans that were run before, beside plain training.

One process a task runs the same batch under each of its plans, in an order that is
drawn anew each round, and times what the process itself takes: forward, backward and
optimizer step. Plans that several strategies or budgets share are timed once. The heap
is not given back between steps, so that no plan pays for fresh pages, as under an
accelerator's allocator. The optimizer's learning rate is 0: every plan of a step has
to give plain training's loss and gradients, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.proofs.common import AMPLE_BYTES, Settings, progress
from benchmarks.proofs.menu_bytes import kept
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.grid.runner import GridRow
from mimose.bench.grid.strategies import FINE, menu_named
from mimose.bench.grid.workloads import Workload, workload_named
from mimose.bench.machine import HEAP_IS_KEPT
from mimose.bench.rows import Row, RowsFile
from mimose.bench.zoo import moved
from mimose.planners import Menu, Plan, PlanningProblem
from mimose.planners.timeline import judge
from mimose.session import Session, attach

PLAIN = ""
"""Stands for no plan: the bare model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MenuTimeRow(Row):
    """One run of a step under a plan."""

    workload: str
    scale: str
    step: int
    sizes: str
    """The batch's, by name, as JSON."""
    plan: str
    """A letter for each layer's call; empty for the bare model."""
    round: int
    seconds: float
    """Of the process: forward, backward and optimizer step."""
    is_exact: bool
    """Whether loss and gradients are plain training's."""

    @property
    def place(self) -> tuple[str, str, int]:
        """What is run side by side."""
        return self.workload, self.sizes, self.round


@dataclass(slots=True)
class PlanTimes:
    """What steps take under their plans."""

    n_inexact: int = 0
    """Runs whose loss or gradients are not plain training's."""
    n_rounds: int = 0
    _seconds: dict[tuple[str, str, str], dict[int, float]] = field(default_factory=dict)
    """By task, sizes and plan, then round."""

    def add(self, row: MenuTimeRow) -> None:
        """Take in one run."""
        key = row.workload, row.sizes, row.plan
        self._seconds.setdefault(key, {})[row.round] = row.seconds
        self.n_inexact += not row.is_exact
        self.n_rounds += row.plan == PLAIN

    def of(self, row: GridRow) -> tuple[float, float] | None:
        """Return a step's extra seconds and plain training's; None if not known.

        Rounds are compared one by one, so that what disturbs a round disturbs both.
        """
        plain = self._seconds.get((row.workload, row.sizes, PLAIN), {})
        mine = self._seconds.get((row.workload, row.sizes, row.plan), {})
        ratios = [mine[i] / plain[i] for i in mine.keys() & plain.keys()]
        if not ratios:
            return None
        seconds = median(plain.values())
        return (median(ratios) - 1.0) * seconds, seconds


def times_of(
    settings: Settings,
    options: argparse.Namespace,
    rows: Sequence[GridRow],
    *,
    runs: bool,
) -> PlanTimes:
    """Return what the compared steps of some rows take.

    Args:
        settings: The proof's.
        options: The command line's.
        rows: Whose plans are timed.
        runs: Whether what is not there yet is run.
    """
    path = settings.out / "menu_times.csv"
    is_kept = path.exists() and (options.resume or not runs)
    here = replace(settings, device=options.time_device)
    timed = kept(path, MenuTimeRow, here, options.scale) if is_kept else []
    asked = [row for row in rows if row.budget_share in (None, *options.budgets)]
    wanted = {task: _batches(asked, task) for task in options.tasks}
    if runs:
        timed = _take(path, timed, wanted, here, options)
    times = PlanTimes()
    for row in timed:
        times.add(row)
    return times


@dataclass(slots=True)
class _Timed:
    """A batch, and the plans that it is run under."""

    step: int
    sizes: str
    plans: list[str]


def _batches(rows: Sequence[GridRow], task: str) -> list[_Timed]:
    """Return each size of a task's compared steps once, with every plan it had."""
    found: dict[str, _Timed] = {}
    for row in rows:
        if row.workload != task or not row.is_measured or row.problem:
            continue
        batch = found.setdefault(row.sizes, _Timed(row.step, row.sizes, [PLAIN]))
        if row.plan not in batch.plans:  # that of plain training is empty
            batch.plans.append(row.plan)
    return list(found.values())


def _take(
    path: Path,
    timed: Sequence[MenuTimeRow],
    wanted: Mapping[str, Sequence[_Timed]],
    settings: Settings,
    options: argparse.Namespace,
) -> list[MenuTimeRow]:
    """Time what is not there yet; each round is written down when it is done."""
    rows = list(timed)
    with contextlib.closing(RowsFile(path, MenuTimeRow)) as file:
        file.append(rows)
        for task, batches in wanted.items():
            orders = [
                {"step": b.step, "sizes": b.sizes, "plans": b.plans, "round": i}
                for i in range(options.rounds)
                for b in batches
                if not _is_there(rows, task, b, i)
            ]
            if not orders:
                continue
            order = {"workload": task, "scale": options.scale, "seed": settings.seed}
            whole = {**order, "device": settings.device, "orders": orders}
            for said in run_child(
                __name__, whole, settings.threads, environment=HEAP_IS_KEPT
            ):
                found = [
                    MenuTimeRow(**each, **settings.provenance())
                    for each in said["runs"]
                ]
                file.append(found)
                rows += found
            progress(f"menu: times of {task}: done")
    return rows


def _is_there(
    rows: Sequence[MenuTimeRow], task: str, batch: _Timed, number: int
) -> bool:
    place = task, batch.sizes, number
    return set(batch.plans) <= {row.plan for row in rows if row.place == place}


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run each batch under all of its plans, round by round."""
    workload = workload_named(task["workload"])
    bare, planned = (_built(workload, task) for _ in range(2))
    playback = Playback()
    menu = menu_named(FINE)
    with attach(
        planned, AMPLE_BYTES, actions=menu.names, planner=playback, meter="prediction"
    ) as session:
        runner = _Runner(bare, planned, session, playback, menu)
        for order in task["orders"]:
            plans = order.pop("plans")
            place = {"workload": task["workload"], "scale": task["scale"], **order}
            generator = torch.Generator().manual_seed(task["seed"])
            sizes = json.loads(order["sizes"])
            batch = workload.batch(sizes, task["scale"], generator)
            runner.take(moved(batch, task["device"]))
            runner.meet(plans)
            random.Random(f"{sizes} {order['round']}").shuffle(plans)
            yield {"runs": [{**place, **runner.run(plan)} for plan in plans]}


def _built(workload: Workload, task: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(task["seed"])
    return workload.build(task["scale"]).to(task["device"])


class Playback:
    """A planner that has every step do what it is told beforehand."""

    name = "playback"

    def __init__(self) -> None:
        self.actions: tuple[str, ...] = ()

    def action_at(self, index: int) -> str:
        """Return the action of an event, by its position."""
        return self.actions[index]

    def plan(self, problem: PlanningProblem) -> Plan:
        """Judge what it was told."""
        choice = [problem.actions.index(action) for action in self.actions]
        return judge(problem, np.array(choice, dtype=np.intp), planner=self.name)


class _Runner:
    """Runs one batch, bare and under plans."""

    def __init__(
        self,
        bare: nn.Module,
        planned: nn.Module,
        session: Session,
        playback: Playback,
        menu: Menu,
    ) -> None:
        self._bare, self._planned = bare, planned
        self._optimizers = {
            model: torch.optim.AdamW(
                model.parameters(), lr=0.0, weight_decay=0.0, fused=True
            )
            for model in (bare, planned)
        }
        self._session, self._playback = session, playback
        self._names = {spec.code: spec.name for spec in menu.specs}
        self._batch: Mapping[str, Any] = {}
        self._expected: list[torch.Tensor] = []
        self._met: set[tuple[int, str]] = set()

    def take(self, batch: Mapping[str, Any]) -> None:
        """Take another batch, and run it once: its pages are there from now on."""
        self._batch = batch
        self._step(self._bare)
        self._expected = self._given(self._bare)

    def meet(self, plans: Sequence[str]) -> None:
        """Run plans in which a layer meets an action first: it may prepare for it."""
        for plan in plans:
            new = set(enumerate(plan)) - self._met
            if new:
                self.run(plan)
                self._met |= new

    def run(self, plan: str) -> dict[str, Any]:
        """Run the batch under a plan.

        Raises:
            RunFailedError: The session did something else.
        """
        model = self._planned if plan else self._bare
        self._playback.actions = tuple(self._names[code] for code in plan)
        gc.collect()
        seconds = self._step(model)
        self._check(plan)
        given = self._given(model)
        is_exact = len(given) == len(self._expected) and all(
            map(torch.equal, given, self._expected)
        )
        return {"plan": plan, "seconds": seconds, "is_exact": is_exact}

    def _check(self, plan: str) -> None:
        """Make sure that the last step ran as it was told.

        Records have the action that a layer was given, though it refused it.
        """
        limits = self._session.state_dict()["cost_model"]["limits"]
        ran = self._session.records[-1].actions if plan else ()
        if limits or tuple(ran) != self._playback.actions:
            msg = f"the plan {plan!r} was run otherwise: layers may run under {limits}"
            raise RunFailedError(msg)

    def _step(self, model: nn.Module) -> float:
        """Train on the batch; return the process's seconds."""
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = None
        began = time.process_time()
        self._loss = model(**self._batch).loss
        torch.autograd.backward(self._loss)
        self._optimizers[model].step()
        return time.process_time() - began

    def _given(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the last step's loss and gradients, and let go of them."""
        grads = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        return [self._loss.detach(), *(g for g in grads if g is not None)]
