"""Fills a `PlanningProblem` for any sizes, and predicts a plan at exact sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from mimose.cost.copies import copies_gone, counted_twice, most_after_copies
from mimose.cost.layer import layer_classes
from mimose.cost.model import CostModel
from mimose.cost.pattern import Neighbours, Pattern
from mimose.cost.quantity import QuantityKind, of_end, of_gap
from mimose.planners import PlanningProblem, lay_out
from mimose.types import StepInput


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
    layout, layers = pattern.layout, layer_classes(model, step_input, pattern)
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
    layers, n_kept = layer_classes(model, step_input, pattern), 0
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
    layers = layer_classes(model, step_input, pattern)
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
    layers = layer_classes(model, step_input, pattern)
    pairs = zip(pattern.layout.of_call, actions, strict=True)
    return tuple(round(layers[number].flops(action)) for number, action in pairs)
