"""What does a step cost beyond its plan's own recomputation, on a cache hit?

Twenty-four blocks of a few microseconds are trained under the library and, by turns,
without: bare where the plan keeps, and with `torch.utils.checkpoint` called by hand
on the same blocks where it recomputes. The medians' difference is what the library
costs; the calls of functions beyond those of the bare step tell it on a busy machine.

    python -m benchmarks.proofs stepcost
    python -m benchmarks.proofs stepcost --rounds 10
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import blocks
from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    rows_of,
    said_by,
)
from benchmarks.proofs.numbers import percent, quantile
from mimose.bench.grid.workloads import DOCSTRINGS, OURS
from mimose.bench.rows import Row
from mimose.bench.zoo import Output
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
_STEP_MICROS, _RECOMPUTED_MICROS = 40, 3
"""The bar for a step, and for each layer that it recomputes."""
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
    attached_calls: int
    """Of functions, Python's and others, in a step."""
    bare_calls: int
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
    task = {"rounds": options.rounds, "steps": options.steps, "part": "time", **demo}
    alone = replace(settings, threads=_THREADS)
    rows = rows_of(RoundRow, "stepcost", alone, **task)
    answer = Answer()
    for name in _PLANS:
        own = [row for row in rows if row.plan == name]
        line = _summarise(own)
        most = _STEP_MICROS + _RECOMPUTED_MICROS * sum(_PLANS[name])
        bar = Bar("cost in µs", line["cost µs"], most)
        answer.add(name, own, line, [bar], head="plan")
    return answer


def _micros(rows: Sequence[RoundRow], column: str) -> float:
    return _MICRO * float(statistics.median(getattr(row, column) for row in rows))


def _summarise(rows: Sequence[RoundRow]) -> dict[str, Any]:
    bare, attached = _micros(rows, "bare_seconds"), _micros(rows, "attached_seconds")
    demo = _MICRO * rows[0].demo_seconds
    costs = (_MICRO * row.cost_seconds for row in rows)
    return {
        "rounds": len(rows),
        "bare µs": bare,
        "attached µs": attached,
        "cost µs": attached - bare,
        "p90 of rounds µs": quantile(costs, 0.9),
        "calls": rows[0].attached_calls - rows[0].bare_calls,
        "to decide µs": _micros(rows, "decide_seconds"),
        "meter µs": _micros(rows, "meter_seconds"),
        "random state µs": _micros(rows, "random_state_seconds"),
        "demo step ms": demo / 1000,
        "of a demo step": percent((attached - bare) / demo, 3),
    }


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Time the plans, or one step of the demonstration."""
    torch.manual_seed(task["seed"])
    if task["part"] == "demo":
        yield {"demo_seconds": _demo_seconds(task["seed"])}
        return
    demo = {"demo_seconds": task["demo_seconds"]}
    model = blocks.Blocks(_N_BLOCKS, _WIDTH)
    bare = ByHand(_N_BLOCKS, _WIDTH)
    bare.load_state_dict(model.state_dict())
    planner = blocks.Told()
    with attach(model, AMPLE_BYTES, planner=planner) as session:
        _warm_up(model, session)
        for number, (name, choice) in enumerate(_PLANS.items()):
            planner.choice = choice
            # A shape, and so a plan, of its own
            states = torch.rand(5 + number, _WIDTH)
            both = Pair(session, model, bare, states, choice)
            for index in range(task["rounds"]):
                said = {"plan": name, "round": index, "events": _N_BLOCKS, **demo}
                yield {**said, **both.calls, **both.time(task["steps"])}


def _warm_up(model: blocks.Blocks, session: Session) -> None:
    """Train on other shapes until plans come."""
    for step in range(_WARM_UP_STEPS):
        rows = (4, 8, 12, 16)[step % 4]
        model(torch.rand(rows, _WIDTH)).loss.backward()
        model.zero_grad(set_to_none=True)
    assert session.records[-1].phase == "plan", session.records[-1].reason


class ByHand(blocks.Blocks):
    """Blocks, of which a loop of the user's checkpoints some."""

    choice: Sequence[int] = ()

    def forward(self, states: torch.Tensor) -> Output:
        """Map (rows, width) to a loss."""
        for block, is_recomputed in zip(self.blocks, self.choice, strict=True):
            if is_recomputed:
                states = checkpoint(block, states, use_reentrant=False)
            else:
                states = block(states)
        return Output(loss=states.sum())


class Pair:
    """A model under the library and its twin without, on one batch and plan."""

    def __init__(
        self,
        session: Session,
        model: blocks.Blocks,
        bare: ByHand,
        states: torch.Tensor,
        choice: Sequence[int],
    ) -> None:
        self._session = session
        self._model = model
        self._bare = bare
        self._bare.choice = choice
        self._states = states
        self._meter = ProcessMeter()
        for _ in range(10):
            self._attached_step()
            self._bare_step()
        record = session.records[-1]
        recomputed = record.actions.count("recompute")
        assert record.cache_hit and recomputed == sum(choice), record
        self.calls = {
            "attached_calls": _calls(self._attached_step),
            "bare_calls": _calls(self._bare_step),
        }

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
        self._bare(self._states).loss.backward()
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


def _calls(step: Callable[[], object]) -> int:
    """Count the functions that a step calls in this thread."""
    n_calls = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal n_calls
        del frame
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return n_calls


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
