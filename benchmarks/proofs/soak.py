"""Do 1,000 steps of mixed lengths stay within the budget, and is the budget used?

The first shapes of a run are short, the last are the longest, in between they are
mixed. One process finds a budget. It is what training holds between steps after many
shapes (oneDNN caches kernels by shape: 40 MiB for the ResNet), plus plain training's
growth on the shape at quantile `_RANK` of the run's sizes, so that all larger ones need
a plan. Another process trains under mimose. With ``--limit`` the system or the device's
allocator enforces the budget there, and a third process shows that plain training fails
under the same limit.

    python -m benchmarks.proofs soak
    python -m benchmarks.proofs soak --limit --steps 300 --models bert
    python -m benchmarks.proofs soak --device sim

On an accelerator bytes are reserved memory, in segments of up to 20 MiB. So plain
training at that quantile may grow less than the longest shape with everything
recomputed; there the budget is at least 15% above the latter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, by_name, names_of, volume
from benchmarks.proofs.numbers import mean, mebibytes, percent, quantile
from mimose.bench.child import RunFailedError
from mimose.bench.device import is_cpu
from mimose.bench.machine import limit_memory
from mimose.bench.zoo import Batch
from mimose.exceptions import first_line
from mimose.memory.meters import AllocatorMeter
from mimose.memory.wall import Wall
from mimose.session import attach

QUESTION = "Do mixed lengths stay within the budget, and is the budget used?"
OPTIONS = (
    common.device("cpu"),
    common.count("--steps", 1000, "a model"),
    common.flag("--limit", "let the system enforce the budget"),
)

_SPECS = by_name(
    ModelSpec(
        "bert",
        {"batch": (16, 16), "length": (32, 384)},
        changes={"num_attention_heads": 1},
    ),
    ModelSpec("gpt2", {"batch": (6, 6), "length": (64, 384)}, changes={"n_layer": 12}),
    ModelSpec("t5", {"batch": (8, 8), "source": (32, 320), "target": (16, 192)}),
    ModelSpec(
        "resnet",
        {"batch": (8, 8), "height": (128, 320), "width": (128, 320)},
        multiple=32,
        changes={"depths": [12, 8, 3, 2], "embedding_size": 4},
    ),
)
_ON_DEVICES = {"t5": {"num_layers": 6}}
"""Changes on an accelerator: with four layers each, the longest T5 batch with
everything recomputed reserves as much as two thirds of all do with everything kept."""
_WINDOWS = {"gpt2": 2}
"""Batches an optimizer step, where it is not one."""
_RANK, _DEVICE_RANK = 0.62, 0.52
_EDGE = 0.05
"""Share of a run's steps that are short at the beginning, and longest at the end."""
_SHORT, _MIXED = 0.15, 0.8
"""Ends of the parts of each range that the first and the middle steps come from."""
_N_SEEN = 60
"""Shapes that the budget's process trains on first."""
_OVER_LEAST, _OVER_DEVICE_LEAST = 1.05, 1.15
_PLANNED_BAR, _MARGIN_BAR, _DEVICE_MARGIN_BAR = 0.8, 0.03, 0.01
_RECORDED = (
    *("step", "phase", "observed_growth_bytes", "predicted_growth_bytes"),
    *("recomputed_flops", "retries", "reason", "alloc_retries"),
)


def ask(settings: Settings, options: Options) -> Answer:
    """Train every model, and judge its steps."""
    answer = Answer(path=settings.out / "soak.csv")
    for name in names_of(_SPECS, settings.models):
        task: dict[str, Any] = {
            "model": name,
            "steps": options.steps,
            "is_limited": options.limit,
        }
        (found,) = common.said_by("soak", settings, part="probe", **task)
        task |= found
        own = common.measured("soak", settings, part="train", **task)
        answer.add(name, own, *judge(own, options.steps, settings.device))
        if options.limit:
            answer.notes.append(f"{name}: {_plain_under_limit(settings, task)}")
    return answer


def _plain_under_limit(settings: Settings, task: Task) -> str:
    taken = 0
    try:
        for _ in common.said_by("soak", settings, part="plain", **task):
            taken += 1
    except RunFailedError as error:
        return f"plain training failed at step {taken + 1}: {first_line(error)}"
    return "plain training finished under the limit as well"


def judge(rows: Sequence[Row], steps: int, device: str) -> common.Verdict:
    """Judge one model's steps."""
    margin_bar = _MARGIN_BAR if is_cpu(device) else _DEVICE_MARGIN_BAR
    margin = rows[-1]["margin"] if rows else None
    needing = [row for row in rows if row["needs_plan"]]
    planned = [row for row in needing if row["phase"] == "plan"]
    errors = [abs(row["error"]) for row in planned if row["error"] is not None]
    used = [row["used"] for row in planned if row["is_seen"]]
    over = sum(row["used"] > 1 for row in rows)
    share = mean(row["phase"] == "plan" for row in needing if row["is_seen"])
    retries = sum(row["retries"] for row in rows)
    line = {
        "over": over,
        "need a plan": len(needing),
        "planned of those seen": percent(share, 1),
        "use p50": percent(quantile(used, 0.5), 1),
        "error p50": percent(quantile(errors, 0.5)),
        "error p99": percent(quantile(errors, 0.99)),
        "margin": percent(margin),
        "retries": retries,
        "alloc retries": sum(row["alloc_retries"] or 0 for row in rows),
        "fragmentation": rows[-1]["fragmentation"] if rows else None,
    }
    what = "planned, of those that need one at sizes within those seen"
    bars = [
        Bar("steps done", len(rows), at_least=steps),
        Bar("steps over", over, at_most=0),
        Bar(what, share, at_least=_PLANNED_BAR, is_share=True),
        Bar("margin at the end", margin, at_most=margin_bar, is_share=True),
    ]
    if not is_cpu(device):
        bars.append(Bar("steps run again", retries, at_most=0))
    return line, bars


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Do one part: ``"probe"``, ``"train"`` or ``"plain"``."""
    yield from getattr(_Run(task), task["part"])()


class _Run:
    """A model, the shapes it is trained on, and the loop."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_cpu = task, is_cpu(task["device"])
        spec = _SPECS[task["model"]]
        if not self._is_cpu:
            changes = {**spec.changes, **_ON_DEVICES.get(spec.model, {})}
            spec = replace(spec, changes=changes)
        self._spec = spec
        self._generator = torch.Generator().manual_seed(task["seed"] + 1)
        draw, steps = spec.draw, task["steps"]
        edge = round(_EDGE * steps)
        self._shapes = [
            *(draw(self._generator, 0.0, _SHORT) for _ in range(edge)),
            *(draw(self._generator, 0.0, _MIXED) for _ in range(steps - 2 * edge)),
            *(spec.longest() for _ in range(edge)),
        ]
        window = _WINDOWS.get(spec.model, 1)
        self._loop = Loop(spec.build(task["seed"], task["device"]), window=window)
        self._base_bytes = self._loop.warm_up(self._batch(spec.shortest()))

    def probe(self) -> Rows:
        """Find what the budget leaves over the model, its optimizer and what drifts.

        Raises:
            ValueError: On a CPU, it is not enough for the longest shape with all
                recomputed.
        """
        ranked = sorted(self._shapes, key=self._volume)
        rank = _RANK if self._is_cpu else _DEVICE_RANK
        middle = ranked[int(rank * len(ranked))]
        for place in np.linspace(0, len(ranked) - 1, _N_SEEN).astype(int):
            self._loop.step(self._batch(ranked[place]))
        plain = self._growth(middle)
        loop = self._loop
        with attach(loop.model, common.AMPLE_BYTES, planner="full", meter=loop.meter):
            least = self._growth(self._spec.longest())
        if self._is_cpu and plain < _OVER_LEAST * least:
            msg = (
                f"the shape at rank {rank} grows by {mebibytes(plain)} MiB, and the "
                f"longest by {mebibytes(least)} MiB with everything recomputed"
            )
            raise ValueError(msg)
        floor = 0 if self._is_cpu else int(_OVER_DEVICE_LEAST * least)
        held = loop.meter.resting_bytes() - self._base_bytes - loop.state_bytes
        yield {
            "headroom_bytes": max(plain, floor) + max(0, held),
            "volume": self._volume(middle),
        }

    def plain(self) -> Rows:
        """Train without the library under a limit, the allocator's or the system's."""
        meter, budget_bytes = self._loop.meter, self._budget_bytes()
        with contextlib.ExitStack() as undo:
            if isinstance(meter, AllocatorMeter):
                wall = Wall(meter)
                wall.activate(budget_bytes)
                undo.callback(wall.deactivate)
            for sizes in self._shapes:
                if not isinstance(meter, AllocatorMeter):
                    limit_memory(budget_bytes, meter.live_bytes())
                self._loop.step(self._batch(sizes))
                yield {}

    def train(self) -> Rows:
        """Train under mimose."""
        task, loop, largest = self._task, self._loop, 0
        told = {name: task[name] for name in ("model", "is_limited")}
        with attach(loop.model, self._budget_bytes(), meter=loop.meter) as session:
            for sizes in self._shapes:
                if task["is_limited"] and self._is_cpu:
                    limit_memory(session.budget, loop.meter.live_bytes())
                step = loop.step(self._batch(sizes))
                own, summary = self._volume(sizes), session.summary()
                record = session.records[-1]
                yield {
                    **told,
                    "sizes": json.dumps(sizes),
                    "needs_plan": own > task["volume"],
                    "is_seen": own <= largest,
                    **common.recorded(record, *_RECORDED),
                    **step._asdict(),
                    "budget_bytes": session.budget,
                    "used": step.growth_bytes / (session.budget - step.start_bytes),
                    "error": record.prediction_error,
                    "margin": summary.margin,
                    "fragmentation": summary.fragmentation,
                }
                largest = max(largest, own)

    def _budget_bytes(self) -> int:
        held = self._base_bytes + self._loop.state_bytes
        return int(held + self._task["headroom_bytes"])

    def _batch(self, sizes: Sizes) -> Batch:
        return self._spec.batch(sizes, self._generator)

    def _volume(self, sizes: Sizes) -> int:
        return volume(self._spec.batch(sizes, torch.Generator()))

    def _growth(self, sizes: Sizes) -> int:
        """Measure a shape's growth, begun without cached blocks: the smaller of two.

        Code is mapped in the first.
        """
        readings = []
        for _ in range(2):
            self._loop.optimizer.zero_grad(set_to_none=True)
            self._loop.meter.resting_bytes()
            readings.append(self._loop.step(self._batch(sizes)).growth_bytes)
        return min(readings)
