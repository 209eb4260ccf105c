"""How much more is recomputed than an exact planner would, knowing everything?

The demonstration's batches are trained on under mimose. Right after each step the
problem of its exact sizes is solved exactly, with the bytes that were held when it
began and no margin taken off: the least that a plan of whole layers can recompute
within the budget, over the steps that need a plan. Another process trains the same
batches under one static plan, made for the longest, which recomputes on the short ones
as well: that comparison is over all planned steps. What learning cost is told apart.

    python -m benchmarks.proofs optimum
    python -m benchmarks.proofs optimum --steps 80
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.proofs.common import Answer, Bar, Settings, count, recorded, said_by
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import volume
from benchmarks.proofs.numbers import mean, mebibytes, percent
from mimose.bench.grid.workloads import OURS
from mimose.bench.rows import Row
from mimose.bench.zoo import Batch
from mimose.measure.tracker import StorageTracker
from mimose.planners import Optimal, Planner, Static, lay_out
from mimose.session import Session, attach
from mimose.usage import positive

QUESTION = "How much more is recomputed than an exact planner would?"
OPTIONS = (
    count("--steps", 600),
    (
        "--share",
        {
            "type": positive,
            "default": 0.5,
            "help": "of plain training's growth on the longest batch, for the budget",
        },
    ),
)

_GIGA = 1e9
_GROWTH = "observed_growth_bytes"
_COUNTED_STEPS = 20
"""Steps of plain training whose FLOPs tell what an iteration is worth."""
_OPTIMUM_BAR, _STATIC_BAR, _NEEDED_BAR = 1.05, 0.5, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimumRow(Row):
    """One step under mimose, and the same under the static plan."""

    step: int
    length: int
    phase: str
    budget_bytes: int
    start_bytes: int
    keep_all_growth_bytes: float
    """Predicted right after the step."""
    observed_growth_bytes: int | None
    recomputed_flops: int
    optimum_flops: float
    """The exact optimum's, at exact sizes, without a margin."""
    static_phase: str
    static_flops: int
    """Recomputed under the static plan."""

    @property
    def is_planned(self) -> bool:
        """Whether both ran a plan."""
        return self.phase == self.static_phase == "plan"

    @property
    def counts(self) -> bool:
        """Whether both ran a plan, and the step needed one."""
        needs = self.start_bytes + self.keep_all_growth_bytes > self.budget_bytes
        return needs and self.is_planned


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train under both, and compare with the optimum."""
    with tempfile.TemporaryDirectory() as folder:
        OURS.prepare(Path(folder))
        run = partial(said_by, "optimum", settings, shared=folder, steps=options.steps)
        (probe,) = run(part="probe")
        headroom = int(options.share * probe["growth_bytes"])
        mine, static = (
            list(run(part=part, headroom_bytes=headroom))
            for part in ("mimose", "static")
        )
    rows = [
        OptimumRow(
            **one,
            static_phase=other["phase"],
            static_flops=other["recomputed_flops"],
            **settings.provenance(),
        )
        for one, other in zip(mine, static, strict=True)
    ]
    return _answer(rows, probe, headroom)


def _answer(
    rows: Sequence[OptimumRow], probe: Mapping[str, Any], headroom: int
) -> Answer:
    counted = [row for row in rows if row.counts]
    mine, optimum = _flops(counted), sum(row.optimum_flops for row in counted)
    to_optimum = mine / optimum if optimum else None
    to_static = _over_static([row for row in rows if row.is_planned])
    learning = [row for row in rows if row.phase != "plan"]
    extra = _flops(learning) - sum(row.optimum_flops for row in learning)
    use = mean(
        (row.observed_growth_bytes or 0) / (row.budget_bytes - row.start_bytes)
        for row in counted
    )
    line = {
        "steps": len(rows),
        "that count": len(counted),
        "headroom MiB": mebibytes(headroom),
        "recomputed GFLOP": mine / _GIGA,
        "÷ optimum": to_optimum,
        "÷ static there": _over_static(counted),
        "÷ static, all planned": to_static,
        "use": percent(use, 1),
        "learning steps": len(learning),
        "learning GFLOP beyond the optimum": extra / _GIGA,
        "in iterations": extra / probe["iteration_flops"],
        "all ÷ static, learning included": _over_static(rows),
    }
    bars = [
        Bar("steps that count", len(counted), at_least=_NEEDED_BAR),
        Bar("recomputed FLOPs ÷ the optimum's", to_optimum, _OPTIMUM_BAR),
        Bar("all planned steps: ÷ the static plan's", to_static, _STATIC_BAR),
    ]
    return Answer(rows=[*rows], table=[line], bars=bars)


def _flops(rows: Sequence[OptimumRow]) -> int:
    return sum(row.recomputed_flops for row in rows)


def _over_static(rows: Sequence[OptimumRow]) -> float | None:
    """Compare with the static plan on the same steps."""
    static = sum(row.static_flops for row in rows)
    return _flops(rows) / static if static else None


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Do one part: ``"probe"``, ``"mimose"`` or ``"static"``."""
    OURS.prepare(Path(task["shared"]))
    torch.manual_seed(task["seed"])
    lengths = [
        sizes["length"]
        for sizes in OURS.trace(np.random.default_rng(task["seed"]), task["steps"])
    ]
    generator = torch.Generator().manual_seed(task["seed"])
    batches = [OURS.batch({"length": n}, "tiny", generator) for n in lengths]
    loop = Loop(OURS.build("tiny"))
    base_bytes = loop.warm_up(min(batches, key=volume))
    if task["part"] == "probe":
        yield _probe(loop, batches)
        return
    planner: str | Planner = "auto"
    if task["part"] == "static":
        planner = Static(shape={"input_ids.1": max(lengths)})
    budget = base_bytes + loop.state_bytes + task["headroom_bytes"]
    with attach(loop.model, budget, planner=planner, meter=loop.meter) as session:
        for length, batch in zip(lengths, batches, strict=True):
            loop.step(batch)
            yield _observed(session, length)


def _probe(loop: Loop, batches: Sequence[Batch]) -> Mapping[str, Any]:
    """Measure plain training on the longest batch; count an iteration's FLOPs."""
    longest = max(batches, key=volume)
    growth = min(loop.step(longest).growth_bytes for _ in range(3))
    counted = batches[:_COUNTED_STEPS]
    with StorageTracker() as tracker:
        for batch in counted:
            loop.step(batch)
    return {"growth_bytes": growth, "iteration_flops": tracker.flops / len(counted)}


def _observed(session: Session, length: int) -> Mapping[str, Any]:
    record = session.records[-1]
    said = {
        **recorded(record, "step", "phase", "start_bytes", _GROWTH, "recomputed_flops"),
        "length": length,
        "budget_bytes": session.budget_bytes,
        "keep_all_growth_bytes": 0.0,
        "optimum_flops": 0.0,
    }
    if record.predicted_growth_bytes is None:  # nothing to fill a problem from, yet
        return said
    problem = session.planning_problem(start_bytes=record.start_bytes)
    everything = np.zeros(len(problem.events), dtype=np.intp)
    peak = lay_out(problem, everything).peak_bytes
    said["keep_all_growth_bytes"] = peak - record.start_bytes
    said["optimum_flops"] = Optimal().plan(problem).extra_cost
    return said
