"""Counts what the calls of a measured step hold, and chooses how.

Note: [Counted in turns]
To count a call operator by operator takes more of the host than the call itself. So
calls of one family at equal sizes share a count. In each measured step the first of
them that runs again is counted, and one more, in turns; each call is counted once
before it shares. Of the others, only what they save is summed up. If that differs, so
does what they hold.

If most calls of a family hold the same at equal sizes, one that differs by more than
the least safety margin gets a separate family, with those that differ alike.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from cachetools import LRUCache
from torch import nn

from mimose.cost.model import numbers
from mimose.cost.pattern import LayerCall
from mimose.exactness.layer import Layer
from mimose.exactness.slots import tensor_slots
from mimose.inputs.families import autocast_keeps_copies
from mimose.measure.storage import StorageTracker
from mimose.model.patch import hidden
from mimose.planners.actions import KEEP, RECOMPUTE
from mimose.tensors import nodes_of, storages_in
from mimose.torch_private import (
    base_of,
    gradient_bytes,
    next_sequence_number,
    top_saved_hooks,
)
from mimose.types import Measured, Sizes

_MOST_FAMILIES = 1024
_SEPARATOR = "/"
"""Stands between a family and the first call of those that left it."""
_APART = 0.01
"""The share by which calls of one family may differ; see Note: [Counted in turns]."""


class Reading(NamedTuple):
    """The counts of one call."""

    held_bytes: dict[str, float]
    """By action: bytes that would be held from the call's end to its backward. A full
    count gives those of `keep` and `recompute`."""
    flops: int
    early_flops: int
    """The part that a recomputation with an early stop runs."""
    peak_bytes: int
    """The highest total of what it made, as far as that can be counted."""
    saved_bytes: int
    """Bytes that its operators have saved, without parameters."""
    largest_bytes: int
    """The largest tensor that it saves or that its backward makes; 0 if not looked."""
    copied_bytes: float = 0.0
    """Bytes of copies of weights that autocast keeps."""
    saved_output_bytes: float | None = None
    """Bytes of its outputs that its own operators have saved; None if not known."""
    precision: str = ""
    """Of most FLOPs: see `mimose.cost.prices`; "" if not counted."""


Gauge: TypeAlias = Callable[
    [Callable[[], Any], Sequence[torch.Tensor]], tuple[Any, Reading]
]
"""Runs a call on some input tensors; returns its output and its counts."""


def by_operators(
    forward: Callable[[], Any], given: Sequence[torch.Tensor]
) -> tuple[Any, Reading]:
    """Run a call and count the storages that its operators make: a `Gauge`."""
    del given
    tracker, saves, began = StorageTracker(), _Saves(), next_sequence_number()
    with tracker:
        if top_saved_hooks(False) is None:
            output, early_flops, own = forward(), tracker.flops, None
        else:
            with saves.noted(lambda: tracker.flops):
                output = forward()
            early_flops, own = saves.flops, saves.bytes_of(output)
        live = float(tracker.live_bytes)
        copied = float(tracker.copied_bytes()) if autocast_keeps_copies() else 0.0
    held = {KEEP.name: live, RECOMPUTE.name: float(tracker.bytes_made(output))}
    flops, peak = tracker.flops, tracker.peak_bytes
    saved, largest = saves.total_bytes(), saves.largest(output, began)
    precision = tracker.precision()
    return output, Reading(
        held, flops, early_flops, peak, saved, largest, copied, own, precision
    )


def by_saved(
    forward: Callable[[], Any],
    given: Sequence[torch.Tensor],
    root: nn.Module,
    flops: int,
) -> tuple[Any, Reading]:
    """Run compiled code, whose operators cannot be counted, and count what it saves.

    Args:
        forward: Runs it.
        given: The call's input tensors.
        root: The model, whose own tensors do not count.
        flops: The FLOPs of the layer's forward.
    """
    others = [slot.now() for slot in tensor_slots(root.modules())]
    known = storages_in([*root.parameters(), *others, *given])
    saves = _Saves()
    with saves.noted():
        output = forward()
    returned = _sizes_in(output)
    live = _total({**saves.sizes, **returned}, known)
    held = {KEEP.name: live, RECOMPUTE.name: _total(returned, known)}
    # What operators made shows the largest tensor: a walk of each graph takes long.
    return output, Reading(held, flops, flops, int(live), saves.total_bytes(), 0)


def by_example(
    forward: Callable[[], Any], given: Sequence[torch.Tensor], example: Reading
) -> tuple[Any, Reading]:
    """Run a recomputation, and count only what it saves.

    Args:
        forward: Runs it.
        given: The call's input tensors.
        example: The counts of a call of its family at its sizes.
    """
    del given
    saves = _Saves()
    with saves.noted():
        output = forward()
    n_bytes, own = saves.total_bytes(), example.saved_output_bytes
    if own is not None:
        own = saves.bytes_of(output)
    more = n_bytes - example.saved_bytes
    held = {**example.held_bytes, KEEP.name: example.held_bytes[KEEP.name] + more}
    return output, example._replace(
        held_bytes=held,
        peak_bytes=example.peak_bytes + more,
        saved_bytes=n_bytes,
        saved_output_bytes=own,
    )


class _Saves:
    """What a forward saves for its backward, but parameters.

    Attributes:
        sizes: The bytes of each storage, by identity.
        flops: The FLOPs before the last saved tensor.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.flops = 0

    @contextlib.contextmanager
    def noted(self, flops: Callable[[], int] = int) -> Iterator[None]:
        """Note each tensor that is saved for a backward.

        Other hooks on saved tensors, such as those of a recomputation, still run.

        Args:
            flops: Returns the FLOPs so far.
        """
        pack, unpack = top_saved_hooks(False) or (lambda t: t, lambda t: t)

        def noted(tensor: torch.Tensor) -> Any:
            self.flops = flops()
            base = base_of(tensor)
            if not isinstance(tensor if base is None else base, nn.Parameter):
                self.sizes.update(_sizes_in(tensor))
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(hidden(noted), unpack):
            yield

    def total_bytes(self) -> int:
        """Sum the bytes of all."""
        return sum(self.sizes.values())

    def largest(self, output: object, began: int) -> int:
        """Return the bytes of the largest, or of the largest gradient.

        Args:
            output: What the call returned.
            began: What `next_sequence_number` returned as it began.
        """
        gradients = map(gradient_bytes, nodes_of(output, began))
        return max([0, *gradients, *self.sizes.values()])

    def bytes_of(self, output: object) -> float:
        """Sum the bytes of those that hold an output."""
        returned = _sizes_in(output).items()
        return float(sum(n_bytes for key, n_bytes in returned if key in self.sizes))


def _sizes_in(tree: object) -> dict[int, int]:
    return {key: storage.nbytes() for key, storage in storages_in(tree).items()}


def _total(sizes: Mapping[int, int], known: Container[int]) -> float:
    return float(sum(n_bytes for key, n_bytes in sizes.items() if key not in known))


class Gauges:
    """Chooses the gauge of each measured call: Note: [Counted in turns].

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._counted: LRUCache[str, dict[tuple[int, int], None]]
        self._counted = LRUCache(_MOST_FAMILIES)
        """By family, the calls that were counted, the longest ago first."""
        self._apart: dict[tuple[str, int, int], str] = {}
        """The families of calls that differ from those like them."""
        self._examples: dict[tuple[str, str, Sizes], Reading] = {}
        """The first count of this step, by family, action and sizes."""
        self._due: dict[str, tuple[int, int]] = {}
        """By family, the call whose turn it is in this step."""

    def begin(self) -> None:
        """Begin a step."""
        self._examples.clear()
        self._due.clear()

    def of_call(
        self,
        layer: Layer,
        inputs: Sequence[torch.Tensor],
        measured: Measured | None = None,
    ) -> Gauge:
        """Return the gauge of a call, which holds none of its arguments.

        Args:
            layer: Its layer.
            inputs: The call's input tensors.
            measured: What its recomputation shares with calls of its family; None if it
                shares nothing.
        """
        rows = _most_rows(inputs) if layer.is_compiled else 0

        def in_full(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            if layer.is_compiled:
                # Some inputs may have been away until now.
                flops = 2 * _n_weights(layer.module) * (rows or _most_rows(given))
                return by_saved(forward, given, self._root, flops)
            return by_operators(forward, given)

        def gauge(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            if measured is None or not measured.family:  # its forward runs
                return in_full(forward, given)
            key = measured.family, measured.action, numbers(measured.sizes)
            if not self._is_turn_of(measured) and key in self._examples:
                return by_example(forward, given, self._examples[key])
            output, reading = in_full(forward, given)
            self._examples.setdefault(key, reading)
            self._note_counted(measured)
            return output, reading

        return gauge

    def _is_turn_of(self, call: Measured) -> bool:
        """Whether a call is counted, even if it could share a count."""
        place = call.layer, call.number
        is_known = place in self._counted.get(call.family, ())
        return not is_known or self._due.get(call.family) == place

    def _note_counted(self, call: Measured) -> None:
        family, place = call.family, (call.layer, call.number)
        counted = self._counted.setdefault(family, {})
        counted.pop(place, None)
        counted[place] = None
        self._due.setdefault(family, next(iter(counted)))

    def own_family(self, family: str, call: Measured) -> str:
        """Return the family of a call, which may differ from those like it.

        Args:
            family: The family of calls like it.
            call: The call.
        """
        return self._apart.get((family, call.layer, call.number), family)

    def load(self, calls: Iterable[LayerCall]) -> None:
        """Load the families of calls that a saved state knows."""
        for call in calls:
            family, is_apart, _ = call.family.partition(_SEPARATOR)
            if is_apart:
                self._apart[family, call.layer, call.number] = call.family

    def split_families(self, calls: Sequence[Measured]) -> None:
        """Give calls that differ from most of their family another one.

        Args:
            calls: The calls of a step that were recomputed.
        """
        alike = defaultdict(list)
        for call in calls:
            # Under another action other tensors are made in the recomputation.
            alike[call.family, call.action, numbers(call.sizes)].append(call)
        for (family, *_), group in alike.items():
            counts = Counter(call.held_bytes[KEEP.name] for call in group)
            usual, n_usual = counts.most_common(1)[0]
            if 2 * n_usual <= len(group):
                continue
            base, *_ = family.split(_SEPARATOR)
            for call in group:
                held = call.held_bytes[KEEP.name]
                if abs(held - usual) > _APART * usual:
                    first = next(e for e in group if e.held_bytes[KEEP.name] == held)
                    call.family = f"{family}{_SEPARATOR}{first.name}"
                    self._apart[base, call.layer, call.number] = call.family


def _most_rows(inputs: Sequence[torch.Tensor]) -> int:
    """Return the rows of the largest input of a call."""
    rows = (
        tensor.numel() // tensor.shape[-1]
        for tensor in inputs
        if tensor.is_floating_point() and tensor.dim() and tensor.numel()
    )
    return max(rows, default=0)


def _n_weights(module: nn.Module) -> int:
    """Return how many weights the matrices of a layer have."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)
