"""What a call of a layer holds and computes, counted while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.exactness.impurities import tensor_attributes
from mimose.inputs.compiled import saved_storages
from mimose.inputs.families import autocast_keeps_copies
from mimose.memory.tracker import StorageTracker
from mimose.tensors import storages_in


class Counted(NamedTuple):
    """Bytes of what a whole call made, at its end."""

    live_bytes: float
    """All that lives."""
    output_bytes: float
    """What of it was returned."""


Teach: TypeAlias = Callable[[Counted], dict[str, float]]
"""Tells, by action, what would be held of a call from its end to its backward."""


class Reading(NamedTuple):
    """What was counted of one call."""

    held_bytes: dict[str, float]
    """By action: what would stay alive from the call's end to its backward."""
    flops: int
    peak_bytes: int
    """The highest total of what it made, as far as that can be counted."""
    copied_bytes: float = 0.0
    """Of it, copies of weights that autocast keeps: see `mimose.cost.copies`."""


Gauge: TypeAlias = Callable[
    [Callable[[], Any], Sequence[torch.Tensor]], tuple[Any, Reading]
]
"""Runs a call that is given some tensors; returns its output and what was counted."""


def by_operators(teach: Teach) -> Gauge:
    """Return a gauge that counts the storages that a call's operators make.

    Args:
        teach: Tells what actions would hold of it.
    """

    def run(
        forward: Callable[[], Any], given: Sequence[torch.Tensor]
    ) -> tuple[Any, Reading]:
        del given
        tracker = StorageTracker()
        with tracker:
            output = forward()
            live = float(tracker.live_bytes)
            copied = float(tracker.copied_bytes()) if autocast_keeps_copies() else 0.0
        held = teach(Counted(live, float(tracker.bytes_made(output))))
        return output, Reading(held, tracker.flops, tracker.peak_bytes, copied)

    return run


def by_saved(teach: Teach, root: nn.Module, flops: int) -> Gauge:
    """Return a gauge for compiled code, whose operators cannot be watched.

    Args:
        teach: Tells what actions would hold of it.
        root: The model, whose own tensors do not count.
        flops: Of the layer's forward.
    """

    def run(
        forward: Callable[[], Any], given: Sequence[torch.Tensor]
    ) -> tuple[Any, Reading]:
        attributes = tensor_attributes(root.modules())
        own = itertools.chain(root.parameters(), root.buffers(), attributes, given)
        known = storages_in(list(own))
        with saved_storages() as saved:
            output = forward()
            returned = storages_in(output)
            live = _total({**saved, **returned}, known)
        held = teach(Counted(live, _total(returned, known)))
        return output, Reading(held, flops, int(live))

    return run


def _total(
    storages: dict[int, torch.UntypedStorage], known: dict[int, torch.UntypedStorage]
) -> float:
    return float(
        sum(storage.nbytes() for key, storage in storages.items() if key not in known)
    )
