"""Plain data that the packages exchange. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Sizes: TypeAlias = tuple[int, ...]


Context: TypeAlias = str
"""Names everything that changes costs at one shape; the same in all processes."""


BY_ROWS = "~rows"
"""The end of the context of forwards whose loss is computed by rows."""


def without_rows(context: Context) -> Context:
    """Return the context of the same forwards, each loss computed at once."""
    return context.replace(BY_ROWS, "")


MOST_CONTEXTS = 64
"""The most contexts remembered; then the least recently used is dropped."""


class StepInput(NamedTuple):
    """What is known of a step before it runs."""

    context: Context
    """Everything that changes costs at one shape, except `has_gradients`."""
    sizes: Sizes
    """Every dimension of the tensors that the model gets."""
    has_gradients: bool
    """Whether parameters hold gradients already (accumulation)."""
    structure: str = ""
    """The arguments of the model without their sizes; contexts may share it."""
    counts: tuple[int, ...] = ()
    """How often each layer was called; empty before the forward has shown it."""


OnRecompute: TypeAlias = Callable[[Callable[[], Any], Sequence[Any]], Any]
"""Runs in the backward in place of a recomputation, which it gets and must call, with
the input tensors. Returns what the recomputation returns."""


@dataclass(slots=True)
class Measured:
    """What was measured of one layer call."""

    name: str
    """``name#call``."""
    layer: int
    number: int
    sizes: Sizes
    """The sizes of its inputs and, once it has run, of its outputs. (A layer that
    halves an image rounds odd sides up; no polynomial of its input sizes does that.)"""
    action: str
    family: str = ""
    """Known once it has run, because its outputs are part of it."""
    held_bytes: dict[str, float] = field(default_factory=dict)
    """By action; empty until the call is recomputed."""
    flops: int = 0
    """FLOPs of the whole recomputation, or of what was rebuilt."""
    early_flops: int = 0
    """FLOPs of a recomputation that stops early; 0 if not known."""
    copied_bytes: float = 0.0
    """Copies of weights in what it would hold: see `mimose.cost.measured`."""
    dropped_copies: dict[str, float] = field(default_factory=dict)
    """The bytes of those that are dropped, by action."""
    costs: dict[str, float] = field(default_factory=dict)
    """FLOPs of products that run again, by action that rebuilds."""
    moved_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that other operators read and write again, by action."""
    precision: str = ""
    """Of most FLOPs of its products: see `mimose.cost.prices`; "" if not counted."""
    largest_bytes: float = 0.0
    """The largest tensor that it saves or that its backward makes; 0 if not known."""
    part: int = 0
    """The forward of its window in which it ran."""
    host_bytes: dict[str, float] = field(default_factory=dict)
    """By action, the bytes that it held on the host."""
    freed: tuple[str, str, float] | None = None
    """Its action, another one that holds as much, and the bytes of other code that the
    first frees until the backward."""
    kept_output_bytes: float | None = None
    """The part of its outputs that it saves itself if it is kept; None: not known."""
    has_gradient: bool = False

    def hold_copies(self) -> None:
        """Record that another call holds the copies that this one dropped."""
        for action, n_bytes in self.dropped_copies.items():
            if action in self.held_bytes:
                self.held_bytes[action] += n_bytes
        self.dropped_copies = {}

    def count(
        self, held_bytes: dict[str, float], flops: int, early_flops: int = 0
    ) -> None:
        """Record what was counted while the whole call ran again."""
        if self.freed is not None:
            action, like, n_bytes = self.freed
            held_bytes = {**held_bytes, action: held_bytes[like] - n_bytes}
        self.held_bytes = held_bytes
        self.flops += flops
        self.early_flops = early_flops


@dataclass(frozen=True, slots=True)
class CallSample:
    """The segments of one layer call in one step; each number by its action.

    A step runs a call under one action, but shows numbers of other actions too: a
    recomputation shows what keeping would hold and need. Actions without a number, or
    with a disturbed reading, are left out.
    """

    call: int
    held_bytes: Mapping[str, float]
    """From its exit to its backward."""
    forward_transient_bytes: Mapping[str, float]
    """Above the level at its entry."""
    backward_transient_bytes: Mapping[str, float]
    """Above the level when the gradient arrives, without what the action restores
    first: what keeping would have held, minus what the action held."""
    backward_retained_bytes: Mapping[str, float]
    """Without the release of what the call held. Actions without readings use those of
    the others."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of the whole action, if it may take less later (by an early stop)."""


@dataclass(frozen=True, slots=True)
class SegmentSample:
    """A segment outside the layer calls. None if the reading was disturbed."""

    retained_bytes: float | None
    transient_bytes: float | None
    backward_bytes: float | None = None
    """For a loss: by how much its backward rises above the level at the model's exit,
    negative if it stays below. None: the model does not return the loss."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """The samples of one step."""

    calls: tuple[CallSample, ...]
    gaps: tuple[SegmentSample, ...]
    """Before each call."""
    head: SegmentSample
    """From the last call's exit to the root's."""
    loss: SegmentSample | None
    """From the root's exit to the first gradient; None without a backward."""
    is_ordered: bool
    """Whether the gradients arrived in the reverse order of the calls."""
    copies_end: str = ""
    """The segment, ``"head"`` or ``"loss"``, in which autocast frees its copies."""
