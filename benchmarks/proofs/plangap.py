"""How far from the optimum are plans, and what do they take, with up to six actions?

Problems are drawn at random, with the proportions of measured layers (see
`benchmarks.problems`), and recorded from sessions that train the zoo's models under
random plans of a menu. Each gets a budget between its least peak and keeping
everything, and is planned by ``marginal`` and by ``optimal``. Then ``marginal`` alone
is timed, by numbers of events and of actions, in rounds that go through all problems:
the least and the median of its CPU time, so that other work on the machine says little.

    python -m benchmarks.proofs plangap
    python -m benchmarks.proofs plangap --problems 48 --models gpt2 --rounds 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.problems import KINDS, draw_problem, with_budget
from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    device,
    progress,
    said_by,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mean, percent, quantile, worst
from mimose.bench.exploring import Exploring
from mimose.bench.rows import Row
from mimose.planners import Marginal, Optimal, Plan, PlanningProblem
from mimose.session import attach

QUESTION = "How far from the optimum are plans, and what do they take, by actions?"
OPTIONS = (
    device("sim"),
    count("--problems", 470, "that are drawn"),
    count("--recorded", 6, "a model"),
    count("--rounds", 3, "that are timed"),
)

_MENU = ("keep", "lean", "recompute")
"""What sessions run under, in which problems are recorded."""
_SPECS = by_name(
    ModelSpec("bert", {"batch": (2, 4), "length": (96, 200)}),
    ModelSpec("gpt2", {"batch": (2, 4), "length": (96, 200)}),
    ModelSpec("t5", {"batch": (2, 4), "source": (64, 128), "target": (48, 96)}),
    ModelSpec(
        "vit", {"batch": (1, 3), "height": (96, 192), "width": (96, 192)}, multiple=16
    ),
    ModelSpec(
        "resnet",
        {"batch": (1, 3), "height": (64, 128), "width": (64, 128)},
        multiple=32,
    ),
)
_SHARES = (0.0, 0.001, 0.02, 0.1, 0.25, 0.35, 0.5, 0.7, 0.9)
_JITTERS = (0.0, 0.02, 0.1)
_EVENTS, _ACTIONS = (12, 24, 48, 100), (2, 3, 6)
_TIMED = 24
"""Problems a number of events and of actions."""
_GAP_BAR, _MILLI_BAR, _BAR_AT = 0.01, 2.0, (24, 6)
_MILLI = 1000
_STEPS = 4
"""Steps a recorded problem, at the most."""
_UNTOLD = 6
"""The first problems, which know little of what each action needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGapRow(Row):
    """One problem."""

    part: str
    """``"drawn"``, a model's name, or ``"timed"``."""
    kind: str
    """What was drawn; empty for a recorded problem."""
    events: int
    actions: int
    jitter: float
    """By how much like layers differ."""
    masked: bool
    """Whether units do without some actions."""
    nets_differ: bool
    """Whether what a backward leaves depends on the action."""
    share: float
    """Of the way from the least peak to keeping everything, for the budget."""
    cost: float
    optimum_cost: float | None
    """None where only time was asked for."""
    says_optimal: bool
    is_proved: bool
    """Whether the optimum is."""
    least_seconds: float
    """Of the planner's CPU time, over the rounds."""
    median_seconds: float
    optimum_seconds: float | None

    @property
    def gap(self) -> float:
        """By what part the plan costs more than the optimum."""
        assert self.optimum_cost is not None
        more = self.cost - self.optimum_cost
        return more / self.optimum_cost if self.optimum_cost else float(more > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A problem with its budget, and what rows say of it."""

    problem: PlanningProblem
    told: Mapping[str, Any]


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Plan every problem, and judge gaps and times."""
    names = names_of(_SPECS, settings.models)
    answer = Answer()
    cases = list(_drawn(settings.seed, options.problems))
    for name in names:
        cases += _recorded(settings, name, options.recorded)
        progress(f"plangap: {name} recorded")
    compared = _rows(cases, settings, options.rounds, compare=True)
    timed = _rows(_timed(settings.seed), settings, options.rounds, compare=False)
    answer.rows += [*compared, *timed]
    for part in ("drawn", *names):
        answer.table.append(_gaps(part, [row for row in compared if row.part == part]))
    answer.table += [
        _times(timed, n_events, n_actions)
        for n_events in _EVENTS
        for n_actions in _ACTIONS
    ]
    proved = sum(row.is_proved for row in compared)
    answer.notes.append(f"optima proved: {proved} of {len(compared)}")
    at_bar = [row.median_seconds for row in timed if _size(row) == _BAR_AT]
    answer.bars = [
        Bar("largest gap", worst(r.gap for r in compared), _GAP_BAR, is_share=True),
        Bar(
            "ms of CPU for a plan of 24 events and 6 actions, median",
            _MILLI * statistics.median(at_bar),
            _MILLI_BAR,
        ),
    ]
    return answer


def _size(row: PlanGapRow) -> tuple[int, int]:
    return row.events, row.actions


def _gaps(part: str, rows: Sequence[PlanGapRow]) -> dict[str, object]:
    gaps = [row.gap for row in rows]
    return {
        "problems": part,
        "of them": len(rows),
        "gap mean": percent(mean(gaps), 3),
        "gap p99": percent(quantile(gaps, 0.99)),
        "gap max": percent(worst(gaps)),
        "over 1%": sum(gap > _GAP_BAR for gap in gaps),
        "says optimal": sum(row.says_optimal for row in rows),
        "ms p50": _MILLI * (quantile((r.median_seconds for r in rows), 0.5) or 0.0),
        "ms p99": _MILLI * (quantile((r.median_seconds for r in rows), 0.99) or 0.0),
    }


def _times(
    rows: Iterable[PlanGapRow], n_events: int, n_actions: int
) -> dict[str, object]:
    own = [row for row in rows if _size(row) == (n_events, n_actions)]
    least = [row.least_seconds for row in own]
    median = [row.median_seconds for row in own]
    return {
        "problems": f"{n_events} events, {n_actions} actions",
        "of them": len(own),
        "says optimal": sum(row.says_optimal for row in own),
        "least ms p50": _MILLI * statistics.median(least),
        "ms p50": _MILLI * statistics.median(median),
        "ms p90": _MILLI * (quantile(median, 0.9) or 0.0),
        "ms p99": _MILLI * (quantile(median, 0.99) or 0.0),
    }


def _rows(
    cases: Iterable[Case], settings: Settings, rounds: int, *, compare: bool
) -> list[PlanGapRow]:
    """Plan each problem; time takes turns, so that all meet the same machine."""
    listed = list(cases)
    planner = Marginal()
    times: list[list[float]] = [[] for _ in listed]
    plans: list[Plan] = []
    for _ in range(rounds):
        plans = []
        for case, own in zip(listed, times, strict=True):
            began = time.process_time()
            plans.append(planner.plan(case.problem))
            own.append(time.process_time() - began)
    rows = []
    for case, own, plan in zip(listed, times, plans, strict=True):
        found = _optimum(case.problem) if compare else _NOT_ASKED
        rows.append(
            PlanGapRow(
                **case.told,
                **found,
                events=len(case.problem.events),
                actions=len(case.problem.actions),
                nets_differ=_nets_differ(case.problem),
                cost=plan.extra_cost,
                says_optimal=plan.optimal,
                least_seconds=min(own),
                median_seconds=statistics.median(own),
                **settings.provenance(),
            )
        )
        if compare and len(rows) % 100 == 0:
            progress(f"plangap: {len(rows)} problems")
    return rows


_NOT_ASKED: Mapping[str, Any] = {
    "optimum_cost": None,
    "is_proved": False,
    "optimum_seconds": None,
}


def _optimum(problem: PlanningProblem) -> Mapping[str, Any]:
    began = time.process_time()
    plan = Optimal().plan(problem)
    return {
        "optimum_cost": plan.extra_cost,
        "is_proved": plan.optimal,
        "optimum_seconds": time.process_time() - began,
    }


def _nets_differ(problem: PlanningProblem) -> bool:
    nets = np.where(problem.allowed, problem.backward_net_bytes, -np.inf)
    least = np.where(problem.allowed, problem.backward_net_bytes, np.inf).min(axis=1)
    return bool((nets.max(axis=1) > least).any())


def _drawn(seed: int, n_problems: int) -> Iterator[Case]:
    """Draw problems of six actions, of every kind in turn."""
    rng = np.random.default_rng(seed)
    for index in range(n_problems):
        yield _case(rng, "drawn", index, int(rng.integers(6, 33)), 6)


def _timed(seed: int) -> Iterator[Case]:
    """Draw problems of each number of events and of actions."""
    for n_events in _EVENTS:
        for n_actions in _ACTIONS:
            rng = np.random.default_rng(seed)
            for index in range(_TIMED):
                yield _case(rng, "timed", index, n_events, n_actions)


def _case(
    rng: np.random.Generator, part: str, index: int, n_events: int, n_actions: int
) -> Case:
    kind = KINDS[index % len(KINDS)]
    turn = index // len(KINDS)
    jitter = _JITTERS[turn % len(_JITTERS)]
    masked = bool(turn // len(_JITTERS) % 2)
    problem = draw_problem(
        rng,
        kind,
        n_events,
        n_actions=n_actions,
        jitter=jitter,
        nets_by_action=rng.random() < 0.5,
        masked=masked,
    )
    share = float(rng.choice(_SHARES))
    told = {
        "part": part,
        "kind": kind,
        "jitter": jitter,
        "masked": masked,
        "share": share,
    }
    return Case(problem=with_budget(problem, share), told=told)


def _recorded(settings: Settings, name: str, n_problems: int) -> Iterator[Case]:
    """Train a model, and take the problems its plans were made for."""
    said = said_by("plangap", settings, model=name, problems=n_problems)
    for index, fields in enumerate(said):
        share = _SHARES[index % len(_SHARES)]
        told = {"part": name, "kind": "", "jitter": 0.0, "masked": False}
        problem = with_budget(PlanningProblem(**_arrays(fields)), share)
        yield Case(problem=problem, told={**told, "share": share})


def _arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Make a problem's fields of what JSON carried."""
    names = ("events", "actions")
    made = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in names
    }
    return {**made, **{name: tuple(fields[name]) for name in names}}


# ------------------------------------------------------------------ in the child


class Recording(Exploring):
    """Makes random plans, which show every action, and keeps the problems."""

    name = "recording"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.problems: list[PlanningProblem] = []
        """In the order in which they came."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make a plan; its budget is not read."""
        self.problems.append(problem)
        return super().plan(problem)


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train under random plans; tell the last of the problems, which know most."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"], task["device"]))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    planner = Recording(task["seed"])
    most = task["problems"]
    with attach(
        loop.model, AMPLE_BYTES, planner=planner, meter=loop.meter, actions=_MENU
    ):
        for _ in range(_STEPS * most + 20):
            loop.step(spec.batch(spec.draw(generator), generator))
            if len(planner.problems) >= most + _UNTOLD:
                break
    if len(planner.problems) < most:
        msg = f"{spec.model}: only {len(planner.problems)} plans were made, not {most}"
        raise RuntimeError(msg)
    for problem in planner.problems[-most:]:
        yield _fields(replace(problem, budget_bytes=0.0, host_budget_bytes=0.0))


def _fields(problem: PlanningProblem) -> dict[str, Any]:
    """Return a problem's fields as JSON carries them."""
    fields = {name: getattr(problem, name) for name in PlanningProblem.__slots__}
    del fields["lossy"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
