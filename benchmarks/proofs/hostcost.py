"""What does a step make the host wait for, copy and compute, beyond the bare model's?

On an accelerator the host runs ahead of the device, and a reading of a number makes it
wait. The simulated accelerator counts what would be such a wait on CUDA, and copies of
its random state. Each model trains under plans that recompute every second layer call,
and a twin of it without the library on the same batches. The meter's methods are timed
on the thread that calls them, the timing itself included.

    python -m benchmarks.proofs hostcost
    python -m benchmarks.proofs hostcost --models deep --steps 60
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    recorded,
    rows_of,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import quantile, worst
from mimose.bench.rows import Row
from mimose.bench.zoo import ZOO, Batch, moved
from mimose.measure.meters import AllocatorMeter
from mimose.planners import Plan, PlanningProblem
from mimose.planners.timeline import judge
from mimose.session import attach

QUESTION = "What does a step make the host wait for, copy and compute?"
OPTIONS = (
    ("--device", {"default": "sim", "choices": ["sim"], "help": "that counts"}),
    count("--steps", 200, "planned ones, a model"),
)

_TRIES = 6
"""Steps for each planned one that is wanted, at the most."""
_METER_BAR_MICROSECONDS = 40.0
_MEASURED_BAR = 1
_MICRO = 1e6
_RECORDED = "step", "phase", "cache_hit", "actions", "recomputed", "reason"


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model with its dropout on, and the sizes it is trained on."""

    zoo: str
    """Its name in the zoo."""
    sizes: Sequence[Mapping[str, int]]
    changes: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int, device: str) -> nn.Module:
        """Build the model, in training mode, with weights settled by the seed."""
        torch.manual_seed(seed)
        return ZOO[self.zoo].build(**self.changes).to(device)


_TEXTS = [{"batch": 2, "length": length} for length in (16, 20, 24, 28, 32)]
_PAIRS = [
    {"batch": 2, "source": source, "target": target}
    for source, target in ((16, 8), (24, 12), (32, 24), (20, 16))
]
_IMAGES = [{"batch": 2, "height": size, "width": size} for size in (32, 48, 64)]
_DEEP = {
    "num_hidden_layers": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
_SPECS = {
    "deep": SmallModel("bert", _TEXTS, _DEEP),
    "bert": SmallModel("bert", _TEXTS),
    "gpt2": SmallModel("gpt2", _TEXTS),
    "t5": SmallModel("t5", _PAIRS),
    "vit": SmallModel("vit", _IMAGES),
    "albert": SmallModel("albert", _TEXTS),
    "resnet": SmallModel("resnet", _IMAGES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow(Row):
    """One step under the library, and one of the bare model on the same batch."""

    model: str
    step: int
    phase: str
    cache_hit: bool
    """A plan from the cache: the step is planned, and not measured any more."""
    actions: int
    recomputed: int
    draws: bool
    """Whether the model draws random numbers in its forward."""
    waits: int
    bare_waits: int
    state_copies: int
    """Of the device's random state."""
    bare_state_copies: int
    meter_calls: int
    meter_seconds: float
    """CPU time of the calling threads in the meter's methods."""
    reason: str

    @property
    def is_planned(self) -> bool:
        """Whether it ran under a plan that was made and measured before."""
        return self.phase == "plan" and self.cache_hit

    @property
    def more_waits(self) -> int:
        """Waits beyond those of the bare model."""
        return self.waits - self.bare_waits

    @property
    def copies_beyond(self) -> int:
        """Copies of random state beyond one a recomputed call that draws."""
        allowed = self.recomputed if self.draws else 0
        return max(0, self.state_copies - self.bare_state_copies - allowed)


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Count and time every model."""
    answer = Answer()
    for name in names_of(_SPECS, settings.models):
        own = rows_of(HostRow, "hostcost", settings, model=name, steps=options.steps)
        answer.add(name, own, _summarise(own), _judge(own, options.steps))
    return answer


# ------------------------------------------------------------------ judging


def _parted(rows: Sequence[HostRow]) -> tuple[list[HostRow], list[HostRow]]:
    """Return planned steps, and the others, which are measured."""
    planned, measured = (
        [row for row in rows if row.is_planned == wanted] for wanted in (True, False)
    )
    return planned, measured


def _meter_microseconds(planned: Sequence[HostRow]) -> float | None:
    times = [_MICRO * row.meter_seconds for row in planned]
    return statistics.median(times) if times else None


def _summarise(rows: Sequence[HostRow]) -> dict[str, object]:
    planned, measured = _parted(rows)
    return {
        "planned": len(planned),
        "recomputed": "".join(f"{r.recomputed}/{r.actions}" for r in planned[-1:]),
        "draws": any(row.draws for row in rows),
        "bare waits": dict(Counter(row.bare_waits for row in planned)),
        "more, planned": worst(row.more_waits for row in planned),
        "measured": len(measured),
        "more, measured": worst(row.more_waits for row in measured),
        "state copies": worst(row.state_copies for row in planned),
        "meter calls": worst(row.meter_calls for row in planned),
        "meter µs": _meter_microseconds(planned),
        "meter µs p90": quantile((_MICRO * r.meter_seconds for r in planned), 0.9),
    }


def _judge(rows: Sequence[HostRow], steps: int) -> list[Bar]:
    planned, measured = _parted(rows)
    halved = sum(0 < row.recomputed < row.actions for row in planned)
    waits, more = (worst(r.more_waits for r in own) for own in (planned, measured))
    copies = worst(row.copies_beyond for row in planned)
    micros = _meter_microseconds(planned)
    return [
        Bar("planned steps, some recomputed", halved, at_least=steps),
        Bar("more waits in a planned step", waits, at_most=0),
        Bar("more waits in a measured step", more, at_most=_MEASURED_BAR),
        Bar("copies of random state beyond one a call that draws", copies, at_most=0),
        Bar("the meter's CPU time in µs", micros, at_most=_METER_BAR_MICROSECONDS),
    ]


# ------------------------------------------------------------------ in the child


class EverySecond:
    """A planner that recomputes every second call that can be; it learns as others."""

    name = "every-second"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make the plan; its budget is not read."""
        choice = np.arange(len(problem.events)) % 2 * problem.allowed[:, 1]
        return judge(problem, choice.astype(np.intp), planner=self.name)


class TimedMeter(AllocatorMeter):
    """Adds up the CPU time of its methods, of the outermost call alone."""

    seconds = 0.0
    """CPU time since `start`, of the threads that called."""
    n_calls = 0
    _is_inside = False

    def start(self) -> None:
        """Begin anew."""
        self.seconds, self.n_calls = 0.0, 0


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: TimedMeter, *args: Any) -> Any:
        if self._is_inside:
            return method(self, *args)
        self._is_inside = True
        began = time.thread_time()
        try:
            return method(self, *args)
        finally:
            self.seconds += time.thread_time() - began
            self.n_calls += 1
            self._is_inside = False

    return timed


for _name in (
    *("live_bytes", "peak_bytes", "read", "reset_peak", "usage", "forget_usage"),
    *("give_back", "settled_bytes", "rough_peak_bytes"),
):
    setattr(TimedMeter, _name, _timed(getattr(AllocatorMeter, _name)))


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one model and its twin until enough planned steps are there."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    model = spec.build(task["seed"], task["device"])
    bare, planned = Loop(copy.deepcopy(model)), Loop(model)
    batches = [
        moved(ZOO[spec.zoo].batch(sizes, generator), task["device"])
        for sizes in spec.sizes
    ]
    draws = _draws(bare, batches[0])
    meter = TimedMeter(bare.device)
    n_planned = 0
    with attach(model, AMPLE_BYTES, planner=EverySecond(), meter=meter) as session:
        for step in range(_TRIES * task["steps"] + 30):
            batch = batches[step % len(batches)]
            bare_counts = _counts(bare, batch)
            meter.start()
            counts = _counts(planned, batch)
            record = session.records[-1]
            yield {
                "model": task["model"],
                **recorded(record, *_RECORDED),
                "draws": draws,
                "waits": counts[0],
                "bare_waits": bare_counts[0],
                "state_copies": counts[1],
                "bare_state_copies": bare_counts[1],
                "meter_calls": meter.n_calls,
                "meter_seconds": meter.seconds,
            }
            n_planned += record.phase == "plan" and record.cache_hit
            if n_planned >= task["steps"]:
                return


def _draws(loop: Loop, batch: Batch) -> bool:
    """Whether a forward moves the device's random state."""
    module = torch.get_device_module(loop.device)
    before = module.get_rng_state(loop.device)
    loop.loss(batch)
    return not torch.equal(before, module.get_rng_state(loop.device))


def _counts(loop: Loop, batch: Batch) -> tuple[int, int]:
    """Train on one batch; return waits, and copies of the device's random state."""
    module = torch.get_device_module(loop.device)
    waits, copies = module.waits(), module.rng_copies()
    loop.forward_and_backward(batch)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)
    return module.waits() - waits, module.rng_copies() - copies
