"""What the proof of soaking trains, and how one of its processes does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.proofs.common import AMPLE_BYTES, recorded
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, argument_sizes, by_name, volume
from mimose.bench.device import is_cpu
from mimose.bench.limits import limit_memory
from mimose.bench.step_meter import MeasuredStep
from mimose.bench.zoo import Batch
from mimose.measure.meters import AllocatorMeter
from mimose.planners import lay_out
from mimose.session import Session, attach

SPECS = by_name(
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
WINDOWS = {"gpt2": 2}
"""Batches an optimizer step, where it is not one."""
_ON_DEVICES = {"t5": {"num_layers": 6}}
"""Changes on an accelerator: with four layers each, the longest T5 batch with
everything recomputed reserves as much as two thirds of all do with everything kept."""
RANK, _DEVICE_RANK = 0.62, 0.52
"""Rank of the shape that just fits without a plan, among the run's; on an accelerator
some longer ones take no more segments."""
_EDGE = 0.05
"""Share of a run's steps that are short at the beginning, and longest at the end."""
_SHORT, _MIXED = 0.15, 0.8
"""Ends of the parts of each range that the first and the middle steps come from."""
_N_SEEN, _N_PROBED = 60, 12
"""Shapes that the budget's process trains on first, and those it measures then."""
_RECORDED = (
    *("step", "phase", "observed_growth_bytes", "predicted_growth_bytes", "cache_hit"),
    *("plan_seconds", "recomputed_flops", "retries", "reason", "alloc_retries"),
)


def spec_on(model: str, device: str) -> ModelSpec:
    """Return a model as it is trained on a device."""
    spec = SPECS[model]
    if is_cpu(device):
        return spec
    return replace(spec, changes={**spec.changes, **_ON_DEVICES.get(model, {})})


class SoakRun:
    """A model, the shapes it is trained on, and the loop.

    Args:
        task: With model, seed, device and steps; to train, with what the budget leaves.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._is_cpu = is_cpu(task["device"])
        self._spec = spec = spec_on(task["model"], task["device"])
        self._generator = torch.Generator().manual_seed(task["seed"] + 1)
        self._shapes = self._draw_all(task["steps"])
        self._loop = Loop(
            spec.build(task["seed"], task["device"]), window=WINDOWS.get(spec.model, 1)
        )
        self._base_bytes = self._loop.warm_up(self._batch(spec.shortest()))

    def probe(self) -> Iterator[Mapping[str, Any]]:
        """Measure plain training across the run, and the longest with all recomputed.

        Last comes what such training holds between its steps, over what it must.
        """
        ranked = self._ranked()
        middle = ranked[int((RANK if self._is_cpu else _DEVICE_RANK) * len(ranked))]
        for sizes in _sample(ranked, _N_SEEN):
            self._step(sizes)
        for sizes in (middle, *_sample(ranked, _N_PROBED)):
            yield self._probed(sizes, is_rank=sizes == middle)
        loop = self._loop
        with attach(loop.model, AMPLE_BYTES, planner="full", meter=loop.meter):
            probed = self._probed(self._spec.longest(), is_full=True)
        yield probed
        held = loop.meter.resting_bytes() - self._base_bytes - loop.state_bytes
        yield {"drift_bytes": max(0, held)}

    def plain(self) -> Iterator[Mapping[str, Any]]:
        """Train without the library under a limit, the allocator's or the system's."""
        meter, budget_bytes = self._loop.meter, self._budget_bytes()
        with contextlib.ExitStack() as undo:
            if isinstance(meter, AllocatorMeter):
                undo.callback(meter.wall(budget_bytes))
            for sizes in self._shapes:
                if not isinstance(meter, AllocatorMeter):
                    limit_memory(budget_bytes, meter.live_bytes())
                self._step(sizes)
                yield {}

    def train(self) -> Iterator[Mapping[str, Any]]:
        """Train under mimose; then tell what keeping everything would have taken."""
        task, loop = self._task, self._loop
        box = _Box()
        with attach(loop.model, self._budget_bytes(), meter=loop.meter) as session:
            for sizes in self._shapes:
                is_seen = box.takes(sizes)
                if task["is_limited"] and self._is_cpu:
                    limit_memory(session.budget_bytes, loop.meter.live_bytes())
                measured = self._step(sizes)
                yield {
                    "model": self._spec.model,
                    "is_limited": task["is_limited"],
                    "is_expandable": task["is_expandable"],
                    "sizes": json.dumps(sizes),
                    "is_seen": is_seen,
                    **_observed(session, measured),
                }
            distinct = {json.dumps(sizes): sizes for sizes in self._shapes}
            yield {
                "keep_all": {
                    text: _keep_all(session, self._batch(sizes))
                    for text, sizes in distinct.items()
                }
            }

    def _budget_bytes(self) -> int:
        given = self._task["headroom_bytes"] + self._task["drift_bytes"]
        return int(self._base_bytes + self._loop.state_bytes + given)

    def _batch(self, sizes: Sizes) -> Batch:
        return self._spec.batch(sizes, self._generator)

    def _step(self, sizes: Sizes) -> MeasuredStep:
        return self._loop.step(self._batch(sizes))

    def _draw_all(self, steps: int) -> list[Sizes]:
        """Draw the run's shapes: short ones, mixed ones, the longest."""
        draw, edge = self._spec.draw, round(_EDGE * steps)
        return [
            *(draw(self._generator, 0.0, _SHORT) for _ in range(edge)),
            *(draw(self._generator, 0.0, _MIXED) for _ in range(steps - 2 * edge)),
            *(self._spec.longest() for _ in range(edge)),
        ]

    def _ranked(self) -> list[Sizes]:
        """Sort the run's shapes by the volume of their batches."""
        other = torch.Generator()
        return sorted(
            self._shapes, key=lambda sizes: volume(self._spec.batch(sizes, other))
        )

    def _probed(
        self, sizes: Sizes, *, is_rank: bool = False, is_full: bool = False
    ) -> Mapping[str, Any]:
        """Measure growth, and that of the level; the smaller of two readings.

        Code is mapped in the first. On an accelerator growth is of reserved bytes,
        begun without free blocks, and the level is requested bytes; on a CPU both are
        the same.
        """
        readings = []
        meter = self._loop.meter
        for _ in range(2):
            self._loop.optimizer.zero_grad(set_to_none=True)
            meter.resting_bytes()
            before = meter.live_bytes()
            growth = self._step(sizes).growth_bytes
            level = growth if self._is_cpu else meter.peak_bytes() - before
            readings.append((growth, level))
        growth, level = min(readings)
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


def _sample(ranked: Sequence[Sizes], count: int) -> list[Sizes]:
    places = np.linspace(0, len(ranked) - 1, count).astype(int)
    return [ranked[place] for place in places]


def _observed(session: Session, measured: MeasuredStep) -> dict[str, Any]:
    record, summary = session.records[-1], session.summary()
    is_reserved = record.reserved_peak_bytes is not None
    return {
        **recorded(record, *_RECORDED),
        "budget_bytes": session.budget_bytes,
        "start_bytes": measured.start_bytes,
        "peak_bytes": measured.peak_bytes,
        "margin": summary.margin,
        "seconds": measured.seconds,
        "requested_peak_bytes": record.observed_peak_bytes if is_reserved else None,
        "fragmentation": summary.fragmentation,
        "flushes": summary.flushes,
    }


def _keep_all(session: Session, batch: Batch) -> float:
    """Predict a batch's growth if everything is kept."""
    problem = session.planning_problem(argument_sizes(batch), start_bytes=0)
    everything = np.zeros(len(problem.events), dtype=np.intp)
    return lay_out(problem, everything).peak_bytes
