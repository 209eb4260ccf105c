"""What does learning cost: iterations, forwards, FLOPs and time?

For each model a session trains on shapes drawn at random until a plan keeps
something. Beside it, in the same process and on the same batches, a twin trains with
everything recomputed, as usual checkpointing does; the two take turns. Once they run
by the clock. Once calls of the layers' own forwards and the FLOPs of whole steps are
counted, so that a second forward could not hide.

    python -m benchmarks.proofs collection
    python -m benchmarks.proofs collection --models bert
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    recorded,
    rows_of,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, names_of
from benchmarks.proofs.numbers import percent
from mimose.bench.rows import Row
from mimose.bench.zoo import ZOO, Batch
from mimose.measure.tracker import StorageTracker
from mimose.session import attach
from mimose.watch.units import find_units

QUESTION = "What does learning cost: iterations, forwards, FLOPs and time?"
OPTIONS = (count("--steps", 20, "at the most, a model"),)

_MULTIPLES = {"vit": 16, "resnet": 32}
_SPECS = {
    name: ModelSpec(name, entry.sizes, _MULTIPLES.get(name, 1))
    for name, entry in ZOO.items()
}
_ITERATIONS_BAR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionRow(Row):
    """One step of the session, and of its twin on the same batch."""

    model: str
    is_counted: bool
    """Whether FLOPs were counted, which takes time; else they are 0."""
    step: int
    sizes: str
    """As JSON."""
    phase: str
    kept: int
    """Events whose activations were kept."""
    forward_calls: int
    """Of the layers' own forwards, before backward began."""
    recompute_calls: int
    """The same in backward."""
    full_forward_calls: int
    """The twin's, with everything recomputed."""
    full_recompute_calls: int
    flops: int
    """Of the whole step: forward, recomputation, backward."""
    full_flops: int
    seconds: float
    full_seconds: float


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Count, for every model."""
    answer = Answer()
    for name in names_of(_SPECS, settings.models):
        own: list[CollectionRow] = []
        for is_counted in (False, True):
            task = {"model": name, "steps": options.steps, "is_counted": is_counted}
            own += rows_of(CollectionRow, "collection", settings, **task)
        before = _before_first_plan(own)
        collecting = [row for row in own if row.phase == "collect"]
        beyond = sum(map(_second_forwards, collecting))
        bars = [
            Bar("iterations before a plan", before, _ITERATIONS_BAR),
            Bar("forwards beyond full recomputation's", beyond, 0),
        ]
        answer.add(name, own, _summarise(before, collecting), bars)
    return answer


def _before_first_plan(rows: Sequence[CollectionRow]) -> int | None:
    """Return the steps before one that kept something: the more of the two runs."""
    firsts = [
        min((r.step for r in rows if r.kept and r.is_counted == kind), default=None)
        for kind in (False, True)
    ]
    return None if None in firsts else max(first or 0 for first in firsts)


def _second_forwards(row: CollectionRow) -> int:
    """Return the calls of layers that usual checkpointing does not make."""
    calls = row.forward_calls + row.recompute_calls
    return calls - row.full_forward_calls - row.full_recompute_calls


def _summarise(
    before: int | None, collecting: Sequence[CollectionRow]
) -> dict[str, object]:
    flops = sum(row.flops for row in collecting)
    full = sum(row.full_flops for row in collecting)
    # The first step pays for what a process does only once.
    timed = [row for row in collecting if not row.is_counted][1:]
    ratios = [row.seconds / row.full_seconds for row in timed]
    return {
        "iterations before a plan": before,
        "forward calls": sum(row.forward_calls for row in collecting),
        "recompute calls": sum(row.recompute_calls for row in collecting),
        "FLOPs over full recomputation": percent(flops / full - 1 if full else None),
        "time ÷ full recomputation": statistics.median(ratios) if ratios else None,
    }


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train the session and its twin in turn, until a plan keeps something."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    learning, full = (
        CountedLoop(spec.build(task["seed"]), is_counted=task["is_counted"])
        for _ in range(2)
    )
    for loop in (learning, full):
        loop.warm_up(spec.batch(spec.shortest(), generator))
    session = attach(learning.model, AMPLE_BYTES, meter=learning.meter)
    attach(full.model, AMPLE_BYTES, planner="full", meter=full.meter)
    for step in range(task["steps"]):
        sizes = spec.draw(generator)
        batch = spec.batch(sizes, generator)
        mine, twin = learning.counted_step(batch), full.counted_step(batch)
        told = recorded(session.records[-1], "phase", "kept")
        yield {
            "model": spec.model,
            "is_counted": task["is_counted"],
            "step": step,
            "sizes": json.dumps(sizes),
            **told,
            **mine,
            **{f"full_{name}": value for name, value in twin.items()},
        }
        if told["kept"]:
            return


class CountedLoop(Loop):
    """A loop that counts its layers' calls and, if asked, whole steps' FLOPs.

    Args:
        model: Not yet attached to: the session's patches go over the counters.
        is_counted: Whether to count FLOPs.
    """

    def __init__(self, model: nn.Module, *, is_counted: bool) -> None:
        super().__init__(model)
        self._is_counted = is_counted
        self._in_backward = False
        self._calls = [0, 0]
        for _, module in find_units(model, None):
            vars(module)["forward"] = functools.partial(self._call, module.forward)

    def counted_step(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; return the counts."""
        self._calls = [0, 0]
        tracker = StorageTracker()
        with tracker if self._is_counted else contextlib.nullcontext():
            measured = self.step(batch)
        return {
            "forward_calls": self._calls[0],
            "recompute_calls": self._calls[1],
            "flops": tracker.flops,
            "seconds": measured.seconds,
        }

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one step; the layers' calls in backward are recomputations."""
        loss = self.loss(batch)
        self._in_backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        self._in_backward = False

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls[self._in_backward] += 1
        return forward(*args, **kwargs)
