"""Predicts what the calls of a layer hold and cost under each action."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimose.cost.model import CostModel
from mimose.cost.pattern import LayerCall, Neighbours, Pattern
from mimose.cost.quantity import (
    AGAIN,
    Quantity,
    QuantityKind,
    backward_sizes,
    of_backward,
)
from mimose.cost.uncounted import uncounted, uncounted_bytes
from mimose.planners import ActionSpec
from mimose.types import Sizes, StepInput

_MOVED = 2.5
"""Bytes that operators move for each byte that they pack or rebuild, if not counted."""
_COPIED = 120.0
"""Bytes moved in the time of copying one to the host: 3 TB/s against 25 GB/s."""
_AND_COPIES = 1.01
"""Cost factor of an action that recomputes and copies to the host, relative to a plain
recomputation. At equal costs planners would always prefer it."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """One class of calls: its predictions."""

    model: CostModel
    step_input: StepInput
    call: LayerCall
    """A call of the class."""
    neighbours: Neighbours
    sizes: Sizes
    """The sizes of that call."""

    @property
    def backward_sizes(self) -> Sizes:
        """The sizes that its backward depends on."""
        return backward_sizes(self.step_input, self.sizes, self.neighbours)

    @property
    def known(self) -> tuple[str, ...]:
        """The actions that plans may use: first, least, and others that are known."""
        menu = self.model.menu
        return tuple(
            action
            for action in menu.names
            if action in (menu.first, menu.least) or self._is_known(self._held(action))
        )

    def lacks(self, action: str) -> bool:
        """Whether an action must still be measured."""
        own = self._own_backward("transient", action)
        why_not = self.model.why_unknown(own, self.backward_sizes)
        return bool(why_not) or action not in self.known

    def needed(self) -> Iterator[tuple[str, Quantity, Sizes]]:
        """Yield each series that a plan needs, with its name and its sizes.

        The backward of the first action is learned from planned steps, so plans are
        made without it.
        """
        name, first = self.call.name, self.model.menu.first
        allowed = self.model.allowed(self.call.layer)
        actions = [action for action in self.known if action in allowed]
        for action in actions:
            yield f"bytes held ({action}) of {name}", self._held(action), self.sizes
        for action in actions:
            yield f"forward ({action}) of {name}", self._forward(action), self.sizes
        for action in actions:
            if action != first:
                key, _ = self._backward(action)
                yield f"backward ({action}) of {name}", key, self.backward_sizes
        left = self._own_backward("retained")
        yield f"gradients of {name}", left, self.backward_sizes

    def _predict(self, key: Quantity) -> float:
        return self.model.predict(key, self.sizes)

    def _is_known(self, key: Quantity) -> bool:
        return not self.model.why_unknown(key, self.sizes)

    def _held(self, action: str) -> Quantity:
        return Quantity("exact", self.call.family, "held", action)

    def _forward(self, action: str) -> Quantity:
        """Return the series of an action's forward.

        If it is not known, the first action stands in, which holds the most.
        """
        menu, family = self.model.menu, self.call.family
        for name in (action, menu.first):
            own = Quantity("transient", family, "forward", name)
            if action == menu.least or self._is_known(own):
                return own
        return Quantity("transient", family, "forward", AGAIN)

    def _own_backward(self, kind: QuantityKind, action: str = "") -> Quantity:
        family = self.call.family
        return of_backward(kind, self.step_input, family, self.neighbours, action)

    def _backward(self, action: str) -> tuple[Quantity, bool]:
        """Return the series of an action's backward, and whether it is its own.

        If it is not known, the least action stands in, under which most measured steps
        run.
        """
        model, menu = self.model, self.model.menu
        own, least = (self._own_backward("transient", a) for a in (action, menu.least))
        if least not in model.series or not model.why_unknown(own, self.backward_sizes):
            return own, True
        return least, action == menu.least

    def retained_bytes(self) -> float:
        """Return the retained bytes of the backward, under any action."""
        return self.model.predict(self._own_backward("retained"), self.backward_sizes)

    def largest_bytes(self) -> float:
        """Return the bytes of its backward's largest tensor; 0 if not known."""
        return self._predict(Quantity("exact", self.call.family, "largest"))

    def numbers(self) -> NDArray[np.float64]:
        """Return (5, K): held, forward and backward transient peak, cost, host."""
        menu, family = self.model.menu, self.call.family
        held = [self._predict(self._held(action)) for action in menu.names]
        held[0] = max(held[0], held[-1])
        saved = self._predict(Quantity("exact", family, "own output"))
        forward = [self._predict(self._forward(action)) for action in menu.names]
        again = Quantity("transient", family, "forward", AGAIN)
        if self._is_known(again):
            forward[0] = max(forward[0], self._predict(again))
        own_names = [uncounted(family, self.neighbours, a) for a in menu.names]
        are_known = list(map(self._is_known, own_names))
        backward, cost, host = [], [], []
        for spec, own, is_known in zip(menu.specs, held, are_known, strict=True):
            key, is_own = self._backward(spec.name)
            over = self.model.predict(key, self.backward_sizes)
            if spec.recomputes or not is_own:
                # The readings exclude what the recomputation brings back.
                over += max(0.0, held[0] - own)
            # The next layer frees this layer's output: Note: [Least]. If the layer has
            # saved it, as a last ReLU does, it holds it unless it recomputes. Of the
            # last layer that may be what was not counted, if its output goes before
            # the forward ends, as in ResNet. In U-Net the head's backward frees it.
            if not spec.recomputes:
                is_last = is_known and not self.neighbours[1]
                counted = self.uncounted_bytes(spec.name) if is_last else 0.0
                over += max(0.0, saved - max(0.0, counted))
            backward.append(max(forward[0], over) if spec.recomputes else over)
            cost.append(self._cost(spec, held[0] - own))
            on_host = Quantity("exact", family, "host", spec.name)
            needs_all = spec.needs_host and not self._is_known(on_host)
            host.append(held[0] if needs_all else self._predict(on_host))
        held = [
            self.uncounted_bytes(a) + (own if is_known else min(own, held[0]))
            for a, own, is_known in zip(menu.names, held, are_known, strict=True)
        ]
        return np.array((held, forward, backward, cost, host))

    def uncounted_bytes(self, action: str, *, all_kept: bool = False) -> float:
        """Return what the call holds beyond what was counted."""
        own = self.call.family, self.neighbours, self.sizes
        return uncounted_bytes(self.model, *own, action, all_kept=all_kept)

    def _cost(self, spec: ActionSpec, freed_bytes: float) -> float:
        """Return an action's cost in FLOPs: those it runs, and those for its bytes.

        They are FLOPs of the fastest products of the model.

        Pointwise operators are bound by the memory. Those of a recomputation move about
        the bytes that it brings back, if they were not counted.
        """
        if spec.name == self.model.menu.first:
            return 0.0
        moved = Quantity("exact", self.call.family, "moved", spec.name)
        n_bytes = max(0.0, freed_bytes)
        if self._is_known(moved):
            n_bytes = self._predict(moved)
        elif not spec.recomputes:
            n_bytes *= _COPIED if spec.needs_host else _MOVED
        flops = self.flops(spec.name) * self.model.slowness(self.call.family)
        cost = flops + self.model.byte_flops * n_bytes
        if spec.recomputes and spec.needs_host:
            cost *= _AND_COPIES
        return cost or 1.0

    def flops(self, action: str) -> float:
        """Return the FLOPs that an action runs."""
        if action == self.model.menu.first:
            return 0.0
        menu = self.model.menu
        known_as = menu.least if menu.spec(action).recomputes else action
        return self._predict(Quantity("exact", self.call.family, "cost", known_as))


def layer_classes(
    model: CostModel, step_input: StepInput, pattern: Pattern
) -> list[LayerClass]:
    """Return each class of a pattern's calls."""
    own = pattern.own_sizes(step_input.sizes)
    return [
        LayerClass(model, step_input, pattern.calls[index], neighbours, own[index])
        for index, neighbours in pattern.layout.classes
    ]
