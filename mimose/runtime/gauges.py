"""Chooses how each call of a measured step is counted.

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

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cachetools import LRUCache
from torch import nn

from mimose.cost.model import numbers
from mimose.cost.pattern import LayerCall
from mimose.exactness.layer import Layer
from mimose.memory.marks import Gauge, Reading, by_example, by_operators, by_saved
from mimose.planners.actions import KEEP
from mimose.types import Measured, Sizes

_MOST_FAMILIES = 1024
_SEPARATOR = "/"
"""Stands between a family and the first call of those that left it."""
_APART = 0.01
"""The share by which calls of one family may differ; see Note: [Counted in turns]."""


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
