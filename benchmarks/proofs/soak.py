"""Do 1,000 steps of mixed lengths stay within the budget, and is the budget used?

For each model one process finds a budget: it measures plain training on shapes of the
run, and training with everything recomputed on the longest. The budget leaves what
plain training grows by on the shape at `RANK` of the run's, so that all longer ones
need a plan, over what such training holds between its steps once it has seen many
shapes (oneDNN keeps kernels by shape: 40 MiB for the ResNet). Another process trains
under mimose; with ``--limit`` the system enforces the budget there, and a third shows
that plain training fails under the same limit.

    python -m benchmarks.proofs soak
    python -m benchmarks.proofs soak --limit --steps 300 --models bert
    python -m benchmarks.proofs soak --device sim --expandable

On an accelerator bytes are reserved ones, taken in segments of up to 20 MiB, so that
plain training at its rank can grow by less than the longest shape with everything
recomputed: the budget leaves 15% over the latter there, if that is more.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.proofs.common import (
    EXPANDABLE,
    Answer,
    Bar,
    Settings,
    count,
    device,
    flag,
    progress,
    said_by,
)
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import MIB, mean, mebibytes, percent, quantile, worst
from benchmarks.proofs.soak_run import RANK, SPECS, SoakRun
from mimose.bench.child import RunFailedError
from mimose.bench.device import is_cpu
from mimose.bench.limits import SLACK_BYTES
from mimose.bench.rows import Row
from mimose.exceptions import first_line

QUESTION = "Do mixed lengths stay within the budget, and is the budget used?"
OPTIONS = (
    device("cpu"),
    count("--steps", 1000, "a model"),
    flag("--limit", "let the system enforce the budget"),
    EXPANDABLE,
)

_MARGIN_BAR, _PLANNED_BAR, _NEEDED_BAR = 0.03, 0.8, 0.3
_DEVICE_MARGIN_BAR = 0.01
"""Readings of an allocator are exact."""
_OVER_LEAST, _OVER_DEVICE_LEAST = 1.05, 1.15
"""The budget leaves so much of the longest shape's least growth, and on an accelerator
for the difference between segments and what is requested of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRow(Row):
    """One training step under mimose."""

    model: str
    is_limited: bool
    """Whether the system, or the device's allocator, enforced the budget."""
    is_expandable: bool
    """Whether the device's segments could grow."""
    step: int
    sizes: str
    """As JSON."""
    is_seen: bool
    """Whether each size lies within those of the steps before."""
    keep_all_growth_bytes: float
    """What keeping everything would grow by, predicted after the run: on an
    accelerator of reserved bytes, by the ratio of plain training at the budget's
    shape."""
    phase: str
    budget_bytes: int
    start_bytes: int
    peak_bytes: int
    """Read from outside, over every reset and the optimizer's step."""
    observed_growth_bytes: int | None
    """The session's reading, to the end of backward."""
    predicted_growth_bytes: float | None
    margin: float
    """After the step, as a share of growth."""
    cache_hit: bool
    plan_seconds: float
    seconds: float
    recomputed_flops: int
    retries: int
    reason: str
    requested_peak_bytes: int | None
    """On an accelerator, of the session's reading; the budget is about reserved
    bytes, which `peak_bytes` are there."""
    alloc_retries: int | None
    """How often the allocator had to give back its free blocks to go on."""
    fragmentation: float | None
    """Reserved growth that is counted for each byte of growth, after the step."""
    flushes: int | None
    """How often the session has given free blocks back, so far."""

    @property
    def needs_plan(self) -> bool:
        """Whether keeping everything would exceed the budget."""
        return self.start_bytes + self.keep_all_growth_bytes > self.budget_bytes

    @property
    def is_over(self) -> bool:
        """Whether the step held more than the budget."""
        return self.peak_bytes > self.budget_bytes

    @property
    def use(self) -> float:
        """Growth as a share of what the budget left for it."""
        return (self.peak_bytes - self.start_bytes) / (
            self.budget_bytes - self.start_bytes
        )

    @property
    def error(self) -> float | None:
        """|observed − predicted| growth over the predicted; None outside `plan`."""
        predicted, observed = self.predicted_growth_bytes, self.observed_growth_bytes
        if self.phase != "plan" or not predicted or observed is None:
            return None
        return abs(observed - predicted) / predicted


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every model, and judge its steps."""
    answer = Answer()
    for name in names_of(SPECS, settings.models):
        task: dict[str, Any] = {
            "model": name,
            "steps": options.steps,
            "is_expandable": options.expandable,
        }
        probe = list(said_by("soak", settings, part="probe", **task))
        task |= {**_headroom(probe, settings.device), "is_limited": options.limit}
        own, keep_all = _train(settings, task)
        truth = _truth(probe, keep_all, task["level_headroom_bytes"])
        bars = _judge(own, options.steps, settings.device)
        answer.add(name, own, _summarise(own, truth), bars)
        if options.limit:
            answer.notes.append(_plain_under_limit(settings, task))
    return answer


def _train(
    settings: Settings, task: Mapping[str, Any]
) -> tuple[list[SoakRow], Mapping[str, float]]:
    """Return the steps, and by sizes what keeping everything would grow by."""
    steps: list[Mapping[str, Any]] = []
    keep_all: Mapping[str, float] = {}
    for said in said_by("soak", settings, part="train", **task):
        if "keep_all" in said:
            keep_all = said["keep_all"]
            continue
        steps.append({**said, **settings.provenance()})
        if len(steps) % 100 == 0:
            progress(f"soak {task['model']}: {len(steps)} of {task['steps']} steps")
    ratio = task["headroom_bytes"] / task["level_headroom_bytes"]
    rows = [
        SoakRow(**step, keep_all_growth_bytes=ratio * keep_all[step["sizes"]])
        for step in steps
    ]
    return rows, keep_all


def _plain_under_limit(settings: Settings, task: Mapping[str, Any]) -> str:
    taken, slack = 0, SLACK_BYTES if is_cpu(settings.device) else 0
    try:
        for _ in said_by("soak", settings, part="plain", **task):
            taken += 1
    except RunFailedError as error:
        return (
            f"{task['model']}: plain training under the same limit (slack "
            f"{slack / MIB:.0f} MiB) failed at step {taken + 1}: {first_line(error)}"
        )
    return f"{task['model']}: plain training finished under the limit as well"


def _headroom(probe: Sequence[Mapping[str, Any]], device: str) -> dict[str, int]:
    """Choose what the budget leaves: the growth at `RANK`, if all can be recomputed.

    Raises:
        ValueError: On a CPU, it is not enough for the longest shape with all
            recomputed.
    """
    plain = next(p["growth_bytes"] for p in probe if p.get("is_rank"))
    least = next(p["growth_bytes"] for p in probe if p.get("is_full"))
    if is_cpu(device) and plain < _OVER_LEAST * least:
        msg = (
            f"the shape at rank {RANK} grows by {mebibytes(plain)} MiB, and the "
            f"longest by {mebibytes(least)} MiB with everything recomputed"
        )
        raise ValueError(msg)
    drift = next(p["drift_bytes"] for p in probe if "drift_bytes" in p)
    level = next(p["level_growth_bytes"] for p in probe if p.get("is_rank"))
    most = plain if is_cpu(device) else max(plain, int(_OVER_DEVICE_LEAST * least))
    return {
        "headroom_bytes": most,
        "level_headroom_bytes": level * most // plain,
        "drift_bytes": drift,
    }


# ------------------------------------------------------------------ judging


def _summarise(
    rows: Sequence[SoakRow], truth: Mapping[str, object]
) -> dict[str, object]:
    needing = [row for row in rows if row.needs_plan]
    planned = [row for row in needing if row.is_seen and row.phase == "plan"]
    errors = [row.error for row in needing if row.error is not None]
    return {
        "steps": len(rows),
        "over": sum(row.is_over for row in rows),
        "need a plan": len(needing),
        "planned of those seen": percent(_planned_share(rows), 1),
        "use p50": percent(quantile((row.use for row in planned), 0.5), 1),
        "use mean": percent(mean(row.use for row in planned), 1),
        "error p50": percent(quantile(errors, 0.5)),
        "error p99": percent(quantile(errors, 0.99)),
        "margin": percent(rows[-1].margin) if rows else "",
        **truth,
        "phases": dict(Counter(row.phase for row in rows)),
        "retries": sum(row.retries for row in rows),
        "alloc retries": sum(row.alloc_retries or 0 for row in rows),
        "flushes": rows[-1].flushes if rows else None,
        "fragmentation": rows[-1].fragmentation if rows else None,
        "step p50 s": quantile((row.seconds for row in rows), 0.5),
        "all s": sum(row.seconds for row in rows),
    }


def _planned_share(rows: Sequence[SoakRow]) -> float | None:
    return mean(row.phase == "plan" for row in rows if row.needs_plan and row.is_seen)


def _judge(rows: Sequence[SoakRow], steps: int, device: str) -> list[Bar]:
    over = sum(row.is_over for row in rows)
    needing = sum(row.needs_plan for row in rows)
    planned = "planned, of those that need one at sizes within those seen"
    margin = rows[-1].margin if rows else None
    margin_bar = _MARGIN_BAR if is_cpu(device) else _DEVICE_MARGIN_BAR
    bars = [
        Bar("steps done", len(rows), at_least=steps),
        Bar("steps over", over, at_most=0),
        Bar("steps that need a plan", needing, at_least=_NEEDED_BAR * steps),
        Bar(planned, _planned_share(rows), at_least=_PLANNED_BAR, is_share=True),
        Bar("margin at the end", margin, at_most=margin_bar, is_share=True),
    ]
    return bars if is_cpu(device) else [*bars, _retries_bar(rows)]


def _retries_bar(rows: Sequence[SoakRow]) -> Bar:
    """Free blocks given back by a wall are its doing; memory that runs out is not."""
    if any(row.is_limited for row in rows):
        again = sum(row.retries for row in rows)
        return Bar("steps run again behind the wall", again, at_most=0)
    retries = sum(row.alloc_retries or 0 for row in rows)
    return Bar("allocation retries", retries, at_most=0)


def _truth(
    probe: Sequence[Mapping[str, Any]], keep_all: Mapping[str, float], headroom: int
) -> dict[str, object]:
    """Compare the predicted growth of keeping everything with plain training's."""
    pairs = [
        (keep_all[p["sizes"]], p["level_growth_bytes"])
        for p in probe
        if p.get("sizes") in keep_all and not p["is_full"]
    ]
    wrong = sum((said > headroom) != (true > headroom) for said, true in pairs)
    off = worst(abs(said - true) / true for said, true in pairs if true > 50 * MIB)
    return {
        "keep-all off by": percent(off, 1),
        "need misjudged": f"{wrong} of {len(pairs)}",
    }


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Do one part: ``"probe"``, ``"train"`` or ``"plain"``."""
    yield from getattr(SoakRun(task), task["part"])()
