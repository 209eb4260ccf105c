"""Is a tight budget kept from the first step on, and is an impossible one an error?

One process measures the least that any plan can reach for one shape: everything
recomputed, with AdamW's state and its steps. Then another process must keep a budget
above that by 3% of the growth, from its first step, before the state exists. With a
budget 3% below, the library must raise an error that says what holds the memory, after
at most two steps.

    python -m benchmarks.proofs tight
    python -m benchmarks.proofs tight --device sim

On an accelerator all bytes are reserved memory, and the least is that of steps that
begin without cached blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mebibytes, worst
from mimose.bench.device import is_cpu
from mimose.bench.zoo import Batch
from mimose.exceptions import InfeasibleBudgetError
from mimose.session import Session, attach

QUESTION = "Is a tight budget kept from the first step, and an impossible one refused?"
OPTIONS = (common.device("cpu"), common.count("--steps", 30, "that must be kept"))

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


def ask(settings: Settings, options: Options) -> Answer:
    """Measure the least, then train just above and just below it."""
    answer = Answer(path=settings.out / "tight.csv")
    for name in names_of(_SPECS, settings.models):
        task: dict[str, Any] = {"model": name, "steps": options.steps}
        probe = common.measured("tight", settings, run="probe", **task)
        task["least_bytes"] = max(row["rise_bytes"] for row in probe)
        above = common.measured("tight", settings, run="above", share=_SHARE, **task)
        below = common.measured("tight", settings, run="below", share=-_SHARE, **task)
        line, bars = judge(above, below, options.steps)
        line = {"least MiB": mebibytes(task["least_bytes"]), **line}
        answer.add(name, [*probe, *above, *below], line, bars)
    return answer


def judge(above: Sequence[Row], below: Sequence[Row], steps: int) -> common.Verdict:
    """Judge the steps within a budget just above the least, and those just below."""
    refused = next((row for row in below if row["phase"] == "refused"), None)
    over = sum(row["used"] > 1 for row in above)
    before = refused["step"] if refused else None
    line = {
        "over": over,
        "highest ÷ budget": worst(row["used"] for row in above),
        "steps before refusal": before,
        "holders, MiB": refused["holders"] if refused else "",
    }
    return line, [
        Bar("steps done above", len(above), at_least=steps),
        Bar("steps over", over, 0),
        Bar("steps before the refusal", before, _STEPS_BAR),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Run one part: ``"probe"``, ``"above"`` or ``"below"``."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"], task["device"]))
    base_bytes = loop.warm_up(spec.batch(spec.longest(), generator))
    is_probe = task["run"] == "probe"
    allowed = common.AMPLE_BYTES - base_bytes
    if not is_probe:
        allowed = int((1.0 + task["share"]) * task["least_bytes"])
    planner = "full" if is_probe else "auto"
    budget = base_bytes + allowed
    with attach(loop.model, budget, planner=planner, meter=loop.meter) as session:
        for step in range(_PROBE_STEPS if is_probe else task["steps"]):
            if is_probe and not is_cpu(task["device"]):
                loop.meter.resting_bytes()
            said = _step(loop, session, spec.batch(spec.longest(), generator))
            rise = max(0, said["peak_bytes"] - base_bytes)
            yield {
                "model": spec.model,
                "run": task["run"],
                "step": step,
                "base_bytes": base_bytes,
                "budget_bytes": budget,
                "rise_bytes": rise,
                "used": rise / allowed,
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
        nothing = {"kept": 0, "peak_bytes": 0, "seconds": 0.0}
        told = {"phase": "refused", "holders": ", ".join(held)}
        return {"start_bytes": start_bytes, **nothing, **told}
    said = common.recorded(session.records[-1], "phase", "kept")
    return {**said, **measured._asdict(), "holders": ""}
