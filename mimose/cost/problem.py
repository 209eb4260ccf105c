"""Fills a `PlanningProblem` for any sizes, or says why it cannot be trusted.

It also predicts a plan's growth and extra FLOPs at exact sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.cost.copies import copies_gone, counted_twice, most_after_copies
from mimose.cost.model import CostModel
from mimose.cost.pattern import LayerCall, Neighbours, Pattern
from mimose.cost.quantity import (
    AGAIN,
    Quantity,
    QuantityKind,
    backward_sizes,
    of_backward,
    of_end,
    of_gap,
)
from mimose.cost.uncounted import uncounted, uncounted_bytes
from mimose.planners import ActionSpec, PlanningProblem, lay_out
from mimose.types import Sizes, StepInput

_MOVED = 2.5
"""Bytes that operators move for each byte that they pack or rebuild, if not counted."""
_COPIED = 120.0
"""Bytes moved in the time of copying one to the host: 3 TB/s against 25 GB/s."""
_AND_COPIES = 1.01
"""Cost factor of an action that recomputes and copies to the host, relative to a plain
recomputation. At equal costs planners would always prefer it."""


class Memory(NamedTuple):
    """The budget, what is held when a step begins, and what it will free."""

    budget_bytes: float
    start_bytes: float
    released_bytes: float
    """Outputs of the last step that are freed before the backward."""
    host_budget_bytes: float = math.inf
    """The budget for what actions hold on the host."""
    reserved_ratio: float = 1.0
    """Bytes of the device that the budget counts for each byte of growth."""

    @property
    def headroom_bytes(self) -> float:
        """The most that the step may grow."""
        return self.budget_bytes - self.start_bytes


# ------------------------------------------------------------------------------- trust


def why_unknown(model: CostModel, step_input: StepInput) -> str:
    """Return why no plan can be trusted at these sizes; "" if one can.

    Args:
        model: What was learned.
        step_input: The step's context and sizes.
    """
    if step_input.context not in model.patterns:
        return "nothing was measured with such inputs yet"
    if not step_input.counts and model.patterns[step_input.context].lacks_some(
        step_input.sizes
    ):
        return "more layers run at such sizes than in the steps measured"
    pattern = model.pattern(step_input)
    if not pattern.calls:
        return "no layer took part in the backward of such steps"
    if not pattern.is_ordered:
        return "gradients do not arrive in the reverse order of the layers"
    if not pattern.follows_rules:
        return "the sizes of the layers' inputs do not follow from the batch's sizes"
    for name, key, sizes in _needed(model, step_input, pattern):
        reason = model.why_unknown(key, sizes)
        if reason:
            return f"{name}: {reason}"
    return ""


def extrapolation_ratio(model: CostModel, step_input: StepInput) -> float:
    """Return the relative distance of sizes beyond the measured range."""
    high = model.pattern(step_input).high
    pairs = zip(step_input.sizes, high, strict=True)
    return max(0.0, *(size / max(1, most) - 1.0 for size, most in pairs))


def _needed(
    model: CostModel, step_input: StepInput, pattern: Pattern
) -> Iterator[tuple[str, Quantity, Sizes]]:
    """Yield each series that a plan needs, with its name for messages and its sizes."""
    for layer in _layers(model, step_input, pattern):
        yield from layer.needed()
    kinds: tuple[QuantityKind, ...] = ("retained", "transient")
    for kind in kinds:
        for pair in pattern.layout.gaps:
            between = of_gap(kind, step_input, pair)
            yield "between the layers", between, step_input.sizes
        yield "the head", of_end(kind, step_input, "head"), step_input.sizes
        yield "the loss", of_end(kind, step_input, "loss"), step_input.sizes


# ------------------------------------------------------------------------------ layers


@dataclass(frozen=True, slots=True)
class _Layer:
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


def _layers(model: CostModel, step_input: StepInput, pattern: Pattern) -> list[_Layer]:
    """Return each class of a pattern's calls."""
    own = pattern.own_sizes(step_input.sizes)
    return [
        _Layer(model, step_input, pattern.calls[index], neighbours, own[index])
        for index, neighbours in pattern.layout.classes
    ]


def unknown_actions(
    model: CostModel, step_input: StepInput
) -> tuple[tuple[str, ...], ...]:
    """Return for each call the actions that must still be measured.

    They are between the first and the least action. A call that a plan keeps can run
    under one of them, because that holds no more. Calls of one class have the same.

    Args:
        model: What was learned.
        step_input: The step's context and sizes.
    """
    pattern, between = model.pattern(step_input), model.menu.names[1:-1]
    if not between:
        return ((),) * len(pattern.calls)
    found = []
    for layer in _layers(model, step_input, pattern):
        allowed = model.allowed(layer.call.layer)
        found.append(tuple(a for a in between if a in allowed and layer.lacks(a)))
    return tuple(found[number] for number in pattern.layout.of_call)


# ----------------------------------------------------------------------------- filling


class _Head(NamedTuple):
    """The segment between the last layer's forward and its backward, in bytes."""

    retained: float
    before_release: float
    """Its peak over its start, before the last step's outputs are freed."""
    after_release: float
    """Its peak after that, as if none of them were freed."""
    after_copies: float
    """The same after all layers' copies of weights are freed."""


def _gap(
    model: CostModel, step_input: StepInput, pair: Neighbours
) -> tuple[float, float]:
    """Return a gap's retained bytes and transient peak."""
    sizes = step_input.sizes
    retained = model.predict(of_gap("retained", step_input, pair), sizes)
    return retained, model.predict(of_gap("transient", step_input, pair), sizes)


def _head(model: CostModel, step_input: StepInput, pattern: Pattern) -> _Head:
    def predict(kind: QuantityKind, name: Literal["head", "loss"]) -> float:
        return model.predict(of_end(kind, step_input, name), step_input.sizes)

    retained, rise = predict("retained", "head"), predict("transient", "loss")
    return _Head(
        retained + predict("retained", "loss"),
        predict("transient", "head"),
        retained + rise,
        retained + most_after_copies(model, step_input, pattern.calls, rise),
    )


def fill_problem(
    model: CostModel,
    step_input: StepInput,
    memory: Memory,
    budget_bytes: float | None = None,
) -> PlanningProblem:
    """Fill the planning problem of one shape.

    Args:
        model: What was learned.
        step_input: The step's context and exact sizes.
        memory: What is held, and the budget.
        budget_bytes: Another budget, such as one minus the margin.

    Raises:
        KeyError: Nothing was measured in this context.
    """
    pattern, menu = model.pattern(step_input), model.menu
    layout, layers = pattern.layout, _layers(model, step_input, pattern)
    tables = [layer.numbers() for layer in layers]
    table = np.array(tables).reshape(-1, 5, len(menu.names))
    held, forward, backward, cost, host = table[layout.of_call].transpose(1, 0, 2)
    retained = np.array([layer.retained_bytes() for layer in layers], dtype=float)
    gaps = [_gap(model, step_input, pair) for pair in layout.gaps]
    head, released = _head(model, step_input, pattern), memory.released_bytes
    rise = max(head.before_release, head.after_release - released)
    between = [gaps[at] for at in layout.of_gap]
    between.append((head.retained - released, rise))
    gap_bytes, gap_transient_bytes = np.array(between).T
    known, allowed = [layer.known for layer in layers], []
    counted = {*pattern.counted}
    for call, number in zip(pattern.calls, layout.of_call, strict=True):
        may = {*known[number]} & {*model.allowed(call.layer)}
        if menu.least in may and call.place not in counted:
            may = {menu.least}
        allowed.append([name in may for name in menu.names])
    budget = memory.budget_bytes if budget_bytes is None else budget_bytes
    return PlanningProblem(
        calls=tuple(call.name for call in pattern.calls),
        actions=menu.names,
        allowed=np.array(allowed, dtype=np.bool_).reshape(held.shape),
        held_bytes=held,
        forward_transient_bytes=forward,
        backward_transient_bytes=backward,
        backward_retained_bytes=retained[layout.of_call],
        cost=cost,
        gap_bytes=gap_bytes,
        gap_transient_bytes=gap_transient_bytes,
        start_bytes=max(0.0, memory.start_bytes),
        budget_bytes=max(0.0, budget),
        host_bytes=host,
        host_budget_bytes=memory.host_budget_bytes,
        lossy=menu.lossy,
    )


# ----------------------------------------------------------------- plans at exact sizes


@dataclass(frozen=True, slots=True)
class Growth:
    """A plan's predicted growth at one exact shape.

    The start of a step includes outputs of the last step. If they are freed before the
    backward, only the growth after the forward is lower.
    """

    before_release_bytes: float
    after_release_bytes: float
    """The growth after the forward, as if nothing were freed."""
    largest_bytes: float = 0.0
    """The largest tensor of a layer's backward; 0 if none is known."""

    def bytes(self, released_bytes: float) -> float:
        """Return the growth if this much is freed."""
        after = self.after_release_bytes - released_bytes
        return max(self.before_release_bytes, after)


def plan_growth(
    model: CostModel,
    step_input: StepInput,
    problem: PlanningProblem,
    actions: Sequence[str],
    released_bytes: float,
) -> Growth:
    """Predict a plan's growth at the problem's sizes, before and after the release.

    The problem counts copies of kept layers twice until the context ends; they are
    subtracted here. So is what is freed only if all layers before are kept. A step of C
    calls has 3 C + 1 segments: a gap and a forward for each, the head, and the
    backwards from the last call to the first.

    Args:
        model: The cost model.
        step_input: The step's context and sizes.
        problem: The problem of this step.
        actions: The plan's actions, one for each call.
        released_bytes: Bytes held at the start that are freed in the head.
    """
    choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
    laid_out, at_head = lay_out(problem, choice), 2 * len(actions)
    peaks = laid_out.peak_bytes_by_segment - problem.start_bytes
    level = laid_out.level_bytes[at_head] - problem.start_bytes
    pattern, first = model.pattern(step_input), model.menu.first
    layers, n_kept = _layers(model, step_input, pattern), 0
    while n_kept < len(actions) and actions[n_kept] == first:
        layer = layers[pattern.layout.of_call[n_kept]]
        n_kept += 1
        if layer.neighbours[1] != layer.call.family:  # the last one of its family
            gone = layer.uncounted_bytes(first)
            gone -= layer.uncounted_bytes(first, all_kept=True)
            peaks[2 * n_kept :] -= gone
            level -= gone if 2 * n_kept <= at_head else 0.0
    copied = np.cumsum(counted_twice(model, pattern, actions))
    twice = float(copied[-1]) if len(copied) else 0.0
    peaks[2:at_head] -= np.repeat(copied[:-1], 2)
    head = _head(model, step_input, pattern)
    before = (0.0, *peaks[:at_head], level - twice + head.before_release)
    rises = level + head.after_release
    if pattern.copies_end == "loss":
        gone = copies_gone(model, pattern.calls, actions)
        over = max(head.after_copies - gone, head.retained)
        rises = level - twice + over
    # In the problem the release is part of the head.
    after = (rises, *(peaks[at_head + 1 :] + released_bytes))
    kinds = {(layer.call.family, tuple(layer.sizes)): layer for layer in layers}
    largest = max((layer.largest_bytes() for layer in kinds.values()), default=0.0)
    return Growth(float(max(before)), float(max(after)), largest)


def step_work(
    model: CostModel, step_input: StepInput, actions: Sequence[str]
) -> tuple[float, float, float]:
    """Return the FLOPs of the layers' forwards, the bytes they save, and a plan's cost.

    Args:
        model: What was learned.
        step_input: The step's context and exact sizes.
        actions: The plan's, one a call.
    """
    pattern, names = model.pattern(step_input), model.menu.names
    layers = _layers(model, step_input, pattern)
    tables = [layer.numbers() for layer in layers]
    of_forwards = [layer.flops(model.menu.least) for layer in layers]
    flops = held = cost = 0.0
    for number, action in zip(pattern.layout.of_call, actions, strict=True):
        holds, _, _, costs, _ = tables[number]
        flops += of_forwards[number]
        held += float(holds[0])
        cost += float(costs[names.index(action)])
    return flops, held, cost


def extra_flops(
    model: CostModel, step_input: StepInput, actions: Sequence[str]
) -> tuple[int, ...]:
    """Return the FLOPs that a plan adds to each call.

    Args:
        model: What was learned.
        step_input: The step's context and exact sizes.
        actions: The plan's, one a call.
    """
    pattern = model.pattern(step_input)
    layers = _layers(model, step_input, pattern)
    pairs = zip(pattern.layout.of_call, actions, strict=True)
    return tuple(round(layers[number].flops(action)) for number, action in pairs)
