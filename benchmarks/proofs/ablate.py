"""What is each part of the reserve worth?

Between a prediction and the budget stand several parts: a margin, a correction of
predictions, steps down, more where sizes lie beyond those measured, measuring under
plans, and least peaks. Here the same steps are trained with
one of them left out at a time, on the simulated accelerator, where readings are exact:

    python -m benchmarks.proofs ablate --models bert --settings mixed jumps

In `mixed` a run begins with short shapes and ends with the longest; in `jumps` the
shortest and the longest come by turns from the first step on; `autocast` is `mixed` in
bfloat16; `resumed` is a session that has learned from short shapes, and goes on with
long ones alone. There the budget lies halfway between what the longest shape grows by
with everything recomputed and with everything kept. In `tight` it lies 15% over the
former, in `below` 10% under it.

In the other settings something changes at half of a run: layers thaw (`unfrozen`),
autocast begins (`cast`), the user's own loss needs more or less (`longer loss`,
`shorter loss`), sizes that grew together do so no more (`shifted`). Their budgets are
about requested bytes: what a prediction misses is less than the segments of 20 MiB
that small models reserve.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    device,
    progress,
    rows_of,
)
from benchmarks.proofs.left_out import NOTHING, PARTS, reserve_without
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, by_name, names_of
from benchmarks.proofs.numbers import mebibytes, percent, quantile
from mimose.bench.rows import Row
from mimose.bench.step_meter import MeasuredStep, step_meter
from mimose.bench.zoo import Batch, moved
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import make_planner
from mimose.records import StepRecord
from mimose.run.engine import Options
from mimose.session import Session, attach

QUESTION = "What is each part of the reserve worth?"
CHANGES = ("unfrozen", "cast", "longer loss", "shorter loss", "shifted")
SETTINGS = ("mixed", "jumps", "autocast", "resumed", "tight", "below", *CHANGES)
OPTIONS = (
    device("sim"),
    count("--steps", 120, "a run"),
    ("--settings", {"nargs": "+", "choices": SETTINGS, "default": [*SETTINGS]}),
    ("--without", {"nargs": "+", "choices": PARTS, "default": [*PARTS]}),
)

_SPECS = by_name(
    ModelSpec(
        "bert",
        {"batch": (8, 8), "length": (32, 320)},
        changes={"num_attention_heads": 1},
    ),
    ModelSpec("gpt2", {"batch": (4, 4), "length": (32, 256)}),
    ModelSpec("t5", {"batch": (4, 4), "source": (32, 256), "target": (16, 160)}),
    ModelSpec(
        "resnet",
        {"batch": (4, 4), "height": (64, 224), "width": (64, 224)},
        multiple=32,
        changes={"depths": [4, 3, 2, 2], "embedding_size": 8},
    ),
)
_OF_LEAST = {"tight": 1.15, "below": 0.9}
"""The headroom as a share of the longest shape's least growth."""
_HALF = 0.5
"""In other settings: of the way from its least growth to its most."""
_EDGE, _SHORT, _LONG = 0.1, 0.2, 0.8
"""Share of a run's steps at either end of `mixed`; ends of the parts of a range."""
_BELOW_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class AblateRow(Row):
    """One run, with one part of the reserve left out."""

    model: str
    setting: str
    without: str
    """The part; `nothing` for the library as it is."""
    steps: int
    """Fewer than asked for where the budget was refused."""
    is_refused: bool
    budget_bytes: int
    headroom_bytes: int
    """The budget over what is held before a step."""
    steps_over: int
    """Reserved more than the budget at any moment, read from outside."""
    overshoot_bytes: int
    """Of the worst step."""
    alloc_retries: int
    use: float | None
    """Growth ÷ headroom of planned steps that recompute something, median."""
    error_p99: float | None
    """|observed − predicted| growth over the predicted, of planned steps."""
    recomputed_flops: int
    steps_measured: int
    first_plan: int | None
    """Steps before the first plan."""
    flushes: int | None
    """How often the allocator freed its cached blocks."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train with each part left out; the library as it is must keep its promises."""
    rows: list[AblateRow] = []
    for name in names_of(_SPECS, settings.models):
        task = {"model": name, "steps": options.steps, "parts": options.without}
        for setting in options.settings:
            rows += rows_of(AblateRow, "ablate", settings, setting=setting, **task)
            progress(f"{name}, {setting}: done")
    return Answer(rows=[*rows], table=[_line(row) for row in rows], bars=_judge(rows))


def _judge(rows: Sequence[AblateRow]) -> list[Bar]:
    """Judge the library as it is; a refused budget is one that has to be passed."""
    whole = [row for row in rows if row.without == NOTHING]
    over = sum(row.steps_over for row in whole if not row.is_refused)
    retries = sum(row.alloc_retries for row in whole)
    return [
        Bar("steps over, nothing left out", over, at_most=0),
        Bar("allocation retries, nothing left out", retries, at_most=0),
    ]


def _line(row: AblateRow) -> dict[str, object]:
    return {
        "model": row.model,
        "setting": row.setting,
        "without": row.without,
        "steps": f"{row.steps}, refused" if row.is_refused else row.steps,
        "over": row.steps_over,
        "by MiB": mebibytes(row.overshoot_bytes),
        "alloc retries": row.alloc_retries,
        "use p50": percent(row.use, 1),
        "error p99": percent(row.error_p99),
        "GFLOP": row.recomputed_flops / 1e9,
        "measured": row.steps_measured,
        "first plan": row.first_plan,
        "flushes": row.flushes,
    }


# ------------------------------------------------------------------ in the child


class _Halves(Loop):
    """Trains otherwise in the second half of a run; built as it ends."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.meter = step_meter(self.device)

    def set_half(self, half: int) -> None:
        """Begin a half of the run, 0 or 1."""


class _Autocast(Loop):
    """Trains in bfloat16."""

    is_on = True

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run a forward under autocast."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_on):
            return super().loss(batch)


class _Cast(_Autocast, _Halves):
    """Trains in bfloat16 in the second half of a run."""

    def set_half(self, half: int) -> None:
        """Turn autocast off, or on."""
        self.is_on = half == 1


class _Unfrozen(_Halves):
    """Trains the first half of its parameters in the second half of a run alone."""

    def set_half(self, half: int) -> None:
        """Freeze them, or not."""
        parameters = list(self.model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(half == 1)


class _LongerLoss(_Halves):
    """Adds to the loss, outside of the model, in the second half of a run."""

    is_longer = True

    def loss(self, batch: Batch) -> torch.Tensor:
        """Run a forward; smooth labels and keep logits small."""
        if not self.is_longer:
            return super().loss(batch)
        outputs = self.model(**moved(batch, self.device))
        logs = outputs.logits.float().log_softmax(-1)
        kept = outputs.logits.float().logsumexp(-1).square().mean()
        loss: torch.Tensor = outputs.loss - 0.1 * logs.mean() + 1e-4 * kept
        return loss

    def set_half(self, half: int) -> None:
        """Do so or not."""
        self.is_longer = half == 1


class _ShorterLoss(_LongerLoss):
    """In the first half of a run."""

    def set_half(self, half: int) -> None:
        """Do so or not."""
        self.is_longer = half == 0


_LOOPS: Mapping[str, type[Loop]] = {
    "autocast": _Autocast,
    "cast": _Cast,
    "unfrozen": _Unfrozen,
    "longer loss": _LongerLoss,
    "shorter loss": _ShorterLoss,
    "shifted": _Halves,
}


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one model in one setting, once without each part."""
    spec = _SPECS[task["model"]]
    headroom_bytes = _headroom(spec, task)
    for part in task["parts"]:
        if task["setting"] == "below" and part not in (NOTHING, "least peaks"):
            continue
        yield {
            "model": spec.model,
            "setting": task["setting"],
            "without": part,
            "headroom_bytes": headroom_bytes,
            **_run(spec, task, part, headroom_bytes),
        }


def _loop(spec: ModelSpec, task: Mapping[str, Any]) -> Loop:
    """Build a model where nothing is left of the last, and run its first step."""
    gc.collect()
    kind = _LOOPS.get(task["setting"], Loop)
    loop = kind(spec.build(task["seed"], task["device"]))
    shortest = spec.batch(spec.shortest(), torch.Generator().manual_seed(0))
    loop.warm_up(shortest)
    loop.step(shortest)  # the optimizer's state is there from now on
    return loop


def _headroom(spec: ModelSpec, task: Mapping[str, Any]) -> int:
    """Return what steps may take of the device, from what the longest shape takes."""
    loop = _loop(spec, task)
    most = _longest_growth(spec, loop)
    with attach(loop.model, AMPLE_BYTES, planner="full", meter=loop.meter):
        least = _longest_growth(spec, loop)
    if task["setting"] in _OF_LEAST:
        return int(_OF_LEAST[task["setting"]] * least)
    return int(least + _HALF * (most - least))


def _longest_growth(spec: ModelSpec, loop: Loop) -> int:
    """Return what the longest shape takes of the device in its second step."""
    batch = spec.batch(spec.longest(), torch.Generator().manual_seed(1))
    for _ in range(2):
        loop.meter.resting_bytes()
        measured = loop.step(batch)
    return measured.growth_bytes


def _run(
    spec: ModelSpec, task: Mapping[str, Any], part: str, headroom_bytes: int
) -> dict[str, Any]:
    """Train without one part, and sum up."""
    loop = _loop(spec, task)
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    shapes = _shapes(spec, task, generator)
    budget_bytes = loop.meter.resting_bytes() + headroom_bytes
    state = None
    if task["setting"] == "resumed":
        with _session(loop, budget_bytes, part) as session:
            for _ in range(task["steps"] // 4):
                loop.step(spec.batch(spec.draw(generator, 0.0, 0.5), generator))
            state = json.dumps(session.state_dict())
    measured: list[MeasuredStep] = []
    is_refused = False
    with _session(loop, budget_bytes, part) as session:
        if state is not None:
            session.load_state_dict(json.loads(state))
        n_before = _n_measured(session)
        try:
            for n, sizes in enumerate(shapes):
                if isinstance(loop, _Halves) and n in (0, len(shapes) // 2):
                    loop.set_half(min(n, 1))
                measured.append(loop.step(spec.batch(sizes, generator)))
        except InfeasibleBudgetError:
            is_refused = True
        n_measured = _n_measured(session) - n_before
    return {
        "is_refused": is_refused,
        "budget_bytes": budget_bytes,
        "steps_measured": n_measured,
        **_summary(measured, session.records, budget_bytes),
        "flushes": session.summary().flushes,
    }


def _n_measured(session: Session) -> int:
    """Return how many steps its cost model knows, those of a state among them."""
    return int(session.state_dict()["cost_model"]["n_steps"])


def _shapes(
    spec: ModelSpec, task: Mapping[str, Any], generator: torch.Generator
) -> list[Sizes]:
    """Draw a setting's shapes, in their order."""
    steps, setting = task["steps"], task["setting"]
    if setting == "jumps":
        ends = ((0.0, _SHORT), (_LONG, 1.0))
        return [spec.draw(generator, *ends[i % 2]) for i in range(steps)]
    if setting == "resumed":
        return [spec.draw(generator, 0.5, 1.0) for _ in range(steps)]
    if setting == "below":
        return [spec.longest() for _ in range(min(steps, _BELOW_STEPS))]
    edge = round(_EDGE * steps)
    if setting in CHANGES:
        alike = [_drawn_alike(spec, generator) for _ in range(steps // 2)]
        draw = ModelSpec.draw if setting == "shifted" else _drawn_alike
        return [*alike, *(draw(spec, generator) for _ in range(steps - len(alike)))]
    return [
        *(spec.draw(generator, 0.0, _SHORT) for _ in range(edge)),
        *(spec.draw(generator, 0.0, _LONG) for _ in range(steps - 2 * edge)),
        *(spec.longest() for _ in range(edge)),
    ]


def _drawn_alike(spec: ModelSpec, generator: torch.Generator) -> Sizes:
    """Draw all sizes at the same share of their ranges."""
    share = float(torch.rand((), generator=generator))
    return spec.draw(generator, share, share)


def _session(loop: Loop, budget_bytes: int, part: str) -> Session:
    """Attach as `attach` does, with a part of the reserve left out."""
    options = Options(
        budget=budget_bytes,
        planner=make_planner("auto"),
        meter=loop.meter,
        reserve=reserve_without(part),
    )
    return Session(loop.model, options)


def _summary(
    measured: Sequence[MeasuredStep], records: Sequence[StepRecord], budget_bytes: int
) -> dict[str, Any]:
    over = [m.peak_bytes - budget_bytes for m in measured]
    planned = [
        (m, r)
        for m, r in zip(measured, records, strict=False)
        if r.phase == "plan" and "recompute" in r.actions
    ]
    uses = [m.growth_bytes / (budget_bytes - m.start_bytes) for m, _ in planned]
    errors = [abs(r.prediction_error or 0.0) for _, r in planned]
    first = [n for n, r in enumerate(records) if r.phase in ("step_down", "plan")]
    return {
        "steps": len(measured),
        "steps_over": sum(n_bytes > 0 for n_bytes in over),
        "overshoot_bytes": max(0, *over) if over else 0,
        "alloc_retries": sum(r.alloc_retries or 0 for r in records),
        "use": quantile(uses, 0.5),
        "error_p99": quantile(errors, 0.99),
        "recomputed_flops": sum(r.recomputed_flops for r in records),
        "first_plan": first[0] if first else None,
    }
