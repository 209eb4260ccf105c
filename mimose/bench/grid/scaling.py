"""A language model of which one thing grows: depth, length, batch, number of shapes.

Each point is a workload of its own. What does not grow is as in `_POINT`, and that
point belongs to every axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mimose.bench.grid.traces import Sizes, long_tail
from mimose.bench.grid.workload import Workload
from mimose.bench.zoo import builder
from mimose.report.page.looks import counted

_WIDTH = {"tiny": 128, "small": 256, "base": 768}
_VOCABULARY = 512
_SHORTEST = 8
"""The longest batch is so many times as long as the shortest can be."""
_SHARPNESS = 3.0
SCALED = ("full", "static", "mimose")
"""Strategies that are compared there."""


@dataclass(frozen=True, slots=True)
class Point:
    """A size of everything that can grow."""

    depth: int = 6
    """Layers."""
    length: int = 256
    """Tokens of the longest batch."""
    batch: int = 8
    """Texts in a batch."""
    shapes: int = 64
    """Distinct lengths, at the most."""


_POINT = Point()
AXES: Mapping[str, tuple[int, ...]] = {
    "depth": (3, 6, 12, 24),
    "length": (128, 256, 512),
    "batch": (4, 8, 16),
    "shapes": (1, 4, 16, 64),
}
"""What grows, and the sizes it is tried at."""


def name_of(axis: str, value: int) -> str:
    """Return the name of the workload at a point of an axis."""
    if value == getattr(_POINT, axis):
        return "lm-scaling"
    return f"lm-{axis}-{value}"


def _workload(axis: str, value: int) -> Workload:
    point = dataclasses.replace(_POINT, **{axis: value})
    return Workload(
        name=name_of(axis, value),
        what=f"a language model: {point.depth} layers, {point.batch} texts, up to "
        f"{point.length} tokens, of at most {counted(point.shapes, 'length')}",
        build=functools.partial(_model, point),
        batch=functools.partial(_batch, point),
        sizes=("length",),
        trace=lambda _: functools.partial(_lengths, point),
    )


def _model(point: Point, scale: str) -> nn.Module:
    return builder(
        "GPT2Config",
        "GPT2LMHeadModel",
        **{"vocab_size": _VOCABULARY, "n_positions": point.length},
        **{"n_layer": point.depth, "n_embd": _WIDTH[scale], "n_head": 4},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )()


def _batch(
    point: Point, sizes: Mapping[str, int], scale: str, generator: torch.Generator
) -> dict[str, Any]:
    del scale
    shape = (point.batch, sizes["length"])
    ids = torch.randint(1, _VOCABULARY, shape, generator=generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _lengths(
    point: Point, generator: np.random.Generator, n_batches: int
) -> list[Sizes]:
    """Return lengths with a long tail; one, anywhere, is the longest there is."""
    least, most = point.length // _SHORTEST, point.length
    drawn = long_tail(least, most, _SHARPNESS)(generator, n_batches)
    lengths = np.array([sizes["length"] for sizes in drawn])
    lengths[generator.integers(n_batches)] = most
    known = np.linspace(most, least, min(point.shapes, most - least + 1)).round()
    nearest = np.abs(lengths[:, None] - known).argmin(axis=1)
    return [{"length": int(known[index])} for index in nearest]


SCALING: Mapping[str, Workload] = {
    name_of(axis, value): _workload(axis, value)
    for axis, values in AXES.items()
    for value in values
}
"""The workloads of all points, by name."""
