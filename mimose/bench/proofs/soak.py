"""Do 1,000 steps of mixed lengths stay within the budget, and is the budget used?

For each model one process finds a budget: it measures plain training on shapes of the
run, and training with everything recomputed on the longest. The budget leaves what
plain training grows by on the shape at `_RANK` of the run's, so that all longer ones
need a plan, over what such training holds between its steps once it has seen many
shapes (oneDNN keeps kernels by shape: 40 MiB for the ResNet). Another process trains
under mimose; with ``--limit`` the system enforces the budget there, and a third shows
that plain training fails under the same limit.

    python -m mimose.bench.proofs soak
    python -m mimose.bench.proofs soak --limit --steps 300 --models bert
    python -m mimose.bench.proofs soak --device sim --expandable

On an accelerator bytes are reserved ones, taken in segments of up to 20 MiB, so that
plain training at its rank can grow by less than the longest shape with everything
recomputed: the budget leaves 15% over the latter there, if that is more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mimose.bench.child import RunFailedError
from mimose.bench.device import is_cpu
from mimose.bench.limits import SLACK_BYTES, limit_memory
from mimose.bench.proofs.common import (
    MIB,
    Answer,
    Bar,
    Settings,
    mean,
    mebibytes,
    percent,
    progress,
    quantile,
    said_by,
    worst,
)
from mimose.bench.proofs.loop import Loop
from mimose.bench.proofs.models import (
    ModelSpec,
    Sizes,
    argument_sizes,
    names_of,
    spec_of,
    volume,
)
from mimose.bench.rows import Row
from mimose.bench.step_meter import MeasuredStep
from mimose.bench.zoo import Batch
from mimose.exceptions import first_line
from mimose.measure.meters import AllocatorMeter
from mimose.planners import lay_out
from mimose.records import StepRecord
from mimose.session import Session, attach
from mimose.usage import at_least_one

QUESTION = "Do mixed lengths stay within the budget, and is the budget used?"

SPECS = (
    ModelSpec(
        model="bert",
        sizes={"batch": (16, 16), "length": (32, 384)},
        changes={"num_attention_heads": 1},
    ),
    ModelSpec(
        model="gpt2",
        sizes={"batch": (6, 6), "length": (64, 384)},
        changes={"n_layer": 12},
    ),
    ModelSpec(
        model="t5", sizes={"batch": (8, 8), "source": (32, 320), "target": (16, 192)}
    ),
    ModelSpec(
        model="resnet",
        sizes={"batch": (8, 8), "height": (128, 320), "width": (128, 320)},
        multiple=32,
        changes={"depths": [12, 8, 3, 2], "embedding_size": 4},
    ),
)
WINDOWS = {"gpt2": 2}
"""Batches an optimizer step, where it is not one."""
_ON_DEVICES = {"t5": {"num_layers": 6}}
"""Changes on an accelerator: with four layers each, the longest T5 batch with
everything recomputed reserves as much as two thirds of all do with everything kept."""
_RANK, _DEVICE_RANK = 0.62, 0.52
"""Rank of the shape that just fits without a plan, among the run's; on an accelerator
some longer ones take no more segments."""
_EDGE = 0.05
"""Share of a run's steps that are short at the beginning, and longest at the end."""
_SHORT, _MIXED = 0.15, 0.8
"""Ends of the parts of each range that the first and the middle steps come from."""
_N_SEEN, _N_PROBED = 60, 12
"""Shapes that the budget's process trains on first, and those it measures then."""
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
    given_back: int | None
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this proof's own options."""
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--steps", type=at_least_one, default=1000, help="a model")
    parser.add_argument(
        "--limit", action="store_true", help="let the system enforce the budget"
    )
    parser.add_argument(
        "--expandable", action="store_true", help="segments of the device can grow"
    )


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
        bars = _judge(name, own, options.steps, settings.device)
        answer.add(own, _summarise(name, own, truth), bars)
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
    """Choose what the budget leaves: the growth at `_RANK`, if all can be recomputed.

    Raises:
        ValueError: On a CPU, it is not enough for the longest shape with all
            recomputed.
    """
    plain = next(p["growth_bytes"] for p in probe if p.get("is_rank"))
    least = next(p["growth_bytes"] for p in probe if p.get("is_full"))
    if is_cpu(device) and plain < _OVER_LEAST * least:
        msg = (
            f"the shape at rank {_RANK} grows by {mebibytes(plain)} MiB, and the "
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
    model: str, rows: Sequence[SoakRow], truth: Mapping[str, object]
) -> dict[str, object]:
    needing = [row for row in rows if row.needs_plan]
    planned = [row for row in needing if row.is_seen and row.phase == "plan"]
    errors = [row.error for row in needing if row.error is not None]
    return {
        "model": model,
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
        "given back": rows[-1].given_back if rows else None,
        "fragmentation": rows[-1].fragmentation if rows else None,
        "step p50 s": quantile((row.seconds for row in rows), 0.5),
        "all s": sum(row.seconds for row in rows),
    }


def _planned_share(rows: Sequence[SoakRow]) -> float | None:
    return mean(row.phase == "plan" for row in rows if row.needs_plan and row.is_seen)


def _judge(model: str, rows: Sequence[SoakRow], steps: int, device: str) -> list[Bar]:
    over = sum(row.is_over for row in rows)
    needing = sum(row.needs_plan for row in rows)
    return [
        Bar(f"{model}: steps done", len(rows), at_least=steps),
        Bar(f"{model}: steps over", over, at_most=0),
        Bar(f"{model}: steps that need a plan", needing, at_least=_NEEDED_BAR * steps),
        Bar(
            f"{model}: planned, of those that need one at sizes within those seen",
            _planned_share(rows),
            at_least=_PLANNED_BAR,
            is_share=True,
        ),
        Bar(
            f"{model}: margin at the end",
            rows[-1].margin if rows else None,
            at_most=_MARGIN_BAR if is_cpu(device) else _DEVICE_MARGIN_BAR,
            is_share=True,
        ),
        *([] if is_cpu(device) else [_retries_bar(model, rows)]),
    ]


def _retries_bar(model: str, rows: Sequence[SoakRow]) -> Bar:
    """Free blocks given back by a wall are its doing; memory that runs out is not."""
    if any(row.is_limited for row in rows):
        again = sum(row.retries for row in rows)
        return Bar(f"{model}: steps run again behind the wall", again, at_most=0)
    retries = sum(row.alloc_retries or 0 for row in rows)
    return Bar(f"{model}: allocation retries", retries, at_most=0)


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
    spec = spec_on(task["model"], task["device"])
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    shapes = _shapes(spec, task["steps"], generator)
    loop = Loop(
        spec.build(task["seed"], task["device"]),
        window=WINDOWS.get(spec.model, 1),
    )
    base_bytes = loop.warm_up(spec.batch(spec.shortest(), generator))
    if task["part"] == "probe":
        yield from _probe(spec, loop, shapes, generator)
        held = loop.meter.resting_bytes() - base_bytes - loop.state_bytes
        yield {"drift_bytes": max(0, held)}
        return
    budget_bytes = base_bytes + loop.state_bytes + task["headroom_bytes"]
    budget_bytes += task["drift_bytes"]
    if task["part"] == "plain":
        yield from _plain(spec, loop, shapes, budget_bytes, generator)
        return
    on_device = task["is_limited"] and not is_cpu(task["device"])
    with attach(
        loop.model, budget_bytes, meter=loop.meter, hard_limit=on_device
    ) as session:
        yield from _train_on(spec, loop, session, shapes, task, generator)


def spec_on(model: str, device: str) -> ModelSpec:
    """Return a model's spec, as it is trained on a device."""
    spec = spec_of(SPECS, model)
    if is_cpu(device):
        return spec
    return replace(spec, changes={**spec.changes, **_ON_DEVICES.get(model, {})})


def _plain(
    spec: ModelSpec,
    loop: Loop,
    shapes: Sequence[Sizes],
    budget_bytes: int,
    generator: torch.Generator,
) -> Iterator[Mapping[str, Any]]:
    """Train without the library under the limit: the allocator's, or the system's."""
    with contextlib.ExitStack() as undo:
        if isinstance(loop.meter, AllocatorMeter):
            undo.callback(loop.meter.wall(budget_bytes))
        for sizes in shapes:
            if not isinstance(loop.meter, AllocatorMeter):
                limit_memory(budget_bytes, loop.meter.live_bytes())
            loop.step(spec.batch(sizes, generator))
            yield {}


def _shapes(spec: ModelSpec, steps: int, generator: torch.Generator) -> list[Sizes]:
    """Draw the run's shapes: short ones, mixed ones, the longest."""
    edge = round(_EDGE * steps)
    return [
        *(spec.draw(generator, 0.0, _SHORT) for _ in range(edge)),
        *(spec.draw(generator, 0.0, _MIXED) for _ in range(steps - 2 * edge)),
        *(spec.longest() for _ in range(edge)),
    ]


def _ranked(spec: ModelSpec, shapes: Sequence[Sizes]) -> list[Sizes]:
    """Sort by the volume of their batches."""
    generator = torch.Generator()
    return sorted(shapes, key=lambda sizes: volume(spec.batch(sizes, generator)))


def _probe(
    spec: ModelSpec, loop: Loop, shapes: Sequence[Sizes], generator: torch.Generator
) -> Iterator[Mapping[str, Any]]:
    """Measure plain training across the run, and the longest with all recomputed."""
    ranked = _ranked(spec, shapes)
    rank = _RANK if loop.device.type == "cpu" else _DEVICE_RANK
    middle = ranked[int(rank * len(ranked))]
    for sizes in _sample(ranked, _N_SEEN):
        loop.step(spec.batch(sizes, generator))
    for sizes in (middle, *_sample(ranked, _N_PROBED)):
        growths = _growth(loop, spec, sizes, generator)
        yield _probed(sizes, growths, is_rank=sizes == middle)
    with attach(loop.model, 2**40, planner="full", meter=loop.meter):
        growths = _growth(loop, spec, spec.longest(), generator)
    yield _probed(spec.longest(), growths, is_full=True)


def _sample(ranked: Sequence[Sizes], count: int) -> list[Sizes]:
    places = np.linspace(0, len(ranked) - 1, count).astype(int)
    return [ranked[place] for place in places]


def _growth(
    loop: Loop, spec: ModelSpec, sizes: Sizes, generator: torch.Generator
) -> tuple[int, int]:
    """Return growth, and that of the level; the smaller of two readings.

    Code is mapped in the first. On an accelerator growth is of reserved bytes, begun
    without free blocks, and the level is requested bytes; on a CPU both are the same.
    """
    readings = []
    for _ in range(2):
        loop.optimizer.zero_grad(set_to_none=True)
        loop.meter.resting_bytes()
        level = loop.meter.live_bytes()
        measured = loop.step(spec.batch(sizes, generator))
        growth = measured.growth_bytes
        if loop.device.type == "cpu":
            readings.append((growth, growth))
        else:
            readings.append((growth, loop.meter.peak_bytes() - level))
    return min(readings)


def _probed(
    sizes: Sizes,
    growths: tuple[int, int],
    *,
    is_rank: bool = False,
    is_full: bool = False,
) -> Mapping[str, Any]:
    growth, level = growths
    return {
        "sizes": json.dumps(sizes),
        "growth_bytes": growth,
        "level_growth_bytes": level,
        "is_rank": is_rank,
        "is_full": is_full,
    }


class _Box:
    """The range of each size seen so far."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}

    def takes(self, sizes: Sizes) -> bool:
        """Tell whether sizes lie within, and widen the ranges to hold them."""
        is_inside = bool(self._ranges)
        for name, size in sizes.items():
            low, high = self._ranges.get(name, (size, size))
            is_inside = is_inside and low <= size <= high
            self._ranges[name] = min(low, size), max(high, size)
        return is_inside


def _train_on(
    spec: ModelSpec,
    loop: Loop,
    session: Session,
    shapes: Sequence[Sizes],
    task: Mapping[str, Any],
    generator: torch.Generator,
) -> Iterator[Mapping[str, Any]]:
    box = _Box()
    for sizes in shapes:
        is_seen = box.takes(sizes)
        if task["is_limited"] and is_cpu(task["device"]):
            limit_memory(session.budget_bytes, loop.meter.live_bytes())
        measured = loop.step(spec.batch(sizes, generator))
        yield {
            "model": spec.model,
            "is_limited": task["is_limited"],
            "is_expandable": task["is_expandable"],
            "sizes": json.dumps(sizes),
            "is_seen": is_seen,
            **_observed(session, measured),
        }
    distinct = {json.dumps(sizes): sizes for sizes in shapes}
    yield {
        "keep_all": {
            text: _keep_all(session, spec.batch(sizes, generator))
            for text, sizes in distinct.items()
        }
    }


def _observed(session: Session, measured: MeasuredStep) -> dict[str, Any]:
    record = session.records[-1]
    return {
        "step": record.step,
        "phase": record.phase,
        "budget_bytes": session.budget_bytes,
        "start_bytes": measured.start_bytes,
        "peak_bytes": measured.peak_bytes,
        "observed_growth_bytes": record.observed_growth_bytes,
        "predicted_growth_bytes": record.predicted_growth_bytes,
        "margin": session.summary().margin,
        "cache_hit": record.cache_hit,
        "plan_seconds": record.plan_seconds,
        "seconds": measured.seconds,
        "recomputed_flops": record.recomputed_flops,
        "retries": record.retries,
        "reason": record.reason,
        **_reserved(session, record),
    }


def _reserved(session: Session, record: StepRecord) -> dict[str, Any]:
    summary = session.summary()
    is_reserved = record.reserved_peak_bytes is not None
    return {
        "requested_peak_bytes": record.observed_peak_bytes if is_reserved else None,
        "alloc_retries": record.alloc_retries,
        "fragmentation": summary.fragmentation,
        "given_back": summary.given_back,
    }


def _keep_all(session: Session, batch: Batch) -> float:
    """Predict a batch's growth if everything is kept."""
    problem = session.planning_problem(argument_sizes(batch), start_bytes=0)
    everything = np.zeros(len(problem.events), dtype=np.intp)
    return lay_out(problem, everything).peak_bytes
