"""Are steps of several forwards, or several backwards, planned as others are?

Each pattern trains small layers twice from the same weights and random state: bare, and
within a budget that leaves half of what keeping everything makes the longest batch grow
by, or a twentieth over the growth of recomputing everything where that is more. The
budget is of the bytes that tensors hold: what the allocator reserves for such small
steps says little. After each backward the planning problem of the whole window, at its
exact sizes and with the bytes held when it began, is solved exactly, with no margin
taken off: the oracle.

    python -m benchmarks.proofs windows
    python -m benchmarks.proofs windows --cases simcse gan --steps 24
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    device,
    recorded,
    rows_of,
)
from benchmarks.proofs.loop import differing
from benchmarks.proofs.numbers import mebibytes, percent, worst
from benchmarks.proofs.settings.apart import apart
from benchmarks.proofs.settings.case import Training, World
from benchmarks.proofs.window_patterns import PATTERNS, lengths_of
from mimose.bench.device import SIM, kind_of
from mimose.bench.rows import Row
from mimose.measure.meters import AllocatorMeter, Meter
from mimose.planners import InfeasibleBudgetError, Optimal
from mimose.session import Session, attach

QUESTION = "Are steps of several forwards, or several backwards, planned as others are?"
OPTIONS = (
    device("sim"),
    count("--steps", 60, "a pattern"),
    ("--cases", {"nargs": "+", "choices": sorted(PATTERNS), "default": [*PATTERNS]}),
)

_SHARE, _OVER_LEAST = 0.5, 1.05
_PLANNED_BAR, _ERROR_BAR, _ORACLE_BAR = 0.8, 0.05, 1.25
_GROWTHS = ("predicted_growth_bytes", "observed_growth_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRow(Row):
    """One forward."""

    case: str
    batch: int
    """Which of the loop's steps."""
    length: int
    step: int
    """Counts the root's forwards."""
    phase: str
    recomputed: int
    actions: int
    budget_bytes: int
    least_bytes: int
    """The peak of the longest batch's step with everything recomputed."""
    most_bytes: int
    """And with everything kept."""
    start_bytes: int
    predicted_growth_bytes: float | None
    observed_growth_bytes: int | None
    peak_bytes: int | None
    recomputed_flops: int
    oracle_flops: float | None
    """What the best plan of the whole window recomputes, where this is its last forward
    and it was planned."""
    window_flops: int | None
    """What was recomputed in that window."""
    reason: str
    is_equal: bool
    """Whether the whole run's losses, gradients and weights are the bare model's."""

    @property
    def is_over(self) -> bool:
        """Whether the budget was passed."""
        return (self.peak_bytes or 0) > self.budget_bytes


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every pattern."""
    answer = Answer()
    for name in options.cases:
        task = {"case": name, "steps": options.steps}
        rows = rows_of(WindowRow, "windows", settings, **task)
        line, bars = _summarise(rows)
        answer.add(name, rows, line, bars, head="pattern")
    return answer


def _summarise(rows: Sequence[WindowRow]) -> tuple[dict[str, object], list[Bar]]:
    later = rows[len(rows) // 2 :]
    planned = [row for row in later if row.phase == "plan"]
    told = [row for row in later if row.oracle_flops is not None]
    oracle = sum(row.oracle_flops or 0.0 for row in told)
    mine = sum(row.window_flops or 0 for row in told)
    ratio = mine / oracle if oracle else None
    errors = [
        row.observed_growth_bytes / row.predicted_growth_bytes - 1.0
        for row in planned
        if row.predicted_growth_bytes and row.observed_growth_bytes
    ]
    last = rows[-1]
    share = len(planned) / len(later)
    over = sum(row.is_over for row in rows)
    calls = sum(row.actions for row in later)
    line = {
        "forwards": len(rows),
        "budget MiB": mebibytes(last.budget_bytes),
        "least": mebibytes(last.least_bytes),
        "most": mebibytes(last.most_bytes),
        "over": over,
        "equal": "yes" if last.is_equal else "NO",
        "first plan": next((r.step for r in rows if r.phase == "plan"), None),
        "planned, later half": percent(share, 0),
        "recomputed there": percent(sum(r.recomputed for r in later) / calls, 0),
        "÷ oracle": ratio,
        "worst error": percent(worst(errors), 1),
        "phases": json.dumps(Counter(row.phase for row in rows)),
    }
    bars = [
        Bar("forwards over the budget", over, at_most=0),
        Bar("results differ", int(not last.is_equal), at_most=0),
        Bar("planned, later half", share, at_least=_PLANNED_BAR, is_share=True),
    ]
    if ratio is not None:
        bars.append(Bar("recomputed FLOPs ÷ the oracle's", ratio, _ORACLE_BAR))
    return line, bars


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one pattern: what it needs, bare, and within a budget."""
    if kind_of(task["device"]) in ("cpu", SIM):
        yield from apart(partial(_run, task))
    else:
        yield from _run(task)


def _run(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    run = _Run(task)
    least, most, rest = run.needs()
    growth = max(_SHARE * (most - rest), _OVER_LEAST * (least - rest))
    budget = rest + int(growth)
    mine = run.within(budget)
    is_equal = not differing(run.bare(), mine)
    told = {"budget_bytes": budget, "least_bytes": least, "most_bytes": most}
    return [{**row, **told, "is_equal": is_equal} for row in run.rows]


class _Held(Meter):
    """What tensors hold of a device, exactly; the budget is of that."""

    noise_bytes = 0.0

    def __init__(self, device: torch.device) -> None:
        self._own = AllocatorMeter(device)

    def live_bytes(self) -> int:
        """Return the bytes held now."""
        return self._own.live_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes held since the last reset."""
        return self._own.peak_bytes()

    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""
        self._own.reset_peak()

    def total_bytes(self) -> int | None:
        """Return the device's memory."""
        return self._own.total_bytes()


class _Watched(World):
    """Is told of each backward's end."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(device, seed)
        self.on_backward: Any = None

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
        """Step and forget the gradients."""
        if self.on_backward is not None:
            self.on_backward()
        return super().apply(optimizer, loss)


class _Run:
    """One pattern's runs."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._pattern = PATTERNS[task["case"]]
        self.rows: list[dict[str, Any]] = []

    def _build(self) -> tuple[_Watched, Training]:
        gc.collect()
        torch.manual_seed(self._task["seed"])
        world = _Watched(self._task["device"], self._task["seed"] + 1)
        training = self._pattern.build(world)
        for module in training.roots:
            module.train()
        torch.manual_seed(self._task["seed"] + 2)
        return world, training

    def _attached(self, training: Training, budget: int, **options: Any) -> Session:
        meter = _Held(torch.device(self._task["device"]))
        return attach(training.roots[0], budget, meter=meter, **options)

    def _lengths(self, training: Training) -> Iterator[int]:
        return lengths_of(training, self._task["steps"], self._task["seed"] + 3)

    def needs(self) -> tuple[int, int, int]:
        """Return the longest batch's least and highest peak, and its start."""
        found = []
        for planner in ("full", "none"):
            _, training = self._build()
            with self._attached(training, AMPLE_BYTES, planner=planner) as session:
                for _ in range(2):
                    training.step(training.lengths[1])
            records = list(session.records)[len(session.records) // 2 :]
            found.append(max(record.observed_peak_bytes or 0 for record in records))
            rest = records[0].start_bytes
            del training, session
            self._forget()
        return found[0], found[1], rest

    def _forget(self) -> None:
        gc.collect()
        if self._task["device"] != "cpu":
            torch.get_device_module(self._task["device"]).empty_cache()

    def bare(self) -> dict[str, Tensor]:
        """Train without mimose; return all that comes of it."""
        world, training = self._build()
        losses = [training.step(length).cpu() for length in self._lengths(training)]
        return _all(world, training, losses)

    def within(self, budget_bytes: int) -> dict[str, Tensor]:
        """Train within a budget, and note each forward."""
        world, training = self._build()
        losses = []
        with self._attached(training, budget_bytes) as session:
            for batch, length in enumerate(self._lengths(training)):
                world.on_backward = partial(self._note, session, batch, length)
                losses.append(training.step(length).cpu())
                self._note(session, batch, length)
            self.rows = [
                {**row, **_said(session.records[row["step"]])} for row in self.rows
            ]
            result = _all(world, training, losses)
        return result

    def _note(self, session: Session, batch: int, length: int) -> None:
        records = list(session.records)[len(self.rows) :]
        if not records:
            return
        oracle = _oracle(session, records[-1])
        if oracle is not None:
            oracle *= self._pattern.n_backwards
        flops = sum(record.recomputed_flops for record in records)
        for record in records:
            is_last = record is records[-1] and oracle is not None
            self.rows.append(
                {
                    "case": self._task["case"],
                    "batch": batch,
                    "length": length,
                    "step": record.step,
                    "oracle_flops": oracle if is_last else None,
                    "window_flops": flops if is_last else None,
                }
            )


def _said(record: Any) -> dict[str, Any]:
    names = ("phase", "recomputed", "actions", "start_bytes", *_GROWTHS)
    said = recorded(record, *names, "recomputed_flops", "reason")
    return {**said, "peak_bytes": record.observed_peak_bytes}


def _oracle(session: Session, record: Any) -> float | None:
    """Return what the best plan of the window that has just ended recomputes."""
    if record.predicted_growth_bytes is None or record.phase != "plan":
        return None
    now = session.planning_problem()
    start = float(record.start_bytes)
    headroom = now.budget_bytes - now.start_bytes
    problem = replace(now, start_bytes=start, budget_bytes=start + headroom)
    try:
        return float(Optimal().plan(problem).extra_cost)
    except InfeasibleBudgetError:
        return None


def _all(
    world: World, training: Training, losses: Sequence[Tensor]
) -> dict[str, Tensor]:
    return {
        **{f"loss {step}": loss for step, loss in enumerate(losses)},
        **{f"gradient {i}": grad for i, grad in enumerate(world.gradients)},
        **{f"weight {name}": tensor for name, tensor in training.state().items()},
        "random state": torch.get_rng_state(),
    }
