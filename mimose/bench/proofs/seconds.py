"""Are the seconds that plans add predicted, and are they fewer if planned for?

A session learns from steps at budgets of all kinds. What it has learned is loaded by
two others: one plans for seconds, one for FLOPs and guessed bytes, both for the same
budget. With a bare model they train on the same batches by turns. What a plan adds is
told by the records, where it is timed call by call, and by the processor time of whole
steps beyond the bare model's.

    python -m mimose.bench.proofs seconds
    python -m mimose.bench.proofs seconds --steps 20 --models gpt2
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mimose.bench.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    rows_of,
)
from mimose.bench.proofs.loop import Loop
from mimose.bench.proofs.models import ModelSpec, by_name, names_of
from mimose.bench.proofs.numbers import percent, quantile
from mimose.bench.rows import Row
from mimose.planners import Marginal, Plan, PlanningProblem, lay_out, safest_plan
from mimose.session import Session, attach

QUESTION = "Are the seconds that plans add predicted, and fewer if planned for?"
OPTIONS = (
    count("--learn", 60, "steps to learn from"),
    count("--steps", 40, "to compare, a budget"),
)

_TEXT = {"batch": (2, 6), "length": (32, 128)}
_SPECS = by_name(
    ModelSpec(
        "bert",
        _TEXT,
        changes={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    ),
    ModelSpec(
        "gpt2",
        _TEXT,
        changes={
            "n_embd": 256,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
    ),
    ModelSpec("resnet", {"batch": (2, 6), "height": (64, 160), "width": (64, 160)}),
)
_TWO = "keep", "recompute"
_THREE = "keep", "lean", "recompute"
_MENUS = {"bert": (_THREE, _TWO), "gpt2": (_THREE,), "resnet": (_TWO,)}
_SHARES = 0.35, 0.7
"""The budgets: between the least peak and keeping everything."""
_LEARNING = 0.2, 0.5, 0.8
_ARMS = "bare", "seconds", "flops"
_MEDIAN_BAR, _P90_BAR = 0.1, 0.3
_ANY_BAR, _TWO_BAR = 1.0, 1.03
"""Seconds by seconds ÷ by FLOPs; with two actions the plans are the same but for noise,
and so is the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondsRow(Row):
    """One step of one of the three."""

    model: str
    actions: str
    """The menu."""
    budget_share: float
    arm: str
    """``bare``, or what plans are made for."""
    step: int
    sizes: str
    """As JSON."""
    plan: str
    """A letter a call."""
    is_ordinary: bool
    """Whether nothing was measured, counted or tried in the step."""
    predicted_extra_seconds: float | None
    extra_seconds: float | None
    step_seconds: float
    """Of the processor, forward and backward."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Compare, for every model and menu."""
    answer = Answer()
    task = {"learn": options.learn, "steps": options.steps}
    for name in names_of(_SPECS, settings.models):
        for menu in _MENUS[name]:
            own = rows_of(
                SecondsRow, "seconds", settings, model=name, actions=menu, **task
            )
            for share in _SHARES:
                rows = [row for row in own if row.budget_share == share]
                line, bars = _judge(rows, is_two=menu == _TWO)
                head = f"{name}, {len(menu)} actions, {share:.0%}"
                answer.add(head, rows, line, bars)
    return answer


def _judge(
    rows: Sequence[SecondsRow], *, is_two: bool
) -> tuple[Mapping[str, object], list[Bar]]:
    steps = _comparable(rows)
    extra = {arm: sum(s[arm].extra_seconds or 0.0 for s in steps) for arm in _ARMS}
    whole = {arm: sum(s[arm].step_seconds for s in steps) for arm in _ARMS}
    errors = [
        abs(row.extra_seconds / row.predicted_extra_seconds - 1.0)
        for step in steps
        for row in step.values()
        if row.extra_seconds and row.predicted_extra_seconds
    ]
    ratio = extra["seconds"] / extra["flops"] if extra["flops"] else None
    median, p90 = quantile(errors, 0.5), quantile(errors, 0.9)
    line = {
        "steps": len(steps),
        "median error": percent(median, 1),
        "p90": percent(p90, 1),
        "extra ms, by seconds": 1e3 * extra["seconds"],
        "by FLOPs": 1e3 * extra["flops"],
        "ratio": ratio,
        "whole steps: by seconds": _beyond(whole, "seconds"),
        "whole: by FLOPs": _beyond(whole, "flops"),
    }
    bars = [
        Bar("median error", median, _MEDIAN_BAR, is_share=True),
        Bar("p90 of the error", p90, _P90_BAR, is_share=True),
        Bar("by seconds ÷ by FLOPs", ratio, _TWO_BAR if is_two else _ANY_BAR),
    ]
    return line, bars


def _beyond(whole: Mapping[str, float], arm: str) -> str:
    return f"{whole[arm] / whole['bare'] - 1.0:+.1%}" if whole["bare"] else ""


def _comparable(rows: Sequence[SecondsRow]) -> list[dict[str, SecondsRow]]:
    """Return the steps, by arm, that were ordinary for all."""
    by_step: dict[int, dict[str, SecondsRow]] = {}
    for row in rows:
        by_step.setdefault(row.step, {})[row.arm] = row
    return [
        step
        for step in by_step.values()
        if len(step) == len(_ARMS) and all(row.is_ordinary for row in step.values())
    ]


# ------------------------------------------------------------------ in the child


class WithinShare:
    """Plans for a share of the way from the least peak to keeping everything.

    Args:
        shares: By turns.
    """

    name = "within a share"

    def __init__(self, *shares: float) -> None:
        self._shares = itertools.cycle(shares)
        self._planner = Marginal()

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make the plan for the next share; the problem's budget is not read."""
        everything = np.zeros(len(problem.events), dtype=np.intp)
        least = safest_plan(problem).peak_bytes
        most = lay_out(problem, everything).peak_bytes
        budget = least + next(self._shares) * max(0.0, most - least)
        return self._planner.plan(replace(problem, budget_bytes=budget))


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Learn once, then compare at each budget."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    menu = tuple(task["actions"])
    state = _learned(spec, menu, generator, task)
    for share in _SHARES:
        loops = {arm: Loop(spec.build(task["seed"])) for arm in _ARMS}
        sessions = {
            arm: attach(
                loop.model,
                AMPLE_BYTES,
                planner=WithinShare(share),
                actions=menu,
                meter=loop.meter,
                cost=arm,
            )
            for arm, loop in loops.items()
            if arm != "bare"
        }
        for session in sessions.values():
            session.load_state_dict(state)
        for step in range(task["steps"]):
            sizes = spec.draw(generator)
            batch = spec.batch(sizes, generator)
            first = step % len(_ARMS)
            for arm in (*_ARMS[first:], *_ARMS[:first]):
                yield {
                    "model": spec.model,
                    "actions": " ".join(menu),
                    "budget_share": share,
                    "arm": arm,
                    "step": step,
                    "sizes": json.dumps(sizes),
                    "step_seconds": _timed(loops[arm], batch),
                    **_told(sessions.get(arm)),
                }
        for session in sessions.values():
            session.detach()


def _learned(
    spec: ModelSpec,
    menu: Sequence[str],
    generator: torch.Generator,
    task: Mapping[str, Any],
) -> Mapping[str, Any]:
    loop = Loop(spec.build(task["seed"]))
    loop.warm_up(spec.batch(spec.longest(), generator))
    planner = WithinShare(*_LEARNING)
    how: dict[str, Any] = {"planner": planner, "actions": menu, "meter": loop.meter}
    with attach(loop.model, AMPLE_BYTES, **how) as session:
        for _ in range(task["learn"]):
            _timed(loop, spec.batch(spec.draw(generator), generator))
        return session.state_dict()


def _timed(loop: Loop, batch: Any) -> float:
    began = time.process_time()
    loop.forward_and_backward(batch)
    took = time.process_time() - began
    loop.optimizer.zero_grad(set_to_none=True)
    return took


def _told(session: Session | None) -> dict[str, Any]:
    if session is None:
        names = "predicted_extra_seconds", "extra_seconds"
        return {"plan": "", "is_ordinary": True, **dict.fromkeys(names)}
    record = session.records[-1]
    return {
        "plan": "".join(action[0] for action in record.actions),
        "is_ordinary": record.extra_seconds is not None,
        "predicted_extra_seconds": record.predicted_extra_seconds,
        "extra_seconds": record.extra_seconds,
    }
