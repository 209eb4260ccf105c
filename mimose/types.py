"""Plain data that crosses between the folders, and the words for it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Sizes: TypeAlias = tuple[int, ...]


Context: TypeAlias = str
"""Names, in every process alike, all that changes costs at one shape."""


BY_ROWS = "~rows"
"""Ends the context of forwards whose loss goes by rows: see `mimose.loss_by_rows`."""


MOST_CONTEXTS = 64
"""Contexts remembered; then the least recently used is forgotten."""


class StepInput(NamedTuple):
    """What is known of a step before it runs."""

    context: Context
    """All that changes costs at one shape, but whether gradients are there."""
    sizes: Sizes
    """Every dimension of the root's tensors."""
    has_gradients: bool
    """Whether parameters hold gradients already (accumulation)."""
    structure: str = ""
    """What the root is called with, but for the sizes; contexts may share it."""
    counts: tuple[int, ...] = ()
    """How often each layer was called, where the forward has shown it."""


OnRecompute: TypeAlias = Callable[[Callable[[], Any], Sequence[Any]], Any]
"""Called in backward with what recomputes, which it has to call, and the tensors that
are given; returns what that returns."""


@dataclass(slots=True)
class Measured:
    """What was learned of one call."""

    name: str
    """``name#call``."""
    layer: int
    number: int
    sizes: Sizes
    """Its inputs'; once it has run, its outputs' behind them. (A layer that halves an
    image rounds odd sides up, which no polynomial of its inputs' sizes does.)"""
    action: str
    family: str = ""
    """Known once it has run: what it returns is part of it."""
    held_bytes: dict[str, float] = field(default_factory=dict)
    """By action, from the tracker; empty until the call is recomputed."""
    flops: int = 0
    """Of the whole recomputation, or of what was rebuilt."""
    early_flops: int = 0
    """Of these, what a recomputation runs that stops early; 0 where not known."""
    copied_bytes: float = 0.0
    """Copies of weights among what it would hold: see `mimose.cost.measured`."""
    part: int = 0
    """Which forward of its window it ran in."""
    host_bytes: dict[str, float] = field(default_factory=dict)
    """By action, what it held on the host."""
    freed: tuple[str, str, float] | None = None
    """An action that holds less than another does by what others had made."""
    kept_output_bytes: float | None = None
    """Of what it returns, what it saves itself if it is kept; None: not known."""
    has_gradient: bool = False

    def leave(self, sizes: Sizes) -> None:
        """Take in the sizes of its outputs."""
        self.sizes += sizes

    def belong_to(self, family: str) -> None:
        """Record its family."""
        self.family = family

    def note_gradient(self) -> bool:
        """Record a gradient; return whether it is the first."""
        is_first, self.has_gradient = not self.has_gradient, True
        return is_first

    def keep(self, action: str) -> None:
        """Record that it was kept, whatever was meant to be done."""
        self.action = action

    def set_held(self, action: str, n_bytes: float) -> None:
        """Take in what was held under the action that it ran under."""
        self.held_bytes = {**self.held_bytes, action: n_bytes}

    def set_host(self, action: str, n_bytes: float) -> None:
        """Take in what was held on the host under the action that it ran under."""
        self.host_bytes = {**self.host_bytes, action: n_bytes}

    def set_freed(self, action: str, like: str, n_bytes: float) -> None:
        """Take in what goes that others had made, while it is not needed.

        Args:
            action: Which it ran under.
            like: The action that holds as much, and these bytes.
            n_bytes: How many.
        """
        self.freed = action, like, n_bytes

    def count(
        self, held_bytes: dict[str, float], flops: int, early_flops: int = 0
    ) -> None:
        """Take in what was counted while the call ran in full."""
        if self.freed is not None:
            action, like, n_bytes = self.freed
            held_bytes = {**held_bytes, action: held_bytes[like] - n_bytes}
        self.held_bytes = held_bytes
        self.flops += flops
        self.early_flops = early_flops


@dataclass(frozen=True, slots=True)
class CallSample:
    """One call's segments in one step, by the action that each number speaks of.

    A step runs a call under one action, and what it shows of others is said here: a
    recomputation shows what keeping would hold and need. An action of which a segment
    says nothing, or whose reading was disturbed, is left out.
    """

    call: int
    held_bytes: Mapping[str, float]
    """From its exit to its backward."""
    forward_transient_bytes: Mapping[str, float]
    """Over the level when it is entered."""
    backward_transient_bytes: Mapping[str, float]
    """Over the level when the gradient arrives, beyond what the action first brings
    back: what the menu's first action would have held, less what it held itself."""
    backward_retained_bytes: Mapping[str, float]
    """Beyond the release of what the call held. Of actions without readings it is
    taken to be that of others."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of the whole action, should it be known to take less later (by an early
    stop)."""


@dataclass(frozen=True, slots=True)
class SegmentSample:
    """A segment outside the calls. None where the reading was disturbed."""

    retained_bytes: float | None
    transient_bytes: float | None
    backward_bytes: float | None = None
    """Of a loss: how far its backward rises over the level at the root's exit, below 0
    where it stays below. None: the root does not return it."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """All that one step's marks say."""

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
    """The segment, ``"head"`` or ``"loss"``, in which autocast lets its copies go."""
