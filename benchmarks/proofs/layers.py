"""What does a layer free under each exact action, and what does that take?

A layer is run alone: bare, and under each action. Bytes are those that are held less
after the forward, as a share of what it saves beyond its input and output. FLOPs are
counted as they run. Times are of the processor, the median of rounds in which all take
turns, on a CPU with a heap that is kept. On an accelerator the backward's peak is read
too, over the level before it.

    python -m benchmarks.proofs layers
    python -m benchmarks.proofs layers --models bert gpt2 --rounds 31
    python -m benchmarks.proofs layers --device sim --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.proofs.common import (
    Answer,
    Bar,
    Settings,
    count,
    device,
    progress,
)
from mimose.bench.child import run_child
from mimose.bench.machine import HEAP_IS_KEPT
from mimose.bench.rows import Row

QUESTION = "What does a layer free under each exact action, and what does it cost?"
OPTIONS = (device("cpu"), count("--rounds", 15), count("--batch", 4, "rows"))

_LAYERS = ("bert", "bert-eager", "gpt2", "t5", "llama", "vit", "resnet")
_FREED = {
    "bert": 0.48,
    "bert-eager": 0.48,
    "gpt2": 0.65,
    "t5": 0.60,
    "llama": 0.48,
    "vit": 0.38,
    "resnet": 0.24,
}
"""Of a layer's bytes, what `lean` is to free at least."""
_WARM_UP = 4
_MOST_TIME = 0.08
"""Extra time of a layer under `lean`, in the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow(Row):
    """One layer under one action."""

    model: str
    action: str
    batch: int
    saved_bytes: int
    freed_bytes: int
    recomputed_flops: int
    extra_time: float
    """As a share of the bare layer's forward and backward."""
    backward_peak_bytes: int
    """Over the level before it; 0 on a CPU."""
    is_exact: bool
    """Whether loss and gradients are the bare layer's to the bit."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Measure every layer under every action."""
    rows: list[LayerRow] = []
    for model in settings.models or _LAYERS:
        task = {"model": model, "rounds": options.rounds, "batch": options.batch}
        whole = {**task, "seed": settings.seed, "device": settings.device}
        rows += [
            LayerRow(**said, **settings.provenance())
            for said in run_child(
                __name__, whole, settings.threads, environment=HEAP_IS_KEPT
            )
        ]
        progress(f"layers: {model}")
    return Answer(rows=[*rows], table=[*_table(rows)], bars=list(_judge(rows)))


def _table(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    return [
        {
            "model": row.model,
            "action": row.action,
            "freed": row.freed_bytes / row.saved_bytes,
            "MFLOP": row.recomputed_flops / 1e6,
            "extra time": row.extra_time,
            "backward MiB": row.backward_peak_bytes / 2**20,
            "exact": row.is_exact,
        }
        for row in rows
    ]


def _judge(rows: Sequence[LayerRow]) -> Iterator[Bar]:
    yield Bar("layers that are not exact", sum(not r.is_exact for r in rows), 0)
    lean = [row for row in rows if row.action == "lean"]
    for row in lean:
        what = f"{row.model}: bytes that lean frees"
        share = row.freed_bytes / row.saved_bytes
        yield Bar(what, share, at_least=_FREED[row.model], is_share=True)
    yield Bar("products that lean runs again", sum(r.recomputed_flops for r in lean), 0)
    mean = statistics.mean(row.extra_time for row in lean)
    yield Bar("extra time of lean, in the mean", mean, _MOST_TIME, is_share=True)


# ------------------------------------------------------------------------- the child


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run one layer under every action, by turns."""
    import copy

    import torch

    import mimose
    from benchmarks.proofs.single_layers import alone, saved_bytes
    from mimose.measure.meters.prediction import PredictionMeter
    from mimose.planners import Everywhere
    from mimose.planners.actions import FINE_MENU

    torch.manual_seed(task["seed"])
    model, x = alone(task["model"], task["batch"])
    place = torch.device(task["device"])
    sessions, runs = [], {}
    saved = 0
    for action in ("", *FINE_MENU.names):
        own = copy.deepcopy(model).to(place)
        own.options = _moved(model.options, place)
        given = x.detach().to(place).requires_grad_()
        saved = saved or saved_bytes(own, given)
        runs[action] = _Run(own, given, place)
        if action:
            session = mimose.attach(
                own,
                "1TiB",
                units=["layers.0"],
                actions=FINE_MENU.names,
                planner=Everywhere(action),
                meter=PredictionMeter(place),  # others have the heap give back
            )
            sessions.append(session)
    for number in range(_WARM_UP + task["rounds"]):
        for run in runs.values():
            run.step(number, is_timed=number >= _WARM_UP)
    bare = runs.pop("")
    for (action, run), session in zip(runs.items(), sessions, strict=True):
        record = session.records[-1]
        yield {
            "model": task["model"],
            "action": action,
            "batch": task["batch"],
            "saved_bytes": saved,
            "freed_bytes": max(0, bare.held_bytes - run.held_bytes),
            "recomputed_flops": record.recomputed_flops,
            "extra_time": run.seconds / bare.seconds - 1.0,
            "backward_peak_bytes": run.peak_bytes,
            "is_exact": run.results_equal(bare) and record.actions == (action,),
        }
        session.detach()


def _moved(options: dict[str, Any], place: Any) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree

    def move(value: Any) -> Any:
        return value.to(place) if isinstance(value, torch.Tensor) else value

    moved: dict[str, Any] = _pytree.tree_map(move, options)
    return moved


class _Run:
    """A layer's own steps.

    Args:
        model: The layer, alone.
        x: What it is given.
        place: Where it runs.
    """

    def __init__(self, model: Any, x: Any, place: Any) -> None:
        self._model = model
        self._x = x
        self._memory = _Memory(place)
        self._times: list[float] = []
        self._results: list[Any] = []
        self.held_bytes = 0
        self.peak_bytes = 0

    @property
    def seconds(self) -> float:
        """The median of the steps that were timed."""
        return statistics.median(self._times)

    def step(self, number: int, *, is_timed: bool) -> None:
        """Run a forward and a backward.

        Args:
            number: Seeds what is drawn.
            is_timed: Whether it counts.
        """
        import torch

        self._model.zero_grad()
        self._x.grad = None
        torch.manual_seed(number)
        if not number:
            self._count_held()
            return
        began = time.process_time()
        loss = self._model(self._x)
        before = self._memory.read()
        loss.backward()
        seconds = time.process_time() - began
        self.peak_bytes = self._memory.peak() - before
        if is_timed:
            self._times.append(seconds)
        gradients = [p.grad for p in self._model.parameters()]
        self._results = [loss.detach(), self._x.grad, *gradients]

    def _count_held(self) -> None:
        from mimose.measure.tracker import StorageTracker

        before = self._memory.read()
        tracker = StorageTracker()
        with tracker:
            loss = self._model(self._x)
        self.held_bytes = self._memory.read() - before or tracker.live_bytes
        del loss

    def results_equal(self, other: _Run) -> bool:
        """Whether the last step's loss and gradients are another's to the bit."""
        import torch

        pairs = zip(self._results, other._results, strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


class _Memory:
    """An accelerator's allocated bytes; 0 on a CPU."""

    def __init__(self, place: Any) -> None:
        import torch

        self._of = None if place.type == "cpu" else torch.get_device_module(place)

    def read(self) -> int:
        """Return what is held, and begin a peak."""
        if self._of is None:
            return 0
        self._of.reset_peak_memory_stats()
        return int(self._of.memory_allocated())

    def peak(self) -> int:
        """Return the highest since then."""
        return 0 if self._of is None else int(self._of.max_memory_allocated())
