"""Plain data that crosses between the folders, and the words for it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Sizes: TypeAlias = tuple[int, ...]


Uncounted: TypeAlias = Mapping[tuple[int, int], tuple[int, Sizes]]
"""Recomputations whose FLOPs are still to be counted: (unit, call) to family and own
sizes."""


Context: TypeAlias = str
"""Names, in every process alike, all that changes costs at one shape."""


MOST_CONTEXTS = 64
"""Contexts remembered; then the least recently used is forgotten."""


class StepFacts(NamedTuple):
    """What is known of a step before it runs."""

    context: Context
    """All that changes costs at one shape, but whether gradients are there."""
    sizes: Sizes
    """Every dimension of the root's tensors."""
    has_gradients: bool
    """Whether parameters hold gradients already (accumulation)."""
    structure: str = ""
    """What the root is called with, but for the sizes; contexts may share it."""
    base: Context = ""
    """What the root's arguments tell of the context, where that is not all of it: see
    `mimose.watch.variants`."""


OnRecompute: TypeAlias = Callable[[Callable[[], Any], Sequence[Any]], Any]
"""Called in backward with what recomputes, which it has to call, and the tensors that
are given; returns what that returns."""

KEEP = "keep"


RECOMPUTE = "recompute"


@dataclass(slots=True)
class Measured:
    """What was learned of one event."""

    name: str
    """``name#call``."""
    unit: int
    call: int
    sizes: Sizes
    """Its inputs'; once it has run, its outputs' behind them. (A layer that halves an
    image rounds odd sides up, which no polynomial of its inputs' sizes does.)"""
    action: str
    family: int = -1
    """Told once it has run: what it returns is part of it."""
    held_bytes: dict[str, float] = field(default_factory=dict)
    """By action, from the tracker; empty until the event is recomputed."""
    flops: int = 0
    """Of the whole recomputation."""
    copied_bytes: float = 0.0
    """Copies of weights among what it would hold: see `mimose.learn.copies`."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of the larger storages that it reads, by identity."""
    saved_inputs: set[int] = field(default_factory=set)
    """Those of them that it would hold if it were kept."""
    has_gradient: bool = False


@dataclass(frozen=True, slots=True)
class EventSample:
    """One event's segments in one step. None where a segment was not measured."""

    event: int
    held_bytes: dict[str, float]
    forward_excess_bytes: dict[str, float]
    """By action: under `recompute` from the forward, under `keep` from the
    recomputation (or, where the event was kept, from the forward)."""
    backward_excess_bytes: float | None
    """As if kept, over the level when the gradient arrives."""
    backward_net_bytes: float | None
    """Beyond the release of what the event held."""


@dataclass(frozen=True, slots=True)
class SegmentSample:
    """A segment outside the events. None where the reading was disturbed."""

    net_bytes: float | None
    excess_bytes: float | None


@dataclass(frozen=True, slots=True)
class StepSample:
    """All that one step's marks say."""

    events: tuple[EventSample, ...]
    gaps: tuple[SegmentSample, ...]
    """Before each event."""
    head: SegmentSample
    """From the last event's exit to the root's."""
    loss: SegmentSample | None
    """From the root's exit to the first gradient; None without a backward."""
    is_ordered: bool
    """Whether the gradients arrived in the reverse order of the events."""
    copies_end: str = ""
    """The segment, ``"head"`` or ``"loss"``, in which autocast lets its copies go."""
