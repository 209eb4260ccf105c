"""How far from the optimum are plans, and what do they take, with up to six actions?

Problems are drawn at random, with the proportions of measured layers (see
`benchmarks.problems`), and recorded from sessions that train the zoo's models under
random plans of a menu. Each gets a budget between its least peak and keeping
everything, and is planned by ``marginal``, three times, and by ``optimal``. Times are
of the CPU, so that other work on the machine says little.

    python -m benchmarks.proofs plangap
    python -m benchmarks.proofs plangap --problems 48 --models gpt2 --recorded 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.problems import KINDS, draw_problem, with_budget
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Measured, Settings
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mean, percent, quantile, worst
from mimose.planners import Marginal, Optimal, Plan, PlanningProblem
from mimose.planners.timeline import judge as judged
from mimose.session import attach

QUESTION = "How far from the optimum are plans, and what do they take, by actions?"
OPTIONS = (
    common.device("sim"),
    common.count("--problems", 470, "that are drawn"),
    common.count("--recorded", 6, "a model"),
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
_SIZES = ((12, 2), (24, 2), (24, 3), (24, 6), (48, 6), (100, 6))
"""Events and actions of the problems that are timed alone, for they are large."""
_TIMED = 24
"""Problems of each size."""
_ROUNDS = 3
_GAP_BAR, _MILLI_BAR = 0.01, 2.0
_STEPS = 4
"""Steps a recorded problem, at the most."""
_UNTOLD = 6
"""The first problems, which know little of what each action needs."""


class Exploring:
    """Plans by chance: with them a session learns every action in few steps.

    Args:
        seed: Of the choices.
    """

    name = "exploring"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make a plan; its budget is not read."""
        choices = [
            self._random.choice(row.nonzero()[0].tolist()) for row in problem.allowed
        ]
        return judged(problem, np.array(choices, dtype=np.intp), planner=self.name)


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Plan every problem, and judge gaps and times."""
    names = names_of(_SPECS, settings.models)
    task = {"recorded": options.recorded, "problems": options.problems}
    answer = Answer()
    for part in ("drawn", *names, *(f"{n} events, {k} actions" for n, k in _SIZES)):
        rows = common.measured("plangap", settings, part=part, **task)
        is_bar = part == "24 events, 6 actions"
        answer.add(part, rows, *judge(rows, is_timed=is_bar), head="problems")
    return answer


def judge(rows: Sequence[Measured], *, is_timed: bool = False) -> common.Verdict:
    """Judge gaps, of those that were compared, and the median time if asked to."""
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    millis = [1e3 * row["seconds"] for row in rows]
    line = {
        "of them": len(rows),
        "gap mean": percent(mean(gaps), 3),
        "gap max": percent(worst(gaps)),
        "over 1%": sum(gap > _GAP_BAR for gap in gaps),
        "proved": sum(row["is_proved"] for row in rows),
        "says optimal": sum(row["says_optimal"] for row in rows),
        "ms p50": quantile(millis, 0.5),
        "ms p99": quantile(millis, 0.99),
    }
    bars = [Bar("largest gap", worst(gaps), _GAP_BAR, is_share=True)] if gaps else []
    if is_timed:
        bars.append(Bar("ms of CPU for a plan, median", line["ms p50"], _MILLI_BAR))
    return line, bars


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Plan drawn problems, those of a model, or large ones without the optimum."""
    part = task["part"]
    if part == "drawn":
        cases = _drawn(task["seed"], task["problems"])
    elif part in _SPECS:
        cases = _recorded(task)
    else:
        cases = _drawn(task["seed"], _TIMED, *map(int, part.split()[::2]))
    for case, problem in cases:
        planned = _planned(problem, is_compared=part == "drawn" or part in _SPECS)
        yield {"part": part, **case, **planned}


def _planned(problem: PlanningProblem, *, is_compared: bool) -> dict[str, Any]:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        plan = Marginal().plan(problem)
        seconds.append(time.process_time() - began)
    best = Optimal().plan(problem) if is_compared else None
    return {
        "events": len(problem.events),
        "actions": len(problem.actions),
        "cost": plan.extra_cost,
        "optimum_cost": best and best.extra_cost,
        "gap": best and _gap(plan, best),
        "says_optimal": plan.optimal,
        "is_proved": best is not None and best.optimal,
        "seconds": statistics.median(seconds),
    }


def _gap(plan: Plan, best: Plan) -> float:
    """Return by what part a plan costs more than the optimum."""
    more = plan.extra_cost - best.extra_cost
    return more / best.extra_cost if best.extra_cost else float(more > 0)


def _drawn(
    seed: int, n_problems: int, n_events: int = 0, n_actions: int = 6
) -> Iterator[tuple[dict[str, Any], PlanningProblem]]:
    """Draw problems of every kind in turn; of 6 to 32 events if no number is given."""
    rng = np.random.default_rng(seed)
    for index in range(n_problems):
        turn, kind = divmod(index, len(KINDS))
        problem = draw_problem(
            rng,
            KINDS[kind],
            n_events or int(rng.integers(6, 33)),
            n_actions=n_actions,
            jitter=_JITTERS[turn % len(_JITTERS)],
            nets_by_action=rng.random() < 0.5,
            masked=bool(turn // len(_JITTERS) % 2),
        )
        share = float(rng.choice(_SHARES))
        told = {"kind": KINDS[kind], "share": share}
        yield told, with_budget(problem, share)


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


def _recorded(
    task: Mapping[str, Any],
) -> Iterator[tuple[dict[str, Any], PlanningProblem]]:
    """Train under random plans; return the last of the problems, which know most.

    Raises:
        RuntimeError: Too few plans were made.
    """
    spec, most = _SPECS[task["part"]], task["recorded"]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"], task["device"]))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    planner = Recording(task["seed"])
    attached = partial(attach, planner=planner, meter=loop.meter, actions=_MENU)
    with attached(loop.model, common.AMPLE_BYTES):
        for _ in range(_STEPS * most + 20):
            loop.step(spec.batch(spec.draw(generator), generator))
            if len(planner.problems) >= most + _UNTOLD:
                break
    if len(planner.problems) < most:
        msg = f"{spec.model}: only {len(planner.problems)} plans were made, not {most}"
        raise RuntimeError(msg)
    for index, problem in enumerate(planner.problems[-most:]):
        share = _SHARES[index % len(_SHARES)]
        alone = replace(problem, budget_bytes=0.0, host_budget_bytes=0.0)
        yield {"kind": "recorded", "share": share}, with_budget(alone, share)
