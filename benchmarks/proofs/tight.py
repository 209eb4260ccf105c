"""Is a tight budget kept from the first step on, and an impossible one refused?

One process measures the least that any plan can reach for one shape: everything
recomputed, AdamW's state and its steps included. Then the budget is set 3% of that
growth above, and another process has to keep it from its first step, when the state
is still to come; and 3% below, where the library has to say so, and what holds the
memory, after two steps at the most.

    python -m benchmarks.proofs tight
    python -m benchmarks.proofs tight --device sim

On an accelerator all bytes are reserved ones, and the least is that of steps which
begin without free blocks, as a step of the library does that might pass its budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

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
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mebibytes, worst
from mimose.bench.device import is_cpu
from mimose.bench.rows import Row
from mimose.bench.zoo import Batch
from mimose.exceptions import InfeasibleBudgetError
from mimose.session import Session, attach

QUESTION = "Is a tight budget kept from the first step, and an impossible one refused?"
OPTIONS = (device("cpu"), count("--steps", 30, "that must be kept"))

# Wide enough that the optimizer's state is a good part of the whole.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "attn_implementation": "eager",
}
_SPECS = by_name(
    ModelSpec("bert", {"batch": (12, 12), "length": (256, 256)}, changes=_WIDE),
    ModelSpec("gpt2", {"batch": (8, 8), "length": (384, 384)}, changes={"n_embd": 256}),
    ModelSpec(
        "t5",
        {"batch": (8, 8), "source": (320, 320), "target": (224, 224)},
        changes={"d_model": 256, "d_ff": 1024},
    ),
)
_SHARE = 0.03
_PROBE_STEPS = 5
_STEPS_BAR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TightRow(Row):
    """One step; the last of an impossible budget is the one that was refused."""

    model: str
    run: str
    """``"probe"``, ``"above"`` or ``"below"`` the least growth."""
    step: int
    phase: str
    """``"refused"`` where `InfeasibleBudgetError` was raised."""
    kept: int
    """Events whose activations were kept."""
    base_bytes: int
    """Held before the first step, the optimizer's state not there."""
    budget_bytes: int | None
    start_bytes: int
    peak_bytes: int
    """Read from outside, the optimizer's step included."""
    seconds: float
    holders: str
    """What holds the memory, as the error says."""

    @property
    def rise_bytes(self) -> int:
        """The peak over what was held before the first step."""
        return self.peak_bytes - self.base_bytes


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Measure the least, then train just above and just below it."""
    answer = Answer()
    run = partial(rows_of, TightRow, "tight", settings)
    for name in names_of(_SPECS, settings.models):
        task: dict[str, Any] = {"model": name, "steps": options.steps}
        probe = run(run="probe", **task)
        task["least_bytes"] = max(row.rise_bytes for row in probe)
        above = run(run="above", share=_SHARE, **task)
        below = run(run="below", share=-_SHARE, **task)
        line = {"least MiB": mebibytes(task["least_bytes"]), **_summarise(above, below)}
        bars = _judge(above, below, options.steps)
        answer.add(name, [*probe, *above, *below], line, bars)
    return answer


def _over(rows: Sequence[TightRow]) -> int:
    return sum(row.peak_bytes > (row.budget_bytes or 0) for row in rows)


def _refusal(rows: Sequence[TightRow]) -> TightRow | None:
    return next((row for row in rows if row.phase == "refused"), None)


def _summarise(
    above: Sequence[TightRow], below: Sequence[TightRow]
) -> dict[str, object]:
    refusal = _refusal(below)
    return {
        "steps above": len(above),
        "over": _over(above),
        "highest ÷ budget": _highest(above),
        "steps before refusal": None if refusal is None else refusal.step,
        "holders, MiB": "" if refusal is None else refusal.holders,
    }


def _judge(
    above: Sequence[TightRow], below: Sequence[TightRow], steps: int
) -> list[Bar]:
    refusal = _refusal(below)
    before = None if refusal is None else refusal.step
    return [
        Bar("steps done above", len(above), at_least=steps),
        Bar("steps over", _over(above), 0),
        Bar("steps before the refusal", before, _STEPS_BAR),
    ]


def _highest(rows: Sequence[TightRow]) -> float | None:
    """Return the highest rise as a share of what the budget allows."""
    return worst(
        row.rise_bytes / (row.budget_bytes - row.base_bytes)
        for row in rows
        if row.budget_bytes is not None
    )


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run one part: ``"probe"``, ``"above"`` or ``"below"``."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"], task["device"]))
    base_bytes = loop.warm_up(spec.batch(spec.longest(), generator))
    is_probe = task["run"] == "probe"
    budget = AMPLE_BYTES if is_probe else _budget(base_bytes, task)
    planner = "full" if is_probe else "auto"
    with attach(loop.model, budget, planner=planner, meter=loop.meter) as session:
        for step in range(_PROBE_STEPS if is_probe else task["steps"]):
            if is_probe and not is_cpu(task["device"]):
                loop.meter.resting_bytes()
            said = _step(loop, session, spec.batch(spec.longest(), generator))
            yield {
                "model": spec.model,
                "run": task["run"],
                "step": step,
                "base_bytes": base_bytes,
                "budget_bytes": None if is_probe else budget,
                **said,
            }
            if said["phase"] == "refused":
                return


def _step(loop: Loop, session: Session, batch: Batch) -> dict[str, Any]:
    """Train on a batch; say so where the budget is refused."""
    start_bytes = loop.meter.live_bytes()
    try:
        measured = loop.step(batch)
    except InfeasibleBudgetError as error:
        held = (f"{name} {mebibytes(n)}" for name, n in error.holders.items())
        return {
            "phase": "refused",
            "kept": 0,
            "start_bytes": start_bytes,
            "peak_bytes": 0,
            "seconds": 0.0,
            "holders": ", ".join(held),
        }
    record = session.records[-1]
    said = recorded(record, "phase", "kept")
    return {**said, **measured._asdict(), "holders": ""}


def _budget(base_bytes: int, task: Mapping[str, Any]) -> int:
    return base_bytes + int((1.0 + task["share"]) * task["least_bytes"])
