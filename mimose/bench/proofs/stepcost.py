"""What does a step cost beyond its plan's own recomputation, on a cache hit?

Twenty-four blocks of a few microseconds are trained under the library and, by turns,
without: bare where the plan keeps, and with `torch.utils.checkpoint` called by hand
on the same blocks where it recomputes. The medians' difference is what the library
costs.

    python -m mimose.bench.proofs stepcost
    python -m mimose.bench.proofs stepcost --rounds 10
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from mimose.bench.grid.docstrings import DOCSTRINGS, OURS
from mimose.bench.proofs import blocks
from mimose.bench.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    said_by,
)
from mimose.bench.proofs.numbers import percent, quantile
from mimose.bench.rows import Row
from mimose.measure.meters import ProcessMeter
from mimose.session import Session, attach

QUESTION = "What does a step cost on a cache hit, beyond checkpoint's own price?"
OPTIONS = (count("--rounds", 60, "of each plan"), count("--steps", 50, "a round"))

_N_BLOCKS = 24
_WIDTH = 16
_PLANS: Mapping[str, tuple[int, ...]] = {
    "keep all": (0,) * _N_BLOCKS,
    "half": (1, 0) * (_N_BLOCKS // 2),
    "recompute all": (1,) * _N_BLOCKS,
}
_THREADS = 1
"""Such small products gain nothing from a second thread, and waiting for one is noise.
"""
_WARM_UP_STEPS = 40
_STEP_BAR, _EVENT_BAR = 20e-6, 0.5e-6
_MICRO = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRow(Row):
    """A round of steps under the library, and one without: seconds a step."""

    plan: str
    round: int
    events: int
    attached_seconds: float
    bare_seconds: float
    """Recomputed blocks checkpointed by hand."""
    decide_seconds: float
    """Of the attached: from the root's entry to the plan, median of the round."""
    meter_seconds: float
    """The meter's readings and resets of a step, by themselves."""
    random_state_seconds: float
    """A copy of the random state, by itself."""
    demo_seconds: float
    """A bare step of the demonstration on a batch of median length."""

    @property
    def cost_seconds(self) -> float:
        """What the library costs a step."""
        return self.attached_seconds - self.bare_seconds


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Time every plan."""
    (demo,) = said_by("stepcost", settings, part="demo")
    rows = [
        RoundRow(**said, **demo, **settings.provenance())
        for said in said_by(
            "stepcost",
            replace(settings, threads=_THREADS),
            part="time",
            rounds=options.rounds,
            steps=options.steps,
        )
    ]
    table = [_summarise(name, [r for r in rows if r.plan == name]) for name in _PLANS]
    bars = [_bar(name, rows) for name in _PLANS]
    return Answer(rows=[*rows], table=[*table], bars=bars)


def _median(rows: Sequence[RoundRow], what: Callable[[RoundRow], float]) -> float:
    return statistics.median(map(what, rows))


def _cost(rows: Sequence[RoundRow]) -> float:
    attached = _median(rows, lambda row: row.attached_seconds)
    return attached - _median(rows, lambda row: row.bare_seconds)


def _summarise(name: str, rows: Sequence[RoundRow]) -> dict[str, object]:
    cost = _cost(rows)
    demo = rows[0].demo_seconds
    return {
        "plan": name,
        "rounds": len(rows),
        "bare µs": _MICRO * _median(rows, lambda row: row.bare_seconds),
        "attached µs": _MICRO * _median(rows, lambda row: row.attached_seconds),
        "cost µs": _MICRO * cost,
        "p90 of rounds µs": _MICRO
        * (quantile((row.cost_seconds for row in rows), 0.9) or 0.0),
        "to decide µs": _MICRO * _median(rows, lambda row: row.decide_seconds),
        "meter µs": _MICRO * _median(rows, lambda row: row.meter_seconds),
        "random state µs": _MICRO * _median(rows, lambda row: row.random_state_seconds),
        "demo step ms": 1000 * demo,
        "of a demo step": percent(cost / demo, 3),
    }


def _bar(name: str, rows: Sequence[RoundRow]) -> Bar:
    cost = _cost([row for row in rows if row.plan == name])
    allowed = _STEP_BAR + _EVENT_BAR * _N_BLOCKS
    return Bar(f"{name}: cost in µs", _MICRO * cost, _MICRO * allowed)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Time the plans, or one step of the demonstration."""
    torch.manual_seed(task["seed"])
    if task["part"] == "demo":
        yield {"demo_seconds": _demo_seconds(task["seed"])}
        return
    model = blocks.Blocks(_N_BLOCKS, _WIDTH)
    bare = copy.deepcopy(model)
    planner = blocks.Told()
    with attach(model, AMPLE_BYTES, planner=planner) as session:
        _warm_up(model, session)
        for number, (name, choice) in enumerate(_PLANS.items()):
            planner.choice = choice
            states = torch.rand(
                5 + number, _WIDTH
            )  # a shape, and so a plan, of its own
            both = Pair(session, model, bare, states, choice)
            for index in range(task["rounds"]):
                yield {
                    "plan": name,
                    "round": index,
                    "events": _N_BLOCKS,
                    **both.time(task["steps"]),
                }


def _warm_up(model: blocks.Blocks, session: Session) -> None:
    """Train on other shapes until plans come."""
    for step in range(_WARM_UP_STEPS):
        rows = (4, 8, 12, 16)[step % 4]
        model(torch.rand(rows, _WIDTH)).loss.backward()
        model.zero_grad(set_to_none=True)
    assert session.records[-1].phase == "plan", session.records[-1].reason


class Pair:
    """A model under the library and its twin without, on one batch and plan."""

    def __init__(
        self,
        session: Session,
        model: blocks.Blocks,
        bare: blocks.Blocks,
        states: torch.Tensor,
        choice: Sequence[int],
    ) -> None:
        self._session = session
        self._model = model
        self._bare = bare
        self._states = states
        self._choice = choice
        self._meter = ProcessMeter()
        for _ in range(10):
            self._attached_step()
            self._bare_step()
        record = session.records[-1]
        recomputed = record.actions.count("recompute")
        assert record.cache_hit and recomputed == sum(choice), record

    def time(self, steps: int) -> dict[str, float]:
        """Time a round of each."""
        bare = _seconds_a_call(self._bare_step, steps)
        attached = _seconds_a_call(self._attached_step, steps)
        records = list(self._session.records)[-steps:]
        return {
            "attached_seconds": attached,
            "bare_seconds": bare,
            "decide_seconds": statistics.median(r.plan_seconds for r in records),
            "meter_seconds": _seconds_a_call(self._read_meter, steps),
            "random_state_seconds": _seconds_a_call(torch.get_rng_state, steps),
        }

    def _attached_step(self) -> None:
        self._model(self._states).loss.backward()
        self._model.zero_grad(set_to_none=True)

    def _bare_step(self) -> None:
        states = self._states
        for block, is_recomputed in zip(self._bare.blocks, self._choice, strict=True):
            if is_recomputed:
                states = checkpoint(block, states, use_reentrant=False)
            else:
                states = block(states)
        states.sum().backward()  # type: ignore[no-untyped-call]
        self._bare.zero_grad(set_to_none=True)

    def _read_meter(self) -> None:
        """Read what a step reads: twice the peak, once what is held; one reset."""
        self._meter.peak_bytes()
        self._meter.live_bytes()
        self._meter.reset_peak()
        self._meter.peak_bytes()


def _seconds_a_call(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _demo_seconds(seed: int) -> float:
    """Time bare steps of the demonstration on a batch of median length."""
    ProcessMeter()  # for its thresholds
    model = DOCSTRINGS.build("tiny")
    sizes = OURS.trace(np.random.default_rng(seed), 51)
    middle = sorted(sizes, key=lambda each: each["length"])[len(sizes) // 2]
    batch = OURS.batch(middle, "tiny", torch.Generator().manual_seed(seed))

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    return statistics.median(_seconds_a_call(step, 1) for _ in range(7))
