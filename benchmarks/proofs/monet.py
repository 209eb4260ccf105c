"""What does a third of the activation memory cost with our exact actions, and MONeT's?

Five convolutional nets that MONeT was measured on, and a transformer, which it could
not run. Gradients are there before each step, so that its growth is activations and
working memory. Three processes a model: on the CPU a session learns what each layer's
call takes under each action; on the simulated device, where bytes are exact, another
learns what it holds, plans for a half and a third of plain training's growth and for
10% more time, and measures what each plan grows by; on the CPU again, one thread, every
plan and plain training take turns, in the processor's time.

    python -m benchmarks.proofs monet --threads 1
    python -m benchmarks.proofs monet --threads 1 --models unet --rounds 5

Published numbers are of a GPU, at their own batches, and with weights and gradients in
the memory: see `monet_published`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.proofs.common import Answer, Bar, Settings, count, progress
from benchmarks.proofs.models import names_of
from benchmarks.proofs.monet_published import RANGE, SOLVER_SECONDS, published
from benchmarks.proofs.numbers import MIB, mebibytes, percent
from mimose.bench.child import run_child
from mimose.bench.machine import HEAP_IS_KEPT
from mimose.bench.rows import Row

QUESTION = "What does a third of the activation memory cost, beside MONeT's figures?"
OPTIONS = (
    count("--rounds", 9, "of timing"),
    count("--learn", 24, "steps to learn, on each device"),
)
MODELS = ("resnet50", "googlenet", "unet", "mobilenet", "vgg16", "bert")

_RUNS = "benchmarks.proofs.monet_runs"
_THIRD = "0.333"
_LEAST_AS_GOOD = 4
"""Models of which a third of the memory is to cost no more than published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonetRow(Row):
    """One plan of one model."""

    model: str
    batch: int
    length: int
    """Pixels of a side; tokens of a text."""
    calls: int
    """Of units in a forward."""
    parameter_bytes: int
    plain_growth_bytes: int
    plain_flops: int
    target: str
    """A share of plain training's growth, ``"+10%"`` of its time, or what is run."""
    planner: str
    is_reached: bool
    """Whether the step itself kept that share; where no plan is to, the planner's is
    that of the least peak."""
    is_proved: bool
    """Whether the planner proved its plan optimal."""
    binding: str
    """Segments that make the peak."""
    plan: str
    """A letter for each call of a unit."""
    predicted_growth_bytes: float
    growth_bytes: int
    planner_seconds: float
    predicted_seconds: float
    """That the plan adds to a step."""
    recomputed_flops: int
    plain_seconds: float
    """Median, of the processor."""
    overhead: float
    """Median over rounds of the step's time ÷ plain training's, less one."""
    rounds: int
    is_exact: bool
    """Whether loss and gradients were plain training's in all rounds."""

    @property
    def share(self) -> float:
        """What the step has grown by, as a share of plain training's growth."""
        return self.growth_bytes / self.plain_growth_bytes


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Learn, plan, measure and compare, model by model."""
    rows: list[MonetRow] = []
    for model in names_of(MODELS, settings.models):
        rows += _model(settings, options, model)
        progress(f"monet: {model}")
    return Answer(
        rows=[*rows],
        table=[_line(row) for row in rows],
        bars=list(_judge(rows)),
        notes=list(_notes(rows)),
    )


def _model(
    settings: Settings, options: argparse.Namespace, model: str
) -> list[MonetRow]:
    from benchmarks.proofs.monet_cases import CASES

    shared = {"model": model, "seed": settings.seed, "steps": options.learn}
    cpu, sim = {**shared, "device": "cpu"}, {**shared, "device": "sim"}

    def run(**task: Any) -> Iterator[dict[str, Any]]:
        return run_child(_RUNS, task, settings.threads, environment=HEAP_IS_KEPT)

    (costs,) = run(**cpu, part="costs")
    plain, *plans = run(**sim, part="bytes", **costs)
    codes = list(dict.fromkeys(plan["plan"] for plan in plans))
    timed = list(run(**cpu, part="times", plans=codes, rounds=options.rounds))
    case = CASES[model]
    shape: dict[str, Any] = {
        "model": model,
        "batch": case.batch_size,
        "length": case.length,
    }
    shape["calls"] = len(costs["events"])
    return [
        MonetRow(
            **shape,
            **plain,
            **{name: value for name, value in plan.items() if name != "share"},
            **_times(timed, plan["plan"]),
            **settings.provenance(),
        )
        for plan in plans
    ]


def _times(timed: Sequence[Mapping[str, Any]], plan: str) -> dict[str, Any]:
    """Compare a plan's rounds with the bare model's, one by one."""
    plain = {each["round"]: each["seconds"] for each in timed if not each["plan"]}
    mine = [each for each in timed if each["plan"] == plan]
    ratios = [each["seconds"] / plain[each["round"]] for each in mine]
    return {
        "plain_seconds": median(plain.values()),
        "overhead": median(ratios) - 1.0,
        "rounds": len(ratios),
        "is_exact": all(each["is_exact"] for each in mine),
    }


# ------------------------------------------------------------------ telling


def _line(row: MonetRow) -> dict[str, object]:
    theirs = published(row.model, row.share)
    return {
        "model": row.model,
        "target": row.target,
        "planner": row.planner,
        "plan": row.plan,
        "plain MiB": mebibytes(row.plain_growth_bytes),
        "growth": percent(row.share, 1),
        "reached": row.is_reached,
        "overhead": percent(row.overhead, 1),
        "predicted": percent(row.predicted_seconds / row.plain_seconds, 1),
        "FLOPs": percent(row.recomputed_flops / row.plain_flops, 1),
        "theirs": "" if theirs is None else percent(theirs.overhead, 1),
        "at": "" if theirs is None else percent(theirs.share, 1),
        "planner ms": f"{1000 * row.planner_seconds:.1f}",
        "exact": row.is_exact,
        "binding": row.binding,
    }


def _notes(rows: Sequence[MonetRow]) -> Iterator[str]:
    for row in rows:
        if not row.is_reached:
            least = min(other.share for other in rows if other.model == row.model)
            yield (
                f"{row.model}: {row.target} of {row.plain_growth_bytes / MIB:.1f} MiB "
                f"was not reached by {row.planner}, but {row.share:.1%}, which "
                f"{row.binding} makes; the least of any plan was {least:.1%}"
            )


def _judge(rows: Sequence[MonetRow]) -> Iterator[Bar]:
    yield Bar("plans that are not exact", sum(not row.is_exact for row in rows), 0)
    third = [r for r in rows if r.target == _THIRD and r.planner == "optimal"]
    good = sum(r.is_reached and r.overhead <= _their_overhead(r) for r in third)
    what = "models of which a third costs no more than published"
    yield Bar(what, good, at_least=_LEAST_AS_GOOD)
    solver = max((row.planner_seconds for row in rows), default=None)
    yield Bar("seconds of a planner", solver, SOLVER_SECONDS / 1000)


def _their_overhead(row: MonetRow) -> float:
    """Return the published overhead at a third; for a transformer all models' most."""
    theirs = published(row.model, 1 / 3)
    return RANGE[1] if theirs is None else theirs.overhead
