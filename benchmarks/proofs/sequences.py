"""Are steps planned that run another sequence of layers each?

Layers dropped at random, 1 to 6 images a text, chunks of documents: each training runs
bare and then within a budget, from the same weights and random state. The headroom is a
share of the most that a bare step grows by. Recomputed FLOPs are compared with the
oracle's: of the plan that is optimal for just the sequence that ran, with no margin.

    python -m benchmarks.proofs sequences
    python -m benchmarks.proofs sequences --cases layerdrop images --steps 60
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.proofs.common import (
    Answer,
    Bar,
    Settings,
    count,
    device,
    recorded,
    rows_of,
)
from benchmarks.proofs.numbers import mebibytes, quantile
from benchmarks.proofs.settings.case import World
from benchmarks.proofs.varying import VARYING, Varying
from mimose.bench.rows import Row
from mimose.planners import InfeasibleBudgetError, Optimal
from mimose.session import Session, attach

QUESTION = "Are steps planned that run another sequence of layers each?"
OPTIONS = (
    device("sim"),
    count("--steps", 60, "a training"),
    ("--share", {"type": float, "default": 0.5, "help": "of the growth, as headroom"}),
    ("--cases", {"nargs": "+", "choices": sorted(VARYING), "default": []}),
)

_PLANNED_BAR = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRow(Row):
    """One step."""

    case: str
    step: int
    phase: str
    reason: str
    events: int
    recomputed: int
    budget_bytes: int
    start_bytes: int
    bare_growth_bytes: int
    """Of the bare model's step."""
    observed_growth_bytes: int | None
    predicted_growth_bytes: float | None
    reserved_peak_bytes: int | None
    recomputed_flops: int
    oracle_flops: float | None
    """None where no plan keeps the budget, or costs are not known."""
    plan_seconds: float
    is_equal: bool
    """Whether the step's loss and gradients are the bare model's, to the bit."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train in every way, and judge what came of it."""
    answer = Answer()
    for case in options.cases or VARYING:
        task = {
            "case": case,
            "steps": options.steps,
            "share": options.share,
            # Of such small models segments of 20 MiB would be all that is seen.
            "is_expandable": True,
        }
        rows = rows_of(SequenceRow, "sequences", settings, **task)
        answer.add(case, rows, _summarise(rows), _judge(rows), head="case")
    return answer


def _later(rows: Sequence[SequenceRow]) -> Sequence[SequenceRow]:
    return rows[len(rows) // 2 :]


def _planned_share(rows: Sequence[SequenceRow]) -> float:
    return sum(row.phase == "plan" for row in _later(rows)) / len(_later(rows))


def _over(rows: Sequence[SequenceRow]) -> int:
    return sum((row.reserved_peak_bytes or 0) > row.budget_bytes for row in rows)


def _to_oracle(rows: Sequence[SequenceRow]) -> float | None:
    known = [
        r for r in _later(rows) if r.phase == "plan" and r.oracle_flops is not None
    ]
    oracle = sum(row.oracle_flops or 0.0 for row in known)
    return sum(row.recomputed_flops for row in known) / oracle if oracle else None


def _errors(rows: Sequence[SequenceRow]) -> list[float]:
    """Return by what share of the observed growth predictions were off."""
    return [
        abs(row.predicted_growth_bytes / row.observed_growth_bytes - 1.0)
        for row in _later(rows)
        if row.predicted_growth_bytes is not None and row.observed_growth_bytes
    ]


def _summarise(rows: Sequence[SequenceRow]) -> dict[str, object]:
    errors = _errors(rows)
    reasons = Counter(row.reason for row in _later(rows) if row.reason)
    return {
        "headroom MiB": mebibytes(max(r.budget_bytes - r.start_bytes for r in rows)),
        "sequences": len({(row.events, row.recomputed) for row in rows}),
        "first plan": min((r.step for r in rows if r.phase == "plan"), default=None),
        "planned, later half": _planned_share(rows),
        "over": _over(rows),
        "error p50": quantile(errors, 0.5),
        "error p95": quantile(errors, 0.95),
        "FLOPs ÷ oracle": _to_oracle(rows),
        "plan µs p50": 1e6 * (quantile([r.plan_seconds for r in rows], 0.5) or 0.0),
        "said": json.dumps(reasons.most_common(2)),
    }


def _judge(rows: Sequence[SequenceRow]) -> list[Bar]:
    different = sum(not row.is_equal for row in rows)
    return [
        Bar("steps over the budget", _over(rows), at_most=0),
        Bar("steps whose loss or gradients differ", different, at_most=0),
        Bar("planned, later half", _planned_share(rows), at_least=_PLANNED_BAR),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train bare, then within a budget."""
    bare = _Run(task)
    told = [bare.step(batch) for batch in bare.training.batches]
    growths = [growth for growth, _ in told]
    static = bare.static_bytes
    del bare
    gc.collect()
    run = _Run(task)
    budget = static + int(task["share"] * max(growths))
    with attach(run.training.model, budget) as session:
        for (growth, digest), batch in zip(told, run.training.batches, strict=True):
            _, own = run.step(batch)
            record = session.records[-1]
            yield {
                "case": task["case"],
                **recorded(
                    record, "step", "phase", "reason", "events", "recomputed",
                    "start_bytes", "observed_growth_bytes", "predicted_growth_bytes",
                    "reserved_peak_bytes", "recomputed_flops", "plan_seconds",
                ),
                "budget_bytes": session.budget_bytes,
                "bare_growth_bytes": growth,
                "oracle_flops": _oracle_flops(session),
                "is_equal": own == digest,
            }  # fmt: skip


class _Run:
    """One training, and what its steps grow by."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        torch.manual_seed(task["seed"])
        world = World(task["device"], task["seed"] + 1)
        self.training: Varying = VARYING[task["case"]](world, task["steps"])
        self.training.model.train()
        self._optimizer = world.adamw(self.training.model)
        self._device = torch.get_device_module(task["device"])
        self.static_bytes = 0
        """The most that was held before a step."""
        torch.manual_seed(task["seed"] + 2)

    def step(self, batch: Any) -> tuple[int, str]:
        """Train on one batch; return the growth, and a digest of what it computed."""
        start = self._device.memory_allocated()
        self.static_bytes = max(self.static_bytes, start)
        self._device.reset_peak_memory_stats()
        loss = self.training.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        growth = self._device.max_memory_allocated() - start
        digest = _digest([loss, *self._gradients()])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return growth, digest

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self.training.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def _oracle_flops(session: Session) -> float | None:
    """Return what the optimal plan for the sequence that ran would have recomputed."""
    record = session.records[-1]
    if record.predicted_growth_bytes is None:
        return None
    facts, _, memory = session._asked(None)
    calls = tuple(unit.calls for unit in session._engine.units)
    memory = memory._replace(start_bytes=float(record.start_bytes))
    problem = session._engine.policy.problem(facts._replace(calls=calls), memory)
    try:
        return float(Optimal().plan(problem).extra_cost)
    except InfeasibleBudgetError:
        return None
