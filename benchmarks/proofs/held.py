"""Are an event's held bytes predicted right at shapes that were never seen?

A session learns from a few measured steps. Then, at unseen shapes, its prediction for
every event is set against a count: a second model, never attached to, runs a plain
forward with a `StorageTracker` round each layer's own.

    python -m benchmarks.proofs held
    python -m benchmarks.proofs held --shapes 5 --models t5
"""

from __future__ import annotations

import argparse
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
    rows_of,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, argument_sizes, by_name, names_of
from benchmarks.proofs.numbers import percent, quantile, worst
from mimose.bench.rows import Row
from mimose.measure.tracker import StorageTracker
from mimose.session import attach
from mimose.watch.patch import Patch
from mimose.watch.units import find_units

QUESTION = "Are held bytes predicted right at shapes never seen?"
OPTIONS = (
    count("--steps", 16, "to learn from"),
    count("--shapes", 30, "unseen, a model"),
)

_IMAGE = {"batch": (2, 8), "height": (96, 224), "width": (96, 224)}
_SPECS = by_name(
    ModelSpec("bert", {"batch": (2, 12), "length": (16, 256)}),
    ModelSpec("gpt2", {"batch": (2, 8), "length": (16, 256)}),
    ModelSpec("t5", {"batch": (2, 8), "source": (16, 192), "target": (16, 192)}),
    ModelSpec("vit", _IMAGE, multiple=16),
    ModelSpec("albert", {"batch": (2, 12), "length": (16, 256)}),
    ModelSpec("resnet", _IMAGE),
)
_INSIDE = 0.1, 0.9
"""The part of each range that unseen shapes come from; learning takes all of it."""
_MEDIAN_BAR, _WORST_BAR = 0.001, 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRow(Row):
    """One event at one unseen shape."""

    model: str
    sizes: str
    """As JSON."""
    event: str
    predicted_bytes: float
    counted_bytes: int

    @property
    def error(self) -> float:
        """|predicted − counted| ÷ counted."""
        return abs(self.predicted_bytes - self.counted_bytes) / self.counted_bytes


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Compare, for every model."""
    answer = Answer()
    task = {"steps": options.steps, "shapes": options.shapes}
    for name in names_of(_SPECS, settings.models):
        own = rows_of(HeldRow, "held", settings, model=name, **task)
        errors = [row.error for row in own]
        median, most = quantile(errors, 0.5), worst(errors)
        line = {
            "shapes": len({row.sizes for row in own}),
            "events": len(own),
            "median": percent(median, 4),
            "worst": percent(most, 4),
        }
        bars = [
            Bar("median error", median, _MEDIAN_BAR, is_share=True),
            Bar("worst error", most, _WORST_BAR, is_share=True),
        ]
        answer.add(name, own, line, bars)
    return answer


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Learn, then predict and count at unseen shapes."""
    spec = _SPECS[task["model"]]
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"]))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    plain = spec.build(task["seed"])
    with attach(loop.model, AMPLE_BYTES, planner="auto", meter=loop.meter) as session:
        for _ in range(task["steps"]):
            loop.step(spec.batch(spec.draw(generator), generator))
        for _ in range(task["shapes"]):
            sizes = spec.draw(generator, *_INSIDE)
            batch = spec.batch(sizes, generator)
            problem = session.planning_problem(argument_sizes(batch))
            counted = count_held_bytes(plain, batch)
            held = dict(zip(problem.events, problem.held_bytes[:, 0], strict=True))
            for event, n_bytes in counted:
                yield {
                    "model": spec.model,
                    "sizes": json.dumps(sizes),
                    "event": event,
                    "predicted_bytes": float(held[event]),
                    "counted_bytes": n_bytes,
                }


class _CountHeld(Patch):
    """Counts what each call of a layer makes that is alive when it returns."""

    def __init__(
        self, name: str, module: nn.Module, counted: list[tuple[str, int]]
    ) -> None:
        super().__init__(module)
        self._name = name
        self._n_calls = 0
        self._counted = counted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer and count."""
        with StorageTracker() as tracker:
            output = self.original(*args, **kwargs)
            event = f"{self._name}#{self._n_calls}"
            self._counted.append((event, tracker.live_bytes))
        self._n_calls += 1
        return output


def count_held_bytes(
    model: nn.Module, batch: Mapping[str, Any]
) -> Sequence[tuple[str, int]]:
    """Run a plain forward; return each event with what it made that is still alive."""
    counted: list[tuple[str, int]] = []
    patches = [_CountHeld(*named, counted) for named in find_units(model, None)]
    try:
        model(**batch, **_without_cache(model))
    finally:
        for patch in patches:
            patch.remove()
    return counted


def _without_cache(model: nn.Module) -> dict[str, bool]:
    """Say what the library says to a training call of a model that can cache."""
    config = getattr(model, "config", None)
    return {"use_cache": False} if getattr(config, "use_cache", None) else {}
