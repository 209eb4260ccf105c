"""Does training go on where the device's limit falls below what the plans need?

Another process may take memory at any time. At a third of the steps, and again at two
thirds, the device's limit falls between what the steps so far have needed and what the
longest needs with everything recomputed. The first step that does not fit runs out of
memory and is run again; from then on plans are made for less. The loop hands its steps
to `Session.step`, so that a backward that runs out of memory is run again as well.
Losses are compared with those of the same steps without falls.

    python -m benchmarks.proofs falls
    python -m benchmarks.proofs falls --models gpt2 --steps 60
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
from benchmarks.proofs.models import ModelSpec, names_of
from benchmarks.proofs.numbers import mebibytes, worst
from benchmarks.proofs.soak_run import SPECS, WINDOWS
from mimose.bench.rows import Row
from mimose.bench.zoo import Batch
from mimose.measure.meters import AllocatorMeter
from mimose.measure.meters.usage import read_usage
from mimose.session import Session, attach

QUESTION = "Does training go on where the device's limit falls below what plans need?"
OPTIONS = (device("sim"), count("--steps", 240, "a model"))

_SPECS = {name: SPECS[name] for name in ("bert", "gpt2")}
_FALLS = (0.55, 0.25)
"""Where the limit falls to, between the longest step's least growth and its most."""
_N_FALLS = len(_FALLS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FallRow(Row):
    """One training step, all of its attempts together."""

    model: str
    falls: bool
    """Whether the limit falls in this run."""
    step: int
    sizes: str
    """As JSON."""
    fall: int
    """How many falls there were when it began."""
    limit_bytes: int | None
    """Of reserved bytes, that the device allowed; None before the first fall."""
    needed_before_bytes: int
    """The most that a step had reserved before the last fall, since the one before
    that: more than the limit, where the fall binds."""
    phase: str
    actions: int
    """Calls of layers, of which `kept` kept their activations."""
    kept: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    out_of_memory: int
    """How often an allocation failed, by the device's own count."""
    retries: int
    """How often the step was run again."""
    reason: str
    loss: float
    seconds: float

    @property
    def binds(self) -> bool:
        """Whether memory ran out, below what had been reserved before the fall."""
        limit = self.limit_bytes
        is_below = limit is not None and limit < self.needed_before_bytes
        return is_below and self.out_of_memory > 0


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every model with falls and without."""
    answer = Answer()
    for name in names_of(_SPECS, settings.models):
        task = {"model": name, "steps": options.steps}
        even, fallen = (
            rows_of(FallRow, "falls", settings, falls=falls, **task)
            for falls in (False, True)
        )
        bars = _judge(even, fallen, options.steps)
        answer.add(name, [*even, *fallen], _summarise(even, fallen), bars)
    return answer


# ------------------------------------------------------------------ judging


def _after(rows: Sequence[FallRow], fall: int) -> list[FallRow]:
    return [row for row in rows if row.fall == fall]


def _by_fall(rows: Sequence[FallRow], name: str) -> list[int]:
    """Add a column up over the steps after each fall."""
    falls = range(1, _N_FALLS + 1)
    return [sum(getattr(row, name) for row in _after(rows, fall)) for fall in falls]


def _n_differing(even: Sequence[FallRow], fallen: Sequence[FallRow]) -> int:
    pairs = zip(even, fallen, strict=False)
    return abs(len(even) - len(fallen)) + sum(a.loss != b.loss for a, b in pairs)


def _summarise(even: Sequence[FallRow], fallen: Sequence[FallRow]) -> dict[str, object]:
    firsts = [row for n in range(1, _N_FALLS + 1) for row in _after(fallen, n)[:1]]
    needed = [mebibytes(row.needed_before_bytes) for row in firsts]
    return {
        "steps": len(fallen),
        "falls to MiB": ", ".join(mebibytes(row.limit_bytes) for row in firsts),
        "needed before MiB": ", ".join(needed),
        "out of memory": _by_fall(fallen, "out_of_memory"),
        "run again": _by_fall(fallen, "retries"),
        "why": "; ".join(row.reason for row in fallen if row.retries),
        "losses that differ": _n_differing(even, fallen),
        "recomputed after": [
            sum(row.actions - row.kept for row in _after(fallen, n))
            for n in range(_N_FALLS + 1)
        ],
    }


def _judge(even: Sequence[FallRow], fallen: Sequence[FallRow], steps: int) -> list[Bar]:
    binding = len({row.fall for row in fallen if row.binds})
    ooms, again = (_by_fall(fallen, n) for n in ("out_of_memory", "retries"))
    besides = sum(row.out_of_memory for row in even)
    return [
        Bar("steps done", len(fallen), at_least=steps),
        Bar("falls that bind", binding, at_least=_N_FALLS),
        Bar("out of memory after a fall", worst(ooms), at_most=1),
        Bar("steps run again after a fall", worst(again), at_most=1),
        Bar("out of memory without falls", besides, at_most=0),
        Bar("losses that differ", _n_differing(even, fallen), at_most=0),
    ]


# ------------------------------------------------------------------ in the child


class _StepLoop(Loop):
    """Hands its steps to a session, which runs them again where memory runs out."""

    session: Session
    last_loss = 0.0

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one micro-step; keep its loss in mind."""

        def closure() -> torch.Tensor:
            loss = self.loss(batch) / self.window
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        self.last_loss = self.session.step(closure).item()


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one model, with falls or without."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    model = spec.build(task["seed"], task["device"])
    loop = _StepLoop(model, window=WINDOWS.get(spec.model, 1))
    device = Device(loop)
    loop.warm_up(spec.batch(spec.shortest(), generator))
    limits = device.limits(spec, generator) if task["falls"] else []
    batches = torch.Generator().manual_seed(task["seed"] + 2)
    with (
        contextlib.closing(device),
        attach(model, AMPLE_BYTES, meter=device.meter) as session,
    ):
        loop.session = session
        for step in range(task["steps"]):
            if limits and step == _place(task["steps"], device.n_falls):
                device.fall(limits.pop(0))
            sizes = spec.draw(batches)
            said = device.step(spec.batch(sizes, batches))
            yield {
                "model": spec.model,
                "falls": task["falls"],
                "step": step,
                "sizes": json.dumps(sizes),
                **said,
            }


def _place(steps: int, n_before: int) -> int:
    """Return the step before which the next fall comes."""
    return steps * (n_before + 1) // (_N_FALLS + 1)


class Device:
    """An accelerator whose limit falls, and what steps need of it."""

    def __init__(self, loop: _StepLoop) -> None:
        if not isinstance(loop.meter, AllocatorMeter):
            msg = "falls are those of an accelerator's limit: --device sim or cuda"
            raise TypeError(msg)
        self.meter = loop.meter
        self.n_falls = 0
        self._put_back: Callable[[], None] | None = None
        self._loop = loop
        self._limit_bytes: int | None = None
        self._needed_bytes = 0
        self._needed_before_bytes = 0

    def limits(self, spec: ModelSpec, generator: torch.Generator) -> list[int]:
        """Measure the longest step at its least and its most; return the falls."""
        batch = spec.batch(spec.longest(), generator)
        peaks = []
        for planner in ("full", "none"):
            self.meter.resting_bytes()
            with attach(
                self._loop.model, AMPLE_BYTES, planner=planner, meter=self.meter
            ):
                self.meter.begin_step()
                self._loop.loss(batch).backward()  # type: ignore[no-untyped-call]
                peaks.append(self.meter.step_peak_bytes())
            self._loop.optimizer.zero_grad(set_to_none=True)
        least, most = (peak + self._loop.state_bytes for peak in peaks)
        return [int(least + share * (most - least)) for share in _FALLS]

    def fall(self, limit_bytes: int) -> None:
        """Let the device allow less from now on, as if others had taken the rest."""
        self.meter.give_back()
        self.close()
        self._put_back = self.meter.wall(limit_bytes)
        self.n_falls += 1
        self._limit_bytes = limit_bytes
        self._needed_before_bytes, self._needed_bytes = self._needed_bytes, 0

    def close(self) -> None:
        """Let the device allow again what it did."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def step(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch, and return what was read."""
        session = self._loop.session
        n_before, n_ooms = len(session.records), self._n_ooms()
        measured = self._loop.step(batch)
        records = list(islice(session.records, n_before, None))
        requested = max(record.observed_peak_bytes or 0 for record in records)
        self._needed_bytes = max(self._needed_bytes, measured.peak_bytes)
        return {
            "fall": self.n_falls,
            "limit_bytes": self._limit_bytes,
            "needed_before_bytes": self._needed_before_bytes,
            **recorded(records[-1], "phase", "actions", "kept", "reason"),
            "reserved_peak_bytes": measured.peak_bytes,
            "requested_peak_bytes": requested,
            "out_of_memory": self._n_ooms() - n_ooms,
            "retries": sum(record.retries for record in records),
            "loss": self._loop.last_loss,
            "seconds": measured.seconds,
        }

    def _n_ooms(self) -> int:
        return read_usage(torch.accelerator.current_device_index()).n_ooms
