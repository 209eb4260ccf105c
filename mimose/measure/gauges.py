"""What a call of a layer holds and computes, counted while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.exact.impurities import tensor_attributes
from mimose.measure.tracker import StorageTracker
from mimose.tensors import storages_in
from mimose.types import KEEP, RECOMPUTE
from mimose.watch.compiled import saved_storages
from mimose.watch.families import autocast_keeps_copies


class Reading(NamedTuple):
    """What was counted of one call."""

    held_bytes: dict[str, float]
    """By action: what stays alive from the call's end to its backward."""
    flops: int
    peak_bytes: int
    """The highest total of what it made, as far as that can be counted."""
    copied_bytes: float = 0.0
    """Of it, copies of weights that autocast keeps: see `mimose.learn.copies`."""


Gauge: TypeAlias = Callable[
    [Callable[[], Any], Sequence[torch.Tensor]], tuple[Any, Reading]
]
"""Runs a call that is given some tensors; returns its output and what was counted."""


def by_operators(
    forward: Callable[[], Any], given: Sequence[torch.Tensor]
) -> tuple[Any, Reading]:
    """Run a call and count the storages that its operators make.

    Args:
        forward: Runs it.
        given: Its tensors.
    """
    del given
    tracker = StorageTracker()
    with tracker:
        output = forward()
        held = float(tracker.live_bytes)
        copied = float(tracker.copied_bytes()) if autocast_keeps_copies() else 0.0
    made = float(tracker.bytes_made(output))
    reading = Reading(
        {KEEP: held, RECOMPUTE: made}, tracker.flops, tracker.peak_bytes, copied
    )
    return output, reading


def by_saved(root: nn.Module, flops: int) -> Gauge:
    """Return a gauge for compiled code, whose operators cannot be watched.

    Args:
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
            held = _total({**saved, **returned}, known)
        reading = Reading(
            {KEEP: held, RECOMPUTE: _total(returned, known)}, flops, int(held)
        )
        return output, reading

    return run


def _total(
    storages: dict[int, torch.UntypedStorage], known: dict[int, torch.UntypedStorage]
) -> float:
    return float(
        sum(storage.nbytes() for key, storage in storages.items() if key not in known)
    )
