"""What a workload is: a model, and batches of the sizes of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimose.bench.grid.traces import Sizes, SizeTrace
from mimose.watch.units import UnitsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task: a model and batches of the sizes of a trace."""

    name: str
    what: str
    """One line for people."""
    build: Callable[[str], nn.Module]
    """Takes a scale; returns the model in training mode."""
    batch: Callable[[Mapping[str, int], str, torch.Generator], dict[str, Any]]
    """Takes sizes, a scale and a generator; returns the model's keyword arguments,
    labels among them."""
    sizes: tuple[str, ...]
    """Names of the sizes that vary."""
    trace: Callable[[str], SizeTrace] | None
    """Takes a scale. None for a model of the user's own: nobody else knows its lengths,
    and which strategy suits it depends on little else."""
    is_synthetic: bool = True
    """Whether the trace is generated, not taken from real data."""
    learning_rate: float = 1e-4
    prepare: Callable[[Path], None] = lambda _: None
    """Takes a folder that all processes share, in each before all else: for what one
    makes and the others read."""
    evaluate: Callable[[nn.Module], float | None] = lambda _: None
    """Takes the model; returns its accuracy on held-out data, if there is any."""
    units: UnitsSpec = None
    """The modules to plan for, as `attach` takes them."""


def size_of(sizes: Mapping[str, int]) -> int:
    """Return the one number that the published system knows of a batch.

    The length of a text, the source's for pairs, height times width of images.
    """
    if "side" in sizes:
        return sizes["side"] ** 2
    if "height" in sizes:
        return sizes["height"] * sizes["width"]
    return sizes.get("source", next(iter(sizes.values())))


def largest(sizes: Sequence[Sizes]) -> list[Sizes]:
    """Return the few batches of which one needs most memory.

    Those with the largest product and sum of squares of their sizes, those with most
    pixels, and the largest in each size.
    """
    candidates = [
        max(sizes, key=lambda each: math.prod(each.values())),
        max(sizes, key=lambda each: sum(size * size for size in each.values())),
        max(sizes, key=lambda each: each.get("images", 1) * size_of(each)),
    ]
    for name in sizes[0]:
        candidates.append(max(sizes, key=lambda each: each[name]))
    return [each for i, each in enumerate(candidates) if each not in candidates[:i]]
